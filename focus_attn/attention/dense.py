"""Calls in which every pair that may meet is near: plain causal or sliding attention, by what PyTorch finds fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from focus_attn.attention.call import AttentionCall

QUERIES_AT_ONCE = 512  # of a layer that slides: no more keys than these and its window are scored for them


def is_dense(call: AttentionCall) -> bool:
    """Whether a call is known, without a look at values, to be plain attention that PyTorch has."""
    num_queries, num_keys = call.q.shape[2], call.k.shape[2]
    sliding = call.pattern.sliding_window
    everything = call.pattern.window >= num_keys - 1 and (sliding is None or sliding >= num_keys)
    return (
        call.tokens.plain
        and (everything or _slides(call))
        and num_queries in (1, num_keys)
        and call.softcap is None
        and call.scale > 0  # PyTorch's kernels hide a pair before they multiply with it
        and call.sink_logits is None
        and call.query_gate is None
    )


def _slides(call: AttentionCall) -> bool:
    """Nothing beyond the sliding window, and that is near; on the CPU, whole sequences. CUDA has kernels for it."""
    sliding, num_queries = call.pattern.sliding_window, call.q.shape[2]
    return (
        sliding is not None
        and sliding - 1 <= call.pattern.window
        and 1 < num_queries == call.k.shape[2] > sliding
        and call.q.device.type == "cpu"
    )


def dense_attention(call: AttentionCall) -> Tensor:
    """[B, H, Tq, Dv]."""
    if _slides(call):
        return _sliding_attention(call)
    causal = call.q.shape[2] > 1  # one query is the last, and sees every key
    grouped = call.q.shape[1] != call.k.shape[1]
    return scaled_dot_product_attention(call.q, call.k, call.v, is_causal=causal, scale=call.scale, enable_gqa=grouped)


def _sliding_attention(call: AttentionCall) -> Tensor:
    """Some queries at a time, on the keys that any of them sees: a mask over all pairs would cost all pairs."""
    sliding = call.pattern.sliding_window
    assert sliding is not None
    grouped, length = call.q.shape[1] != call.k.shape[1], call.q.shape[2]
    parts = []
    for first in range(0, length, QUERIES_AT_ONCE):
        last, seen = min(first + QUERIES_AT_ONCE, length), max(0, first - sliding + 1)
        distance = torch.arange(first, last)[:, None] - torch.arange(seen, last)
        near = (distance >= 0) & (distance < sliding)
        q, k, v = call.q[:, :, first:last], call.k[:, :, seen:last], call.v[:, :, seen:last]
        parts.append(scaled_dot_product_attention(q, k, v, near, scale=call.scale, enable_gqa=grouped))
    return torch.cat(parts, dim=2)
