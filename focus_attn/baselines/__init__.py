"""What Focus is compared with: every peer in one seam, with its cost counted. See docs/baselines.md.

`RandomGroups` and `window_and_sinks` take the place of a FocusModel's routers: `model.override_routing(...)`. The
trained peers (LoRA, DoRA, full fine-tuning) are in `focus_attn.baselines.fine_tune`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from focus_attn.baselines.bigbird import BigBird
from focus_attn.baselines.budget import attention_shape, check_budget
from focus_attn.baselines.focus_cost import focus_ledger
from focus_attn.baselines.full import Full
from focus_attn.baselines.h2o import H2O
from focus_attn.baselines.linformer import Linformer
from focus_attn.baselines.loki import Loki
from focus_attn.baselines.magicpig import MagicPIG
from focus_attn.baselines.moba import MoBA
from focus_attn.baselines.performer import Performer
from focus_attn.baselines.random_groups import RandomGroups, RandomPairs
from focus_attn.baselines.routing_transformer import RoutingTransformer
from focus_attn.baselines.seam import Baseline, Cost, FittedBaseline, LayerCall, Ledger, use_baseline
from focus_attn.baselines.sparq import SparQ
from focus_attn.baselines.vertical_slash import VerticalSlash
from focus_attn.baselines.window import Window
from focus_attn.baselines.window_sinks import WindowSinks, window_and_sinks

__all__ = [
    "BASELINES",
    "Baseline",
    "Cost",
    "FittedBaseline",
    "LayerCall",
    "Ledger",
    "RandomGroups",
    "focus_ledger",
    "make_baseline",
    "use_baseline",
    "window_and_sinks",
]

_METHODS: tuple[Any, ...] = (
    Full,
    Window,
    WindowSinks,
    BigBird,
    RandomPairs,
    Performer,
    RoutingTransformer,
    Linformer,
    MoBA,
    VerticalSlash,
    SparQ,
    MagicPIG,
    H2O,
    Loki,
)
BASELINES: dict[str, Callable[..., Baseline]] = {method.name: method for method in _METHODS}


def make_baseline(
    name: str, *, budget: float | None = None, length: int | None = None, model: nn.Module | None = None, **options: Any
) -> Baseline:
    """A method by name, with its own settings as `options`, or at a given cost.

    Args:
        budget: share of the dense layer's multiply-adds, selection included, that the method may take on sequences of
            `length` tokens. It chooses the largest setting of its knob that stays within; options fix the others. A
            method that cannot go so low says so.
        model: whose head shapes are used to count; without it, heads of 64 that share no keys.
    """
    if name not in BASELINES:
        raise ValueError(f"no baseline {name!r}; there are {', '.join(sorted(BASELINES))}")
    method = BASELINES[name]
    if budget is None:
        return method(**options)
    within = getattr(method, "within", None)
    if within is None:
        raise ValueError(f"{name} has no knob that a `budget` could turn: make it without one")
    check_budget(budget, length)
    assert length is not None
    try:
        return within(budget, attention_shape(model, length), **options)
    except TypeError as error:
        raise ValueError(f"{name}: a `budget` and these options do not go together ({error})") from error
