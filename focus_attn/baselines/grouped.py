"""Pairs that are near, first, or share a group: the pattern of Focus with other ids, on Focus's own kernels.

Methods of this form are then timed as fairly as Focus is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus_attn.attention import focus_attention
from focus_attn.attention.plan import count_pairs
from focus_attn.baselines.call import LayerCall
from focus_attn.visibility import Pattern, Tokens


def grouped_attention(
    call: LayerCall, query_groups: Tensor, key_groups: Tensor, num_groups: int, window: int, num_sinks: int
) -> tuple[Tensor, float]:
    """-> ([B, H, T, Dv], pairs kept in all rows and heads). Groups [B, R, T, k], R = 1, Hkv or H."""
    rows, heads, length, _ = call.q.shape
    routers = query_groups.shape[1]
    spread = routers == heads and heads != call.k.shape[1]
    out = focus_attention(
        call.q,
        call.keys if spread else call.k,
        call.values if spread else call.v,
        query_groups,
        key_groups,
        num_groups=num_groups,
        window=window,
        num_sinks=num_sinks,
        scale=call.scale,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
    )
    assert isinstance(out, Tensor)
    if not call.counted:
        return out, 0.0
    positions = torch.arange(length, device=call.q.device).expand(rows, length)
    tokens = Tokens(positions, positions, plain=True)
    kept = count_pairs(query_groups, key_groups, tokens, Pattern(num_groups, window, num_sinks))
    return out, float(kept.sum()) * heads / routers


def near_or_first_attention(call: LayerCall, window: int, first: int) -> tuple[Tensor, float]:
    """No pair shares a group: i - j <= window or j < first."""
    zero = torch.zeros((), dtype=torch.long, device=call.q.device).expand(call.q.shape[0], 1, call.q.shape[2], 1)
    return grouped_attention(call, zero, zero + 1, 2, window, first)
