"""How many pairs routers keep, exactly and with a gradient.

The far keys of a query are a run: past the sinks, before the window. Which of them are kept is a sum over groups, so
running sums of the keys' assignments count them in time and memory linear in the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from focus_attn.gradients import first_order
from focus_attn.training.packing import Packing
from focus_attn.visibility import Pattern, far_run


class PairCount:
    """Counts the pairs of a batch under one pattern, for any number of layers that have it."""

    def __init__(self, packing: Packing, pattern: Pattern) -> None:
        positions, real = packing.positions, packing.real
        length = positions.shape[1]
        place = torch.arange(length, device=positions.device)
        far = far_run(positions, pattern)
        self.near = (far.near * real).sum()
        self.causal = ((positions + 1) * real).sum()
        document = place - positions  # where the token's document starts in its row
        # [B, T]. A document that has fewer tokens than sinks has nothing beyond them, whatever follows it.
        self.first, self.last = ((document + x).clamp_max(length) for x in (far.first, far.last))
        self.real = real

    def share(self, query: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """Kept over causal pairs, a scalar: mean over routers. Assignments [B, R, T, K]; none: nothing far is kept.
        Quickest where the tokens of a group lie side by side in memory."""
        if query is None or key is None:
            return self.near / self.causal.clamp_min(1)
        far = _FarPairs.apply(query, key, self.first, self.last, self.real) / query.shape[1]
        return (self.near + far) / self.causal.clamp_min(1)


class _FarPairs(torch.autograd.Function):
    """The sum over queries of what their runs of keys, `first` to before `last` [B, T], have of their groups.

    Linear on either side: a query's gradient is the sum over its run, a key's that over the queries whose runs hold it.
    Runs never move back along a row, so these queries are a run too, and both are differences of running sums.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, first: Tensor, last: Tensor, real: Tensor) -> Tensor:
        by_query = _sums_of_runs(key, first, last).mul_(real[:, None, :, None])
        ctx.save_for_backward(query, by_query, first, last, real)
        return (query * by_query).sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, by_query, first, last, real = ctx.saved_tensors
        place = torch.arange(query.shape[2], device=query.device).expand(len(query), -1).contiguous()
        begin, end = (torch.searchsorted(x.contiguous(), place, right=True) for x in (last, first))
        by_key = _sums_of_runs(query * real[:, None, :, None], begin, end)
        return by_query * grad, by_key.mul_(grad), None, None, None


def _sums_of_runs(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Sums of x [B, R, T, K] over tokens `first` to before `last` [B, T], for each entry of these: [B, R, T, K].
    Along the last dimension in memory: along another, CUDA walks through all tokens one by one."""
    batch, routers, length, groups = x.shape
    before = x.new_zeros(batch, routers, groups, length + 1)
    before[..., 1:] = x.transpose(-1, -2)
    before.cumsum_(-1)
    stop, start = (place[:, None, None].expand(-1, routers, groups, -1) for place in (last, first))
    return before.gather(-1, stop).sub_(before.gather(-1, start)).transpose(-1, -2)


def soft_assignments(probabilities: Tensor, k: int) -> Tensor:
    """[..., K] softmax of the scores -> how much of the token is in each group, k in all, none above 1."""
    return probabilities if k == 1 else (k * probabilities).clamp_max(1.0)


def straight_through(groups: Tensor, soft: Tensor) -> Tensor:
    """Ids [B, R, T, k] -> hard assignments [B, R, T, K] in value, with the gradients of the soft ones."""
    return _InPlaceOf.apply(groups, soft)  # type: ignore[no-any-return]


class _InPlaceOf(torch.autograd.Function):
    """Ids in value, soft assignments in gradient: `hard + soft - soft.detach()` without the sums."""

    @staticmethod
    def forward(ctx: Any, groups: Tensor, soft: Tensor) -> Tensor:
        return torch.zeros_like(soft).scatter_(-1, groups, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad
