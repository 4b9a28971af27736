"""Calls whose queries and keys share one id a token: every group is then a causal attention of its own.

The tokens are sorted by group, cuDNN attends inside the groups, and the near kernel adds what is left: pairs of
different groups inside the window or on a sink. The backward gives cuDNN the merged output and logsumexp and adds its
gradients to those of the near kernels. A few KV heads go at a time, so that the sorted copies stay small beside the
output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focus_attn.attention import cudnn, sorted_rows, triton_plan
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.launch import Setup
from focus_attn.attention.near_far import Seed, launch_near
from focus_attn.attention.sorted_rows import Copy, room_for, sort_rows
from focus_attn.attention.triton_plan import SquarePlan


class Room(NamedTuple):
    """What a forward writes on its way: the plan, sorted copies of some heads, and what cuDNN needs."""

    plan: SquarePlan
    q: Tensor  # [B, 1, T, heads, D], and the groups' outputs after it
    k: Tensor
    v: Tensor
    lse: Tensor  # [B, 1, T, heads, 1] fp32
    workspace: Tensor
    kernels: Any  # cuDNN's own: they must stay as long as a recording of their launches


def serves(call: AttentionCall, setup: Setup) -> bool:
    if not _is_same(call.query_groups, call.key_groups):
        return False
    return setup.once("square", lambda: _serves(call))


def serves_backward(call: AttentionCall, setup: Setup) -> bool:
    """Not everywhere where the forward is served; the general way can do what this cannot."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    answer: bool = serves(call, setup) and setup.once(
        ("square gradient", deterministic),
        lambda: cudnn.can_differentiate(_heads_at_once_backward(call, setup)[1], deterministic),
    )
    return answer


def _serves(call: AttentionCall) -> bool:
    q, k, v = call.q, call.k, call.v
    return (
        call.tokens.plain
        and call.query_groups.shape[-1] == 1
        and call.query_groups.shape[1] == 1
        and q.shape[2] == k.shape[2]
        and q.shape[-1] == v.shape[-1]
        and call.softcap is None
        and call.sink_logits is None
        and call.query_gate is None
        and triton_plan.serves(call)
        and call.pattern.window < q.shape[2] - 1
        and cudnn.can_serve(_step_and_shape(call, copies=3)[1])
    )


def forward(call: AttentionCall, setup: Setup, out: Tensor, lse: Tensor) -> None:
    """Fills out [B, H, T, Dv] and lse [B, H, T]."""
    launch_forward(call, setup, make_room(call, setup), out, lse)


def can_be_recorded(call: AttentionCall, setup: Setup) -> bool:
    """Whether `launch_forward` does all heads in one piece."""
    return _heads_at_once(call, setup)[0] == call.k.shape[1]


def make_room(call: AttentionCall, setup: Setup) -> Room:
    step, shape = _heads_at_once(call, setup)
    q, k, v = room_for(call, step, "qkv")
    return Room(triton_plan.room_for_square(call), q, k, v, _room_for_lse(call, shape), *cudnn.room_for_forward(shape))


def launch_forward(call: AttentionCall, setup: Setup, room: Room, out: Tensor, lse: Tensor) -> None:
    """Launches alone, and no new tensors: a CUDA graph can hold them."""
    step, shape = _heads_at_once(call, setup)
    plan, q, k, v, part_lse, workspace, _ = room
    triton_plan.plan_square(call, setup, plan, shape.heads, shape.kv_heads)
    slots = plan.slots
    for first in range(0, call.k.shape[1], step):
        first_query = first * shape.heads // step
        copies = Copy(call.q, q, first_query, slots), Copy(call.k, k, first, slots), Copy(call.v, v, first, slots)
        sort_rows(setup, "q, k, v", *copies)
        cudnn.forward(shape, plan.jobs, q, k, v, q, part_lse, workspace)
        launch_near(call, setup, None, out, lse, Seed(plan.places, q, part_lse, first, step), plan.ids)


def _heads_at_once(call: AttentionCall, setup: Setup) -> tuple[int, cudnn.Shape]:
    """KV heads that a forward does at a time, and cuDNN's graph for them."""
    answer: tuple[int, cudnn.Shape] = setup.once("square forward", lambda: _step_and_shape(call, copies=3))
    return answer


def _heads_at_once_backward(call: AttentionCall, setup: Setup) -> tuple[int, cudnn.Shape]:
    answer: tuple[int, cudnn.Shape] = setup.once("square backward", lambda: _step_and_shape(call, copies=10))
    return answer


def group_gradients(
    call: AttentionCall, setup: Setup, grad: Tensor, out: Tensor, lse: Tensor
) -> Iterator[tuple[Tensor, int, int, tuple[Tensor, Tensor, Tensor]]]:
    """(places, first KV head, KV heads, cuDNN's dq, dk, dv sorted by group), a few KV heads at a time.

    The tensors are used again for the next heads.
    """
    step, shape = _heads_at_once_backward(call, setup)
    plan = triton_plan.room_for_square(call)
    triton_plan.plan_square(call, setup, plan, shape.heads, shape.kv_heads)
    slots, sorted_lse = plan.slots, _room_for_lse(call, shape)
    q, k, v, sorted_out, sorted_grad, dq, dk, dv = room_for(call, step, "qkvqqqkv")
    for first in range(0, call.k.shape[1], step):
        query = first * shape.heads // step
        copies = Copy(call.q, q, query, slots), Copy(call.k, k, first, slots), Copy(call.v, v, first, slots)
        sort_rows(setup, "q, k, v", *copies)
        sort_rows(setup, "out, grad", Copy(out, sorted_out, query, slots), Copy(grad, sorted_grad, query, slots))
        sort_rows(setup, "lse", Copy(lse[..., None], sorted_lse, query, slots))
        cudnn.backward(shape, plan.jobs, (q, k, v, sorted_out, sorted_lse, sorted_grad), (dq, dk, dv))
        yield plan.places, first, step, (dq, dk, dv)


def _room_for_lse(call: AttentionCall, shape: cudnn.Shape) -> Tensor:
    batch, length = call.q.shape[0], call.q.shape[2]
    return torch.empty(batch, 1, length, shape.heads, 1, dtype=torch.float32, device=call.q.device)


def _step_and_shape(call: AttentionCall, copies: int) -> tuple[int, cudnn.Shape]:
    """KV heads at a time, and the graph for them."""
    batch, heads, length, width = call.q.shape
    kv_heads, longest = sorted_rows.heads_at_once(call, copies), cudnn.bound(length)
    return kv_heads, cudnn.Shape(
        jobs=batch * call.pattern.num_groups,
        heads=kv_heads * heads // call.k.shape[1],
        kv_heads=kv_heads,
        longest_queries=longest,
        longest_keys=longest,
        total=batch * longest,
        causal=True,
        width=width,
        dtype=call.q.dtype,
        scale=call.scale,
        device=call.q.device,
    )


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())
