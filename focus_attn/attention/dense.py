"""Calls in which every causal pair is near: plain causal attention, by whatever PyTorch finds fastest."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from focus_attn.attention.call import AttentionCall


def is_dense(call: AttentionCall) -> bool:
    """Whether a call is known, without a look at values, to be plain causal attention that PyTorch has."""
    num_queries, num_keys = call.q.shape[2], call.k.shape[2]
    sliding = call.pattern.sliding_window
    return (
        call.tokens.plain
        and call.pattern.window >= num_keys - 1
        and (sliding is None or sliding >= num_keys)
        and num_queries in (1, num_keys)
        and call.softcap is None
        and call.sink_logits is None
        and call.query_gate is None
    )


def dense_attention(call: AttentionCall) -> Tensor:
    """[B, H, Tq, Dv]."""
    causal = call.q.shape[2] > 1  # one query is the last, and sees every key
    grouped = call.q.shape[1] != call.k.shape[1]
    return scaled_dot_product_attention(call.q, call.k, call.v, is_causal=causal, scale=call.scale, enable_gqa=grouped)
