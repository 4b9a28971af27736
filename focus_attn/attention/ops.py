"""The `stock` backend as PyTorch operators: one node with an exact backward, opaque to torch.compile (a plan depends on
the ids' values, which a graph must not look at)."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.stock import stock_backward, stock_forward
from focus_attn.visibility import Pattern, Tokens


def stock_attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out, logsumexp. The logsumexp has no gradient: what a merge needs of it is inside."""
    _check_served(call)
    tokens, pattern = call.tokens, call.pattern
    out, lse, _ = _stock(
        call.q, call.k, call.v, call.query_groups, call.key_groups,
        tokens.query_positions, tokens.key_positions, tokens.query_segments, tokens.key_segments,
        call.sink_logits, call.query_gate, call.key_gate,
        pattern.num_groups, pattern.window, pattern.num_sinks, pattern.sliding_window, call.scale, call.softcap,
    )  # fmt: skip
    return out, lse.detach()


def _check_served(call: AttentionCall) -> None:
    if call.query_gate is not None and min(call.query_groups.shape[-1], call.key_groups.shape[-1]) > 1:
        raise ValueError(
            "backend 'stock' takes gates only where a pair can share one group at most (query_k or key_k = 1), got "
            f"query_k = {call.query_groups.shape[-1]} and key_k = {call.key_groups.shape[-1]}: use backend='reference'"
        )


@torch.library.custom_op("focus_attn::stock", mutates_args=())
def _stock(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_groups: Tensor,
    key_groups: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    sink_logits: Tensor | None,
    query_gate: Tensor | None,
    key_gate: Tensor | None,
    num_groups: int,
    window: int,
    num_sinks: int,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, logsumexp, and for half precision the output before it was rounded (empty otherwise)."""
    tokens = Tokens(query_positions, key_positions, query_segments, key_segments)
    pattern = Pattern(num_groups, window, num_sinks, sliding_window)
    call = AttentionCall(
        q, k, v, query_groups, key_groups, tokens, pattern, scale, softcap, sink_logits, query_gate, key_gate
    )
    exact, lse = stock_forward(call)
    if exact.dtype == v.dtype:
        return exact, lse, exact.new_empty(0)
    return exact.to(v.dtype), lse, exact


@_stock.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    shape = *q.shape[:3], v.shape[-1]
    exact = q.new_empty(0 if v.dtype == torch.float32 else shape, dtype=torch.float32)
    return v.new_empty(shape), q.new_empty(shape[:3], dtype=torch.float32), exact


@torch.library.custom_op("focus_attn::stock_backward", mutates_args=())
def _stock_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_groups: Tensor,
    key_groups: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    sink_logits: Tensor | None,
    query_gate: Tensor | None,
    key_gate: Tensor | None,
    num_groups: int,
    window: int,
    num_sinks: int,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> list[Tensor]:
    """Gradients of q, k, v, sink_logits, query_gate, key_gate; an empty tensor for what was not given."""
    tokens = Tokens(query_positions, key_positions, query_segments, key_segments)
    pattern = Pattern(num_groups, window, num_sinks, sliding_window)
    call = AttentionCall(
        q, k, v, query_groups, key_groups, tokens, pattern, scale, softcap, sink_logits, query_gate, key_gate
    )
    grads = stock_backward(call, grad, out, lse)
    given = grads.q, grads.k, grads.v, grads.sink_logits, grads.query_gate, grads.key_gate
    return [q.new_empty(0) if x is None else x for x in given]


@_stock_backward.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> list[Tensor]:
    optional = rest[6:9]  # sink_logits, query_gate, key_gate
    return [torch.empty_like(x) if isinstance(x, Tensor) else q.new_empty(0) for x in (q, k, v, *optional)]


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse, exact = output
    ctx.save_for_backward(exact if exact.numel() else out, lse, *inputs[:12])
    ctx.sizes = inputs[12:]  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, *_: Tensor | None) -> tuple:
    out, lse, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]
    sink_logits, query_gate, key_gate = tensors[9:]
    grads = _stock_backward(grad.contiguous(), out, lse, *tensors, *ctx.sizes)  # type: ignore[attr-defined]
    optional = [None if x is None else g for x, g in zip((sink_logits, query_gate, key_gate), grads[3:], strict=True)]
    return (*grads[:3], *[None] * 6, *optional, *[None] * len(ctx.sizes))  # type: ignore[attr-defined]


_stock.register_autograd(_backward, setup_context=_keep)
