"""The soft gates of training: every causal pair is computed and distant ones are turned down.

multiplicative, the published one: a distant score times sigmoid(lambda * a_i . b_j)
additive: a distant score plus lambda * (a_i . b_j - 1), which is the hard mask for large lambda

Pairs inside the window and sinks keep their score. a and b are the soft query and key assignments. By their formulas
both take O(n²) memory; `additive.py` has a way around it, `multiplicative.py` one for devices with kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from focus_attn.attention import additive, multiplicative
from focus_attn.attention.reference import spread_over_heads
from focus_attn.visibility import Pattern, Tokens, near_and_reachable


def soft_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_gate: Tensor,
    key_gate: Tensor,
    *,
    gate: str,
    sharpness: float,
    tokens: Tokens,
    pattern: Pattern,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """q [B, H, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], gates [B, R, T, K] log assignments -> [B, H, T, Dv].

    backend: "reference" is the formula; so is the multiplicative gate under "stock", and under "auto" where there are
    no kernels for it. The additive gate chooses among the others itself.
    """
    if gate == "additive" and backend != "reference" and additive.serves(q, sharpness, scale, softcap):
        return additive.additive_attention(
            q, k, v, query_gate, key_gate,
            sharpness=sharpness, tokens=tokens, pattern=pattern, scale=scale, sink_logits=sink_logits,
        )  # fmt: skip
    found = None
    if gate == "multiplicative" and backend in ("auto", "triton"):
        found = multiplicative.kernels_for(q, k, v, query_gate.shape[-1])
    if gate == "multiplicative" and backend == "triton" and found is None:
        raise ValueError(
            "backend 'triton' has no kernels of the multiplicative gate for this call (they are for CUDA, heads up to "
            "256 wide and 128 groups): take backend='auto', which goes by the formula here"
        )
    if found is not None:
        return multiplicative.multiplicative_attention(
            found, q, k, v, query_gate, key_gate,
            sharpness=sharpness, tokens=tokens, pattern=pattern, scale=scale, softcap=softcap, sink_logits=sink_logits,
        )  # fmt: skip
    with torch.autocast(device_type=q.device.type, enabled=False):
        heads = q.shape[1]
        k_heads, v_heads = (x.float().repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
        scores = (q.float() @ k_heads.transpose(-1, -2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)

        near, reachable = near_and_reachable(tokens, pattern)
        affinity = spread_over_heads(query_gate.exp() @ key_gate.exp().transpose(-1, -2), heads)
        if gate == "multiplicative":
            gated = scores * torch.sigmoid(sharpness * affinity)
        elif gate == "additive":
            gated = scores + sharpness * (affinity - 1)
        else:
            raise ValueError(f"the soft gates are 'multiplicative' and 'additive', got {gate!r}")
        scores = torch.where(near, scores, gated).masked_fill(~reachable, -math.inf)

        if sink_logits is not None:  # mass that goes nowhere: one more column, dropped after the softmax
            extra = sink_logits.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            probabilities = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        else:
            empty = ~reachable.any(-1, keepdim=True)  # padding: attend to nothing rather than to NaN
            probabilities = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        return (probabilities @ v_heads).to(v.dtype)
