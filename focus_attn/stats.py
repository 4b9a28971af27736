"""What a forward did: how many pairs it kept, and how evenly the tokens spread over the groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.attention.plan import count_pairs
from focus_attn.router import Router
from focus_attn.visibility import EVERYTHING, Pattern, Tokens, memberships


class LayerStats(NamedTuple):
    """One attention layer. `dominance` and `group_sizes` are None where it is not routed."""

    layer_idx: int
    pairs_kept: float  # visible pairs over causal pairs
    dominance: float | None  # share of the largest key group, 1 / K when perfectly even
    group_sizes: list[list[int]] | None  # [R][K], tokens that belong to each group
    largest_groups: list[float] | None = None  # share of the largest key group of each router but dense heads


@dataclass
class _Tally:
    kept: float = 0.0  # sum over forwards of the kept share times the causal pairs
    causal: float = 0.0
    sizes: Tensor | None = None  # [R, K]
    choosing: Tensor | None = None  # the routers that are no dense heads


@dataclass
class Stats:
    """Filled while `FocusModel.record_stats()` is open.

    A soft training gate computes every pair: what is counted then is what the same routers keep when served.
    """

    _layers: dict[int, _Tally] = field(default_factory=dict)

    @property
    def pairs_kept(self) -> float:
        """Visible over causal pairs, averaged over batch rows, heads and all attention layers, dense ones included.

        Several forwards are weighted by their causal pairs.
        """
        return _mean([layer.pairs_kept for layer in self.per_layer])

    @property
    def dominance(self) -> float:
        """Share of the largest key group, averaged over the routers; 1 / K when perfectly even."""
        return _mean([layer.dominance for layer in self.per_layer if layer.dominance is not None])

    @property
    def per_layer(self) -> list[LayerStats]:
        layers = []
        for layer_idx, tally in sorted(self._layers.items()):
            kept = tally.kept / max(tally.causal, 1.0)
            if tally.sizes is None:
                layers.append(LayerStats(layer_idx, kept, None, None))
                continue
            largest = (tally.sizes.amax(-1) / tally.sizes.sum(-1).clamp_min(1)).double()[tally.choosing]
            layers.append(LayerStats(layer_idx, kept, largest.mean().item(), tally.sizes.tolist(), largest.tolist()))
        return layers

    def add(self, layer_idx: int, query_groups: Tensor, key_groups: Tensor, tokens: Tokens, pattern: Pattern) -> None:
        """Count the pairs of one layer in one forward."""
        tally = self._layers.setdefault(layer_idx, _Tally())
        visible = count_pairs(query_groups, key_groups, tokens, pattern).double()  # [B, R]
        everything = Pattern(num_groups=1, window=EVERYTHING)
        one_query_group, one_key_group = (torch.zeros_like(ids[:, :1, :, :1]) for ids in (query_groups, key_groups))
        causal = count_pairs(one_query_group, one_key_group, tokens, everything)[:, 0].double()  # [B]
        rows = causal > 0  # a row of padding alone has no pairs to keep
        if bool(rows.any()):
            share = (visible / causal.clamp_min(1)[:, None])[rows].mean().item()
            weight = causal.sum().item()
            tally.kept += share * weight
            tally.causal += weight

    def add_groups(self, layer_idx: int, new_key_groups: Tensor, real: Tensor, router: Router) -> None:
        """Count the groups that new tokens belong to. new_key_groups [B, R, T, key_k], real [B, T]."""
        tally, num_groups = self._layers.setdefault(layer_idx, _Tally()), router.config.num_groups
        tally.choosing = router.choosing.cpu()
        members = memberships(new_key_groups, num_groups) & real[:, None, :, None]
        sizes = members.sum((0, 2)).cpu()
        tally.sizes = sizes if tally.sizes is None else tally.sizes + sizes


def _mean(values: list[float]) -> float:
    if not values:
        raise ValueError("nothing was recorded: run a forward inside `with model.record_stats() as stats:`")
    return torch.tensor(values, dtype=torch.float64).mean().item()
