"""Letting dropped pairs teach.

A pair that hard routing drops has no gradient, so a router cannot learn that it should have kept it. A few queries, the
probes, therefore look at everything they drop: were key j added to what query i sees, its output o would move by

    w_ij (v_j - o_i)    with    w_ij = sigmoid(s_ij - lse_i)

and the router gets the gradient of that move times the soft affinity a_i . b_j. The output itself stays what hard
routing gives, to the bit, so all of it happens in the backward pass, by hand: autograd would launch twice as much. n
probes cost n / T of dense attention. On CUDA it is one pass over the keys (`probe_kernel.py`); what stands here is for
everything else, and says what that computes.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from focus_attn.gradients import first_order
from focus_attn.kernel_use import kernels, launching_on, needs_operators
from focus_attn.layer import AttentionInputs
from focus_attn.router import Routing
from focus_attn.visibility import Pattern, Tokens, memberships, near_and_reachable, shares_group

if TYPE_CHECKING:
    from focus_attn.attention.launch import Tile
    from focus_attn.training.probe_kernel import Reach


class Probe:
    """The probes of one training step: the same queries in every layer, and again when a checkpointed layer reruns."""

    def __init__(self, tokens: int, first: int, count: int, weight: float, device: torch.device) -> None:
        """`count` queries, drawn from `first` on, stand for all of them."""
        # Sorted: neighbours then reach about the same keys, and blocks of both that cannot meet are passed over.
        self.positions = torch.randint(first, tokens, (count,), device=device).sort().values
        self.scale = weight * (tokens - first) / count
        self._far: dict[Pattern, Tensor] = {}
        self._reach: dict[tuple[Pattern, Tile], Reach] = {}

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
        softcap = None if inputs.softcap is None else float(inputs.softcap)
        given = _Given(self, inputs.tokens, pattern, float(inputs.scale), softcap)
        return _DroppedPairs.apply(out, *gates, *tensors, given)  # type: ignore[no-any-return]

    def far(self, tokens: Tokens, pattern: Pattern) -> Tensor:
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

    def reach(self, tokens: Tokens, pattern: Pattern, kernel: ModuleType, tile: Tile) -> Reach:
        """The same as the kernel wants it, for a tile of its."""
        if (pattern, tile) not in self._reach:
            self._reach[pattern, tile] = kernel.find_reach(self.positions, tokens, pattern, tile)
        return self._reach[pattern, tile]


class _Given(NamedTuple):
    """What the backward pass needs to know besides the layer's tensors."""

    probe: Probe
    tokens: Tokens
    pattern: Pattern
    scale: float  # of q . k
    softcap: float | None


class _DroppedPairs(torch.autograd.Function):
    """The output as it is; the gates get the gradient of what the probes drop."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors_and_given: Any) -> Tensor:
        _, _, *tensors, ctx.given = tensors_and_given  # gates have gradients, and no say
        ctx.save_for_backward(out, *tensors)
        return out.view_as(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(device_type=grad.device.type, enabled=False):
            query, key = gate_gradients(ctx.given, grad, *ctx.saved_tensors)
        return (grad, query, key, *[None] * 7)


def gate_gradients(given: _Given, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the query's and the key's log assignments, [B, R, T, K] fp32. tensors: output, q, k, v, logsumexp,
    query groups, key groups."""
    out, q, k, v, lse, query_groups, key_groups = tensors
    kernel = kernels("focus_attn.training.probe_kernel", q.device)
    if kernel is None or needs_operators(grad, *tensors) or not kernel.serves(q, v, given.pattern.num_groups):
        return by_operators(given, grad, *tensors)
    probe, tokens, pattern, scale, softcap = given
    tile = kernel.tile_for(q, v)
    reach = probe.reach(tokens, pattern, kernel, tile)
    with launching_on(q.device):
        gradients: tuple[Tensor, Tensor] = kernel.gate_gradients(
            reach, tile, pattern, probe.scale, scale, softcap, grad, out, q, k, v, lse, query_groups, key_groups
        )
    return gradients


def by_operators(
    given: _Given,
    grad: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    query_groups: Tensor,
    key_groups: Tensor,
) -> tuple[Tensor, Tensor]:
    """By PyTorch's operators, with all scores of the probes in memory: the oracle."""
    probe, tokens, pattern, scale, softcap = given
    at, routers, groups = probe.positions, query_groups.shape[1], pattern.num_groups

    def probed(x: Tensor) -> Tensor:
        """[B, H, T, width] -> [B, Hkv, queries of all its heads, width] fp32: keys need no copy for every head."""
        return x.index_select(2, at).float().unflatten(1, (k.shape[1], -1)).flatten(2, 3)

    pull, seen = probed(grad) * probe.scale, probed(out)
    scores = (probed(q) * scale) @ k.float().transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weight = torch.sigmoid(scores - probed(lse[..., None]))
    gain = pull @ v.float().transpose(-1, -2) - (pull * seen).sum(-1, keepdim=True)
    by_router = (weight * gain).unflatten(2, (-1, len(at))).flatten(1, 2).unflatten(1, (routers, -1)).sum(2)

    query_ids = query_groups.index_select(2, at)
    if query_ids.shape[-1] == key_groups.shape[-1] == 1:
        apart = query_ids != key_groups.transpose(-1, -2)
    else:
        apart = ~shares_group(query_ids, key_groups, groups)
    affinity = by_router * (probe.far(tokens, pattern) & apart)  # its gradient, [B, R, n, T]
    keys, queries = (memberships(ids, groups).float() for ids in (key_groups, query_ids))
    query_grad = query_groups.new_zeros(*query_groups.shape[:3], groups, dtype=torch.float32)
    query_grad.index_add_(2, at, affinity @ keys)
    return query_grad, affinity.transpose(-1, -2) @ queries
