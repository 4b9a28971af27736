"""Prefill of the whole model, cache filled, last logits out: Focus against the model's own dense attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from focus_attn.bench.timing import Contender, Contest, Measured, Timing, dense_and_focus, races
from focus_attn.model import FocusModel


@dataclass(frozen=True)
class PrefillRow:
    """One length. Router time is part of Focus's, and on its own as well."""

    length: int
    dense: Measured
    focus: Measured
    routers: Measured
    pairs_kept: float | None  # share of the causal pairs, over all attention layers; None: not counted

    @property
    def timing(self) -> Timing:
        return dense_and_focus(self.length, {"dense": self.dense, "focus": self.focus})

    def to_dict(self) -> dict[str, Any]:
        sides: dict[str, Any] = {}
        for name, one in (("dense", self.dense), ("focus", self.focus), ("routers", self.routers)):
            sides[f"{name}_ms"] = round(1e3 * one.seconds, 3)
            sides[f"{name}_spread_ms"] = [round(1e3 * min(one.times), 3), round(1e3 * max(one.times), 3)]
            sides[f"{name}_peak_MiB"] = None if one.peak_bytes is None else round(one.peak_bytes / 2**20, 1)
        return {
            "length": self.length,
            "speedup": round(self.timing.speedup, 3),
            "repeats": self.timing.repeats,
            "pairs_kept": None if self.pairs_kept is None else round(self.pairs_kept, 4),
            **sides,
        }


def time_prefill(
    model: FocusModel, token_ids: Tensor, lengths: Sequence[int], repeats: int = 3, seconds: float = math.inf
) -> Iterator[Timing]:
    """Dense against Focus alone."""
    for row in prefill_rows(model, token_ids, lengths, repeats, seconds, count_pairs=False):
        yield row.timing


@torch.no_grad()
def prefill_rows(
    model: FocusModel,
    token_ids: Tensor,
    lengths: Sequence[int],
    repeats: int = 3,
    seconds: float = math.inf,
    count_pairs: bool = True,
) -> Iterator[PrefillRow]:
    """`token_ids` [N] is real text, repeated where it is shorter than a length: ids then come from the router."""
    device = next(model.parameters()).device
    longest = max(lengths, default=0)
    ids = token_ids.repeat(-(-longest // len(token_ids)))[None].to(device)

    def forward(length: int) -> object:
        return model.base_model(input_ids=ids[:, :length], use_cache=True, logits_to_keep=1)  # type: ignore

    def contest(length: int) -> Contest:
        return Contest(
            length,
            [
                Contender("dense", lambda: forward(length), context=model.disable_focus),
                Contender("focus", lambda: forward(length)),
                Contender("routers", _routers_alone(model, length)),
            ],
        )

    for length, measured in races(map(contest, lengths), repeats, seconds, device):
        kept = None
        if count_pairs:
            with model.record_stats() as stats:
                forward(length)
            kept = stats.pairs_kept
        yield PrefillRow(length, measured["dense"], measured["focus"], measured["routers"], kept)


def _routers_alone(model: FocusModel, length: int) -> Any:
    """Every layer's router on hidden states of its model's width, one layer after the other as in a forward."""
    routers = [layer.router for layer in model.focus_layers() if layer.router is not None]
    dtype = next(model.base_model.parameters()).dtype
    hidden = {
        place: torch.randn(1, length, routers[0].hidden_size, dtype=dtype, device=place)
        for place in {router.projection.device for router in routers}
    }

    def run() -> None:
        for router in routers:
            router(hidden[router.projection.device])

    return run
