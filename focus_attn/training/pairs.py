"""How many pairs routers keep, exactly and with a gradient.

The far keys of a query are a run: past the sinks, before the window. Which of them are kept is a sum over groups, so
running sums of the keys' assignments count them in time and memory linear in the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from focus_attn.training.packing import Packing
from focus_attn.visibility import Pattern, far_run, memberships


class PairCount:
    """Counts the pairs of a batch under one pattern, for any number of layers that have it."""

    def __init__(self, packing: Packing, pattern: Pattern) -> None:
        positions, real = packing.positions, packing.real
        place = torch.arange(positions.shape[1], device=positions.device)
        far = far_run(positions, pattern)
        self.near = (far.near * real).sum()
        self.causal = ((positions + 1) * real).sum()
        document = place - positions  # where the token's document starts in its row
        self.first, self.last = document + far.first, document + far.last  # [B, T]
        self.real = real[:, None, :, None]

    def share(self, query: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """Kept over causal pairs, a scalar: mean over routers. Assignments [B, R, T, K]; none: nothing far is kept."""
        if query is None or key is None:
            return self.near / self.causal.clamp_min(1)
        members = torch.nn.functional.pad(key.cumsum(2), (0, 0, 1, 0))  # of the keys before a place
        last, first = (
            members.gather(2, place[:, None, :, None].expand(query.shape)) for place in (self.last, self.first)
        )
        far = (query * (last - first) * self.real).sum() / query.shape[1]
        return (self.near + far) / self.causal.clamp_min(1)


def soft_assignments(probabilities: Tensor, k: int) -> Tensor:
    """[..., K] softmax of the scores -> how much of the token is in each group, k in all, none above 1."""
    return probabilities if k == 1 else (k * probabilities).clamp_max(1.0)


def straight_through(groups: Tensor, soft: Tensor) -> Tensor:
    """Ids [B, R, T, k] -> hard assignments [B, R, T, K] in value, with the gradients of the soft ones."""
    return _InPlaceOf.apply(memberships(groups, soft.shape[-1]).to(soft.dtype), soft)  # type: ignore[no-any-return]


class _InPlaceOf(torch.autograd.Function):
    """One tensor in value, another in gradient: `hard + soft - soft.detach()` without the sums."""

    @staticmethod
    def forward(ctx: Any, hard: Tensor, soft: Tensor) -> Tensor:
        return hard.view_as(hard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad
