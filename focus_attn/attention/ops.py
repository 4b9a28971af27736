"""Backends as PyTorch operators: one node each with an exact backward, opaque to torch.compile (a plan depends on the
ids' values, which a graph must not look at)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.stock import Gradients
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
        return [q.new_empty(0) if x is None else x for x in given]

    @gradients.register_fake
    def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
        sink_logits, query_gate, key_gate = rest[6:9]
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        grads.append(q.new_empty(0) if sink_logits is None else sink_logits.new_empty(sink_logits.shape))
        for gate in (query_gate, key_gate):  # gates are summed in fp32
            grads.append(q.new_empty(0) if gate is None else gate.new_empty(gate.shape, dtype=torch.float32))
        return grads

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        out, lse, exact = output
        ctx.save_for_backward(exact if exact.numel() else out, lse, *inputs[:12])
        ctx.sizes = inputs[12:]

    def differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        grads = gradients(grad.contiguous(), out, lse, *tensors, *ctx.sizes)
        optional = [None if x is None else g for x, g in zip(tensors[9:], grads[3:], strict=True)]
        return (*grads[:3], *[None] * 6, *optional, *[None] * len(ctx.sizes))

    operator.register_autograd(differentiate, setup_context=keep)

    without_operator = plain or forward

    def attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
        if not _needs_operator(call):
            out, lse = without_operator(call)
            return out if out.dtype == call.v.dtype else out.to(call.v.dtype), lse
        tokens, pattern = call.tokens, call.pattern
        out, lse, _ = operator(
            call.q, call.k, call.v, call.query_groups, call.key_groups, *tokens[:4],
            call.sink_logits, call.query_gate, call.key_gate,
            pattern.num_groups, pattern.window, pattern.num_sinks, pattern.sliding_window, call.scale, call.softcap,
            tokens.plain,
        )  # fmt: skip
        return out, lse.detach()  # its gradient is inside: what a merge needs of it must not be added again

    return attention


def _needs_operator(call: AttentionCall) -> bool:
    """Whether PyTorch must see a node: for a graph or a gradient, or because it would cast on the way. Otherwise the
    way through its dispatcher, some 0.05 ms, is saved."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(call.q.device.type):
        return True
    grad = torch.is_grad_enabled()
    for x in (call.q, call.k, call.v, call.sink_logits, call.query_gate, call.key_gate):
        if x is None:
            continue
        if type(x) is not Tensor and not isinstance(x, torch.nn.Parameter):
            return True  # a subclass or a functional transform wants to know what is called
        if grad and x.requires_grad:
            return True
    return False


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
