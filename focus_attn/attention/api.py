"""The public attention function and the choice of what computes it."""

from __future__ import annotations

from torch import Tensor

from focus_attn.attention.backends import BACKENDS, choose_backend, run_backend
from focus_attn.attention.call import make_call
from focus_attn.attention.dense import dense_attention, is_dense


def focus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_groups: Tensor,
    key_groups: Tensor,
    *,
    num_groups: int,
    window: int,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    query_gate: Tensor | None = None,
    key_gate: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over the pairs that `focus_attn.visibility` calls visible.

    Args:
        q: [B, H, Tq, D].  k: [B, Hkv, Tk, D].  v: [B, Hkv, Tk, Dv], H a multiple of Hkv.
        query_groups: [B, R, Tq, query_k] integer ids, R = 1 or Hkv.  key_groups: [B, R, Tk, key_k].
        num_groups: K, ids lie in 0..K-1.
        window: keys at this distance or nearer are always visible (window + 1 of them).
        num_sinks: the first real tokens of a sequence, always visible.
        scale: of q . k, by default 1 / sqrt(D).  softcap: `softcap * tanh(score / softcap)`.
        sliding_window: only keys nearer than this (Hugging Face's `<`), whatever else holds.
        sink_logits: [H] learned logits that take softmax mass and give nothing (gpt_oss), not `num_sinks`.
        key_padding_mask: [B, Tk], True = real token.
        query_positions, key_positions: [B, T]; by default real tokens are counted, queries being the last Tq of the Tk
            slots. -1 = padding or an unwritten cache slot.
        query_segments, key_segments: [B, T]; tokens of different segments (packed sequences) do not meet.
        query_gate, key_gate: [B, R, T, K] log assignments: zero in value, they carry gradients to the router.
        dropout: not supported, must be 0.
        backend: "auto", "reference", "stock" or "triton"; one that cannot serve a call raises and says why.
        return_lse: also return the logsumexp [B, H, Tq], fp32, without a gradient.

    Returns:
        out [B, H, Tq, Dv]. A query that sees nothing gets 0, and -inf as its logsumexp.
    """
    if dropout:
        raise ValueError(f"dropout is not supported, got {dropout}: train with the base model in eval mode")
    call = make_call(
        q,
        k,
        v,
        query_groups,
        key_groups,
        num_groups=num_groups,
        window=window,
        num_sinks=num_sinks,
        scale=scale,
        softcap=softcap,
        sliding_window=sliding_window,
        sink_logits=sink_logits,
        key_padding_mask=key_padding_mask,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
        query_gate=query_gate,
        key_gate=key_gate,
    )
    if backend == "auto" and not return_lse and is_dense(call):
        return dense_attention(call)
    out, lse = BACKENDS[choose_backend(call)](call) if backend == "auto" else run_backend(backend, call)
    return (out, lse) if return_lse else out
