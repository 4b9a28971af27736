"""Backends as PyTorch operators: one node each with an exact backward, opaque to torch.compile (a plan depends on the
ids' values, which a graph must not look at). Where nobody looks for an operator the node is a plain autograd function:
an operator's way through PyTorch takes the host some 0.5 ms, forward and backward together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.stock import Gradients
from focus_attn.gradients import first_order
from focus_attn.kernel_use import needs_operators
from focus_attn.visibility import Pattern, Tokens

Forward = Callable[[AttentionCall], tuple[Tensor, Tensor]]
Backward = Callable[[AttentionCall, Tensor, Tensor, Tensor], Gradients]


def make_operator(
    name: str, forward: Forward, backward: Backward, *, unrounded: bool, token_major: bool, plain: Forward | None = None
) -> Forward:
    """`focus_attn::<name>` and `focus_attn::<name>_backward`, behind a function of an AttentionCall.

    unrounded: `forward` gives its output in fp32, and the backward gets that one.
    token_major: `forward` gives its output as a view of [B, Tq, H, Dv].
    plain: what takes the place of `forward` in calls that need no operator.
    """

    @torch.library.custom_op(f"focus_attn::{name}", mutates_args=())
    def operator(
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
        plain: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """out, logsumexp, and the unrounded output where that is another tensor (empty otherwise)."""
        tensors = (q, k, v, query_groups, key_groups, query_positions, key_positions, query_segments, key_segments)
        sizes = (num_groups, window, num_sinks, sliding_window, scale, softcap, plain)
        with torch.autocast(device_type=q.device.type, enabled=False):
            out, lse = forward(_call(*tensors, sink_logits, query_gate, key_gate, *sizes))
        if not token_major:  # as the fake one below says: a compiler holds the operator to it
            out, lse = out.contiguous(), lse.contiguous()
        if out.dtype == v.dtype:
            return out, lse, out.new_empty(0)
        return out.to(v.dtype), lse, out

    @operator.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
        batch, heads, queries, _ = q.shape
        width = v.shape[-1]
        lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
        if token_major:
            return v.new_empty(batch, queries, heads, width).transpose(1, 2), lse, v.new_empty(0)
        exact = q.new_empty((batch, heads, queries, width), dtype=torch.float32)
        return exact.to(v.dtype), lse, exact if unrounded and v.dtype != torch.float32 else v.new_empty(0)

    @torch.library.custom_op(f"focus_attn::{name}_backward", mutates_args=())
    def gradients(
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
        plain: bool,
    ) -> list[Tensor]:
        """Gradients of q, k, v, sink_logits, query_gate, key_gate; an empty tensor for what was not given."""
        tensors = (q, k, v, query_groups, key_groups, query_positions, key_positions, query_segments, key_segments)
        sizes = (num_groups, window, num_sinks, sliding_window, scale, softcap, plain)
        with torch.autocast(device_type=q.device.type, enabled=False):
            grads = backward(_call(*tensors, sink_logits, query_gate, key_gate, *sizes), grad, out, lse)
        given = grads.q, grads.k, grads.v, grads.sink_logits, grads.query_gate, grads.key_gate
        return [q.new_empty(0) if x is None else x.contiguous() for x in given]

    @gradients.register_fake
    def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
        sink_logits, query_gate, key_gate = rest[6:9]
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        grads.append(q.new_empty(0) if sink_logits is None else sink_logits.new_empty(sink_logits.shape))
        for gate in (query_gate, key_gate):  # gates are summed in fp32
            grads.append(q.new_empty(0) if gate is None else gate.new_empty(gate.shape, dtype=torch.float32))
        return grads

    def laid_out(grad: Tensor) -> Tensor:
        """Backends that write token by token read so too: the gradient comes as the output went."""
        return grad if token_major and grad.stride(-1) == 1 else grad.contiguous()

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        out, lse, exact = output
        ctx.save_for_backward(exact if exact.numel() else out, lse, *inputs[:12])
        ctx.sizes = inputs[12:]

    def differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        grads = gradients(laid_out(grad), out, lse, *tensors, *ctx.sizes)
        optional = [None if x is None else g for x, g in zip(tensors[9:], grads[3:], strict=True)]
        return (*grads[:3], *[None] * 6, *optional, *[None] * len(ctx.sizes))

    operator.register_autograd(differentiate, setup_context=keep)

    class Node(torch.autograd.Function):
        """The operator and its gradient without a dispatcher between."""

        @staticmethod
        def forward(ctx: Any, call: AttentionCall, *differentiable: Tensor | None) -> tuple[Tensor, Tensor]:
            with torch.autocast(device_type=call.q.device.type, enabled=False):
                exact, lse = forward(call)
            out = exact if exact.dtype == call.v.dtype else exact.to(call.v.dtype)
            ids_and_places = call.query_groups, call.key_groups, *call.tokens[:4]
            ctx.save_for_backward(exact, lse, *differentiable[:3], *ids_and_places, *differentiable[3:])
            ctx.sizes = _sizes(call)
            ctx.mark_non_differentiable(lse)
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        @first_order
        def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
            if grad is None:
                return (None,) * 7
            exact, lse, *tensors = ctx.saved_tensors
            with torch.autocast(device_type=grad.device.type, enabled=False):
                grads = backward(_call(*tensors, *ctx.sizes), laid_out(grad), exact, lse)
            return None, grads.q, grads.k, grads.v, grads.sink_logits, grads.query_gate, grads.key_gate

    without_operator = plain or forward

    def attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
        differentiable = call.q, call.k, call.v, call.sink_logits, call.query_gate, call.key_gate
        if not needs_operators(*differentiable):
            if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable):
                return Node.apply(call, *differentiable)  # type: ignore[no-any-return]
            with _without_autocast(call.q.device.type):
                out, lse = without_operator(call)
            return out if out.dtype == call.v.dtype else out.to(call.v.dtype), lse
        out, lse, _ = operator(
            call.q, call.k, call.v, call.query_groups, call.key_groups, *call.tokens[:4],
            call.sink_logits, call.query_gate, call.key_gate, *_sizes(call),
        )  # fmt: skip
        return out, lse.detach()  # its gradient is inside: what a merge needs of it must not be added again

    return attention


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type=device_type, enabled=False)
    return nullcontext()


def _sizes(call: AttentionCall) -> tuple[Any, ...]:
    pattern = call.pattern
    sizes = pattern.num_groups, pattern.window, pattern.num_sinks, pattern.sliding_window
    return *sizes, call.scale, call.softcap, call.tokens.plain


def _call(
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
    plain: bool,
) -> AttentionCall:
    tokens = Tokens(query_positions, key_positions, query_segments, key_segments, plain)
    pattern = Pattern(num_groups, window, num_sinks, sliding_window)
    return AttentionCall(
        q, k, v, query_groups, key_groups, tokens, pattern, scale, softcap, sink_logits, query_gate, key_gate
    )
