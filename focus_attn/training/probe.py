"""Letting dropped pairs teach.

A pair that hard routing drops has no gradient, so a router cannot learn that it should have kept it. A few queries, the
probes, therefore look at everything they drop: were key j added to what query i sees, its output o would move by

    w_ij (v_j - o_i)    with    w_ij = sigmoid(s_ij - lse_i)

and the router gets the gradient of that move times the soft affinity a_i . b_j. The output itself stays what hard
routing gives, to the bit, so all of it happens in the backward pass, by hand: autograd would launch twice as much. n
probes cost n / T of dense attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from focus_attn.layer import AttentionInputs
from focus_attn.router import Routing
from focus_attn.visibility import Pattern, Tokens, memberships, near_and_reachable, shares_group


class Probe:
    """The probes of one training step: the same queries in every layer, and again when a checkpointed layer reruns."""

    def __init__(self, tokens: int, first: int, count: int, weight: float, device: torch.device) -> None:
        """`count` queries, drawn from `first` on, stand for all of them."""
        self.positions = torch.randint(first, tokens, (count,), device=device)
        self.scale = weight * (tokens - first) / count
        self._far: dict[Pattern, Tensor] = {}

    def __call__(
        self,
        inputs: AttentionInputs,
        routing: Routing,
        gates: tuple[Tensor, Tensor],
        pattern: Pattern,
        out: Tensor,
        lse: Tensor,
    ) -> Tensor:
        """`out` [B, H, T, Dv] in value, with the gradients of what the probes drop. gates: log assignments [B, R, T, K]
        of both sides, which alone receive them. lse: [B, H, T]."""
        tensors = (inputs.q, inputs.k, inputs.v, lse, routing.query_groups, routing.key_groups)
        far = self._far_of(inputs.tokens, pattern)
        given = _Given(self.positions, self.scale, far, inputs.scale, inputs.softcap, pattern.num_groups)
        return _DroppedPairs.apply(out, *gates, *tensors, given)  # type: ignore[no-any-return]

    def _far_of(self, tokens: Tokens, pattern: Pattern) -> Tensor:
        """[B, 1, n, T] bool: the keys that routing decides about. One batch, so all layers of a pattern share them."""
        if pattern not in self._far:
            at = self.positions
            segments = None if tokens.query_segments is None else tokens.query_segments[:, at]
            positions = tokens.query_positions[:, at]
            near, reachable = near_and_reachable(
                tokens._replace(query_positions=positions, query_segments=segments, plain=False), pattern
            )
            self._far[pattern] = reachable & ~near
        return self._far[pattern]


class _Given(NamedTuple):
    """What the backward pass needs to know besides the layer's tensors."""

    positions: Tensor  # [n]
    weight: float
    far: Tensor  # [B, 1, n, T]
    scale: float  # of q . k
    softcap: float | None
    num_groups: int


class _DroppedPairs(torch.autograd.Function):
    """The output as it is; the gates get the gradient of what the probes drop."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors_and_given: Any) -> Tensor:
        *tensors, ctx.given = tensors_and_given
        ctx.save_for_backward(out, *tensors)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(device_type=grad.device.type, enabled=False):
            query, key = _gate_gradients(ctx.given, grad, *ctx.saved_tensors)
        return (grad, query, key, *[None] * 7)


def _gate_gradients(
    given: _Given,
    grad: Tensor,
    out: Tensor,
    query_gate: Tensor,
    key_gate: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    query_groups: Tensor,
    key_groups: Tensor,
) -> tuple[Tensor, Tensor]:
    at, routers = given.positions, query_gate.shape[1]

    def probed(x: Tensor) -> Tensor:
        """[B, H, T, width] -> [B, Hkv, queries of all its heads, width] fp32: keys need no copy for every head."""
        return x.index_select(2, at).float().unflatten(1, (k.shape[1], -1)).flatten(2, 3)

    pull, seen = probed(grad) * given.weight, probed(out)
    scores = (probed(q) * given.scale) @ k.float().transpose(-1, -2)
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    weight = torch.sigmoid(scores - probed(lse[..., None]))
    gain = pull @ v.float().transpose(-1, -2) - (pull * seen).sum(-1, keepdim=True)
    by_router = (weight * gain).unflatten(2, (-1, len(at))).flatten(1, 2).unflatten(1, (routers, -1)).sum(2)

    query_ids = query_groups.index_select(2, at)
    if query_ids.shape[-1] == key_groups.shape[-1] == 1:
        apart = query_ids != key_groups.transpose(-1, -2)
    else:
        apart = ~shares_group(query_ids, key_groups, given.num_groups)
    affinity = by_router * (given.far & apart)  # its gradient, [B, R, n, T]
    keys, queries = (memberships(ids, given.num_groups).float() for ids in (key_groups, query_ids))
    query_grad = torch.zeros_like(query_gate).index_add_(2, at, affinity @ keys)
    return query_grad, affinity.transpose(-1, -2) @ queries
