"""How many pairs routers keep, exactly and with a gradient.

The far keys of a query are a run: past the sinks, before the window. Which of them are kept is a sum over groups, so
running sums of the keys' assignments count them in time and memory linear in the length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus_attn.router import Routing
from focus_attn.training.packing import Packing
from focus_attn.visibility import Pattern, memberships


class PairCount:
    """Counts the pairs of a batch under one pattern, for any number of layers that have it."""

    def __init__(self, packing: Packing, pattern: Pattern) -> None:
        positions, real = packing.positions, packing.real
        place = torch.arange(positions.shape[1], device=positions.device)
        sliding = pattern.sliding_window
        slid_to = (positions - sliding + 1).clamp_min(0) if sliding is not None else torch.zeros_like(positions)
        far_from = slid_to.clamp_min(pattern.num_sinks)
        far_to = torch.maximum(far_from, positions - pattern.window)
        reachable = positions - slid_to + 1
        self.near = ((reachable - (far_to - far_from)) * real).sum()
        self.causal = ((positions + 1) * real).sum()
        document = place - positions  # where the token's document starts in its row
        self.first, self.last = document + far_from, document + far_to  # [B, T]
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


def soft_assignments(scores: Tensor, k: int, temperature: float) -> Tensor:
    """[..., K] scores -> how much of the token is in each group, k in all, none above 1."""
    return (k * (scores / temperature).softmax(-1)).clamp_max(1.0)


def straight_through(routing: Routing, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Hard assignments [B, R, T, K] in value, with the gradients of the soft ones."""
    groups = query.shape[-1]
    hard_query, hard_key = (
        memberships(ids, groups).to(query.dtype) for ids in (routing.query_groups, routing.key_groups)
    )
    return hard_query + (query - query.detach()), hard_key + (key - key.detach())
