"""Letting dropped pairs teach.

A pair that hard routing drops has no gradient, so a router cannot learn that it should have kept it. A few queries, the
probes, therefore look at everything they drop: were key j added to what query i sees, its output o would move by

    w_ij (v_j - o_i)    with    w_ij = sigmoid(s_ij - lse_i)

and the router gets the gradient of that move times the soft affinity a_i . b_j. The output itself stays what hard
routing gives, to the bit. n probes cost n / T of dense attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from focus_attn.attention.reference import spread_over_heads
from focus_attn.layer import AttentionInputs
from focus_attn.router import Routing
from focus_attn.visibility import Pattern, near_and_reachable, shares_group


class Probe:
    """The probes of one training step: the same queries in every layer, and again when a checkpointed layer reruns."""

    def __init__(self, tokens: int, first: int, count: int, weight: float, device: torch.device) -> None:
        """`count` queries, drawn from `first` on, stand for all of them."""
        self.positions = torch.randint(first, tokens, (count,), device=device)
        self.scale = weight * (tokens - first) / count

    def __call__(
        self, inputs: AttentionInputs, routing: Routing, gates: tuple[Tensor, Tensor], pattern: Pattern, out: Tensor
    ) -> Tensor:
        """`out` [B, H, T, Dv] in value, with the gradients of what the probes drop. gates: log assignments [B, R, T, K]
        of both sides, which alone receive them."""
        with torch.autocast(device_type=out.device.type, enabled=False):
            heads, at = out.shape[1], self.positions
            query, key = (gate.float().exp() for gate in gates)
            affinity = spread_over_heads(query[:, :, at] @ key.transpose(-1, -2), heads)  # [B, H, n, T]
            weight, values = self._what_is_dropped(inputs, routing, pattern)
            moved = weight * affinity
            move = moved @ values - moved.sum(-1, keepdim=True) * out[:, :, at].detach().float()
            move = self.scale * (move - move.detach())
        return out.index_add(2, at, move.to(out.dtype))

    @torch.no_grad()
    def _what_is_dropped(self, inputs: AttentionInputs, routing: Routing, pattern: Pattern) -> tuple[Tensor, Tensor]:
        """w [B, H, n, T], 0 where nothing is dropped, and the values [B, H, T, Dv], fp32."""
        heads, at, tokens = inputs.q.shape[1], self.positions, inputs.tokens
        k, v = (spread_over_heads(x.float(), heads) for x in (inputs.k, inputs.v))
        scores = (inputs.q[:, :, at].float() @ k.transpose(-1, -2)) * inputs.scale
        if inputs.softcap is not None:
            scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
        segments = None if tokens.query_segments is None else tokens.query_segments[:, at]
        probing = tokens._replace(query_positions=tokens.query_positions[:, at], query_segments=segments, plain=False)
        near, reachable = near_and_reachable(probing, pattern)
        shared = shares_group(routing.query_groups[:, :, at], routing.key_groups, pattern.num_groups)
        visible = spread_over_heads(near | (reachable & shared), heads)
        lse = scores.masked_fill(~visible, -math.inf).logsumexp(-1, keepdim=True)
        if inputs.sink_logits is not None:
            lse = torch.logaddexp(lse, inputs.sink_logits.float()[:, None, None])
        return torch.sigmoid(scores - lse) * (spread_over_heads(reachable, heads) & ~visible), v
