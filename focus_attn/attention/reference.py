"""The oracle: the predicate as a dense mask, a softmax, nothing else. O(n²) memory, torch only. Every other backend
is right when it matches this one, on outputs and on gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.visibility import distant_mask, memberships, visible_mask


def reference_attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out [B, H, Tq, Dv] in the dtype of v, logsumexp [B, H, Tq] fp32 (-inf where a query sees nothing)."""
    with torch.autocast(device_type=call.q.device.type, enabled=False):
        return _in_fp32(call)


def _in_fp32(call: AttentionCall) -> tuple[Tensor, Tensor]:
    group_size = call.q.shape[1] // call.k.shape[1]
    k, v = (x.float().repeat_interleave(group_size, dim=1) for x in (call.k, call.v))
    scores = (call.q.float() @ k.transpose(-1, -2)) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    gate = straight_through_gate(call)
    if gate is not None:
        scores = scores + spread_over_heads(gate, scores.shape[1])

    visible = visible_mask(call.query_groups, call.key_groups, call.tokens, call.pattern)
    scores = scores.masked_fill(~spread_over_heads(visible, scores.shape[1]), -math.inf)
    lse = scores.logsumexp(-1)
    if call.sink_logits is not None:
        lse = torch.logaddexp(lse, call.sink_logits.float()[None, :, None])
    # A query that sees nothing: probabilities 0, not NaN, and no gradient.
    empty = ~spread_over_heads(visible.any(-1), scores.shape[1])
    probabilities = (scores - lse.masked_fill(empty, 0.0)[..., None]).exp()
    out = (probabilities @ v).to(call.v.dtype)
    return out, lse.masked_fill(empty, -math.inf).detach()


def straight_through_gate(call: AttentionCall) -> Tensor | None:
    """The training gate of hard routing, [B, R, Tq, Tk]: zero in value, so that the forward stays the hard function,
    with the gradient of log sum_g a_i[g] b_j[g] over the groups g that a kept distant pair shares."""
    if call.query_gate is None or call.key_gate is None:
        return None
    groups = call.pattern.num_groups
    query = call.query_gate.float().masked_fill(~memberships(call.query_groups, groups), -math.inf)
    key = call.key_gate.float().masked_fill(~memberships(call.key_groups, groups), -math.inf)
    distant = distant_mask(call.query_groups, call.key_groups, call.tokens, call.pattern)
    shared = query[..., :, None, :] + key[..., None, :, :]  # [B, R, Tq, Tk, K]
    # -inf everywhere on pairs that share nothing: their gradient would be NaN, so they leave before the logsumexp.
    gate = shared.masked_fill(~distant[..., None], 0.0).logsumexp(-1)
    gate = gate.masked_fill(~distant, 0.0)
    return gate - gate.detach()


def spread_over_heads(per_router: Tensor, heads: int) -> Tensor:
    """[B, R, ...] -> [B, H, ...]: every head takes the router of its KV head."""
    return per_router.repeat_interleave(heads // per_router.shape[1], dim=1)
