"""Which backend `auto` takes for each shape, and why not the others."""

from __future__ import annotations

from typing import Any

from focus_attn.attention import backends
from focus_attn.bench.options import AttentionOptions


def explain_choices(options: AttentionOptions) -> list[dict[str, Any]]:
    """A list of {length, K, chosen, reasons: {backend: sentence}}."""
    choices = []
    for setting in {setting.ids: setting for setting in options.settings}.values():
        for length in options.lengths:
            call = setting.example_call(length)
            choices.append(
                {
                    "length": length,
                    "K": setting.ids.num_groups,
                    "chosen": backends.explain(call)[0][0],
                    "reasons": dict(backends.explain(call)),
                }
            )
    return choices
