"""The additive gate in memory linear in n, by kernels that know nothing of it.

A distant score plus lambda * (a_i . b_j - 1) is a dot product of wider vectors: lambda * a_i and -lambda beside q_i,
b_j and 1 beside k_j (`widened`). Only near pairs keep their plain score, and no kernel has both. So three calls: near
pairs plain, all pairs wide, and near pairs wide to be taken off again. With exp sums Z and outputs O of the three,

    Z = Z_near + Z_all' - Z_near'        O = (Z_near O_near + Z_all' O_all' - Z_near' O_near') / Z

The gate only ever lowers a score, so that Z_near' <= Z_near, and nothing is lost in taking it off. The backward of each
call gets the merged output and logsumexp, as for all parts of one softmax; the last one's gradients are subtracted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focus_attn.attention.backends import raw_backend
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.merge import sink_logits_grad
from focus_attn.attention.reference import spread_over_heads
from focus_attn.gradients import first_order
from focus_attn.visibility import EVERYTHING, Pattern, Tokens

SHARPEST = 128.0  # lambda takes its digits from the scores it is added to
WIDTH_STEP = 16  # what kernels like best


def serves(q: Tensor, sharpness: float, scale: float, softcap: float | None) -> bool:
    """Whether the gate fits into the scores: a softcap goes around q . k alone, a very sharp gate leaves no digits."""
    fits = q.dtype != torch.float16 or sharpness < 1e4 * scale
    return softcap is None and scale > 0 and sharpness <= SHARPEST and fits


def additive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_gate: Tensor,
    key_gate: Tensor,
    *,
    sharpness: float,
    tokens: Tokens,
    pattern: Pattern,
    scale: float,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """q [B, H, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], gates [B, R, T, K] log assignments -> [B, H, T, Dv]."""
    with torch.autocast(device_type=q.device.type, enabled=False):
        a = spread_over_heads(query_gate.exp(), q.shape[1]) * (sharpness / scale)
        b = spread_over_heads(key_gate.exp(), k.shape[1])
        wide_q, wide_k = widened(q, k, a, b, sharpness / scale)
        given = _Given(_in_64_bits(tokens), pattern, scale)
        out: Tensor = _Gated.apply(q, k, v, wide_q, wide_k, sink_logits, given)
    return out


def _in_64_bits(tokens: Tokens) -> Tokens:
    """As `focus_attention` hands them to every backend; masks of transformers come in 32."""
    given = ("query_positions", "key_positions", "query_segments", "key_segments")
    return tokens._replace(**{name: x.long() for name in given if (x := getattr(tokens, name)) is not None})


def widened(q: Tensor, k: Tensor, a: Tensor, b: Tensor, one: float) -> tuple[Tensor, Tensor]:
    """q and k with columns whose product is a . b - one. a [B, H, T, K] and b [B, Hkv, T, K], fp32.

    In half precision a number is written as two, and the product of the two small parts is left out.
    """
    ones, minus = torch.ones_like(b[..., :1]), torch.full_like(a[..., :1], -one)
    if q.element_size() >= 4:
        columns = [(a, b), (minus, ones)]
    else:
        (a, small_a), (b, small_b), (minus, small_minus) = (_in_two(x, q.dtype) for x in (a, b, minus))
        columns = [(a, b), (a, small_b), (small_a, b), (minus, ones), (small_minus, ones)]
    left, right = (torch.cat([x.to(q.dtype) for x in side], -1) for side in zip(*columns, strict=True))
    filler = -(q.shape[-1] + left.shape[-1]) % WIDTH_STEP
    pad = torch.nn.functional.pad
    return torch.cat([q, pad(left, (0, filler))], -1), torch.cat([k, pad(right, (0, filler))], -1)


def _in_two(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    large = x.to(dtype)
    return large, (x - large.to(x.dtype)).to(dtype)


class _Given(NamedTuple):
    tokens: Tokens
    pattern: Pattern
    scale: float

    def calls(self, q: Tensor, k: Tensor, v: Tensor, wide_q: Tensor, wide_k: Tensor) -> list[AttentionCall]:
        """What is near, plain; all pairs, wide; what is near, wide. Ids of two groups that never meet leave what is
        near."""
        zero = torch.zeros((), dtype=torch.long, device=q.device)
        ids = zero.expand(q.shape[0], 1, q.shape[2], 1)
        near = replace(self.pattern, num_groups=2)
        everything = replace(near, window=EVERYTHING)
        return [
            AttentionCall(queries, keys, v, ids, ids + 1, self.tokens, pattern, self.scale)
            for queries, keys, pattern in ((q, k, near), (wide_q, wide_k, everything), (wide_q, wide_k, near))
        ]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, wide_q: Tensor, wide_k: Tensor, sink_logits: Tensor | None,
        given: _Given,
    ) -> Tensor:  # fmt: skip
        outs, logs = zip(
            *(raw_backend(call).forward(call) for call in given.calls(q, k, v, wide_q, wide_k)), strict=True
        )
        top = torch.stack(logs).amax(0)
        if sink_logits is not None:  # mass that goes nowhere
            sinks = sink_logits.float()[None, :, None].expand_as(top)
            top = torch.where(top == -torch.inf, top, torch.maximum(top, sinks))
        top = top.masked_fill(top == -torch.inf, 0.0)  # padding sees nothing
        near, everything, again = ((lse - top).exp() for lse in logs)
        total = near + everything - again
        whole = near[..., None] * outs[0] + everything[..., None] * outs[1] - again[..., None] * outs[2]
        if sink_logits is not None:
            total = torch.where(total > 0, total + (sinks - top).exp(), 0.0)
        out = whole / torch.where(total > 0, total, 1.0)[..., None]
        lse = torch.where(total > 0, top + total.log(), -torch.inf)
        ctx.save_for_backward(q, k, v, wide_q, wide_k, sink_logits, out, lse)
        ctx.given = given
        return out.to(v.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, wide_q, wide_k, sink_logits, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        with torch.autocast(device_type=grad.device.type, enabled=False):
            near, everything, again = (
                raw_backend(call).backward(call, grad, out, lse) for call in ctx.given.calls(q, k, v, wide_q, wide_k)
            )
            sinks = None if sink_logits is None else sink_logits_grad(grad, out, lse, sink_logits)
        v_grad = (near.v.float() + everything.v.float() - again.v.float()).to(v.dtype)
        return near.q, near.k, v_grad, everything.q - again.q, everything.k - again.k, sinks, None
