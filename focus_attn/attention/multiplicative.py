"""The multiplicative gate in memory linear in n, where a device has kernels for it; `soft.py` has its formula."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focus_attn.attention.merge import merge_sink_logits, sink_logits_grad
from focus_attn.gradients import first_order
from focus_attn.kernel_use import kernels, needs_operators
from focus_attn.visibility import Pattern, Tokens

KERNELS = "focus_attn.attention.multiplicative_launch"


def kernels_for(q: Tensor, k: Tensor, v: Tensor, groups: int) -> ModuleType | None:
    """None: it goes by the formula."""
    found = kernels(KERNELS, q.device)
    return None if found is None or needs_operators(q, k, v) or not found.serves(q, k, v, groups) else found


def multiplicative_attention(
    found: ModuleType,
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
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """q [B, H, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], gates [B, R, T, K] log assignments -> [B, H, T, Dv]."""
    with torch.autocast(device_type=q.device.type, enabled=False):
        a, b = query_gate.float().exp() * sharpness, key_gate.float().exp()
        given = _Given(found, tokens, pattern, scale, softcap)
        out: Tensor = _Gated.apply(q, k, v, a, b, sink_logits, given)
    return out


class _Given(NamedTuple):
    kernels: Any
    tokens: Tokens
    pattern: Pattern
    scale: float
    softcap: float | None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, sink_logits: Tensor | None, given: _Given
    ) -> Tensor:
        found, *rest = given
        out, lse = found.forward(found.Inputs(q, k, v, a, b), *rest)
        if sink_logits is not None:
            out, lse = merge_sink_logits(out.float(), lse, sink_logits)
        ctx.save_for_backward(q, k, v, a, b, sink_logits, out, lse)
        ctx.given = given
        return out.to(v.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, a, b, sink_logits, out, lse = ctx.saved_tensors
        found, *rest = ctx.given
        delta = (grad.float() * out.float()).sum(-1)
        grads = found.backward(found.Inputs(q, k, v, a, b), *rest, grad, lse, delta)
        sinks = None if sink_logits is None else sink_logits_grad(grad, out, lse, sink_logits)
        return *grads, sinks, None
