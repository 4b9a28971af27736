"""What the backward reads and writes in the order of the groups: rows of queries, copies, keys' gradients in parts.

`rows_of` makes what both sides read of a query beside its vectors. `sorted_copies` lays the queries and keys of a few
KV heads out as far walks over them. Where such a walk can be long, it is cut: a program adds up what one stretch of the
rows gives to its keys, and `add_parts` puts the parts together, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_attn.attention import sorted_rows
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.device_plan import FarPlan
from focus_attn.attention.forward_kernels import LOG2E
from focus_attn.attention.launch import Setup, ceil_div, power_of_2
from focus_attn.attention.near_far import room_for_keys, sort_keys
from focus_attn.attention.sorted_rows import Copy, sort_rows_alike

KEYS_AT_ONCE = 64
MOST_PARTS, ROWS_A_PART = 8, 4096  # of the rows that the keys of a group are met by


class Row(NamedTuple):
    """What both sides read of a query beside its vectors. The logsumexp is in base 2, inf if it saw nothing."""

    lse: Tensor  # [B, H, Tq] fp32
    delta: Tensor  # [B, H, Tq] fp32: dO . O


class Parts(NamedTuple):
    """What stretches of the rows give to the keys, [number, B, kv_heads, Tk, ...] fp32."""

    number: int
    stretch: int
    k: Tensor
    v: Tensor
    sums: Tensor


class Sorted(NamedTuple):
    """Copies in the order of a far plan, of a run of KV heads."""

    first_head: int
    kv_heads: int
    keys: tuple[Tensor, Tensor]  # k, v [B, lines, entries, heads a line, D]
    queries: tuple[Tensor, Tensor]  # q, dO [B, kv_heads, Tq, G, D], of one visit
    rows: Row  # [B, kv_heads, Tq, G]
    parts: Parts | None  # None where one program walks over all rows that meet its keys

    @staticmethod
    def row_strides(x: Tensor) -> tuple[int, int, int]:
        """Of q or dO: batch, KV head, row (a query and head)."""
        return x.stride(0), x.stride(1), x.stride(3)


def rows_of(setup: Setup, grad: Tensor, out: Tensor, lse: Tensor) -> Row:
    batch, heads, num_queries, width = out.shape
    grad, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, out))
    rows = Row(*(torch.empty(batch, heads, num_queries, dtype=torch.float32, device=grad.device) for _ in range(2)))
    block = 64
    setup.launch(
        "delta", delta_kernel, (ceil_div(num_queries, block), heads, batch),
        (
            grad, out, lse.contiguous(), rows.delta, rows.lse,
            *grad.stride()[:3], *out.stride()[:3], num_queries, heads,
        ),
        lambda: {"DV": width, "BLOCK_DV": power_of_2(width), "BLOCK_M": block},
    )  # fmt: skip
    return rows


def sorted_copies(
    call: AttentionCall, setup: Setup, plan: FarPlan, queries: tuple[Tensor, Tensor], rows: Row
) -> Iterator[tuple[int, Sorted]]:
    """Every visit of every run of KV heads; a copy is written over when the next is asked for. queries: q and dO."""
    batch, num_queries, kv_heads, device = call.q.shape[0], call.q.shape[2], call.k.shape[1], call.q.device
    routers, group = call.query_groups.shape[1], setup.heads_a_key
    copies_like_q = 2 + ceil_div(2 * call.key_groups.shape[-1], group)
    step = setup.once("backward step", lambda: sorted_rows.heads_at_once(call, copies_like_q))
    k, v = room_for_keys(call, step, plan.key_slots.shape[-1])
    q, grad = (torch.empty(batch, step, num_queries, group, x.shape[-1], dtype=x.dtype, device=device) for x in queries)
    sorted_ = Row(*(torch.empty(batch, step, num_queries, group, dtype=torch.float32, device=device) for _ in range(2)))
    parts = _parts(call, setup, step)
    for first in range(0, kv_heads, step):
        mine = slice(None) if routers == 1 else slice(first, first + step)
        sort_keys(call, setup, plan.key_slots[:, mine], k, v, first)
        for visit in range(plan.query_slots.shape[2]):
            slots = plan.query_slots[:, mine, visit].expand(batch, step, num_queries)
            copies = [Copy(x, to, first * group, slots) for x, to in zip(queries, (q, grad), strict=True)]
            sort_rows_alike(setup, ("q", "grad"), *copies)
            stats = [
                Copy(x[..., None], to[..., None], first * group, slots) for x, to in zip(rows, sorted_, strict=True)
            ]
            sort_rows_alike(setup, ("lse", "delta"), *stats)
            yield visit, Sorted(first, step, (k, v), (q, grad), sorted_, parts)


def _parts(call: AttentionCall, setup: Setup, kv_heads: int) -> Parts | None:
    """Room for the parts of so many KV heads; None where walks are short, or the room would not be small."""
    batch, num_keys, device = call.k.shape[0], call.k.shape[2], call.k.device
    rows, widths = call.q.shape[2] * setup.heads_a_key, (call.k.shape[-1], call.v.shape[-1])
    number = min(MOST_PARTS, rows // ROWS_A_PART)
    if room := sorted_rows.small(device):
        number = min(number, room // (4 * batch * kv_heads * num_keys * sum(widths)))
    if number < 2 or call.key_groups.shape[-1] > 1:
        return None

    def part(*shape: int) -> Tensor:
        return torch.empty(number, batch, kv_heads, num_keys, *shape, dtype=torch.float32, device=device)

    return Parts(number, ceil_div(rows, number), part(widths[0]), part(widths[1]), part())


def add_parts(
    call: AttentionCall, setup: Setup, plan: FarPlan, copies: Sorted, keys: tuple[Tensor, Tensor],
    into: tuple[Tensor, Tensor], sums: Tensor, met: Tensor, visit: int,
) -> None:  # fmt: skip
    """keys: dk and dv as they are without the parts. into: where they go with them."""
    assert copies.parts is not None
    _, stretch, *parts = copies.parts
    (batch, kv_heads, num_keys, _), routers = call.k.shape, call.query_groups.shape[1]
    sizes = {name: setup.sizes[name] for name in ("G", "D", "DV", "BLOCK_D", "BLOCK_DV")}
    setup.launch(
        ("add parts", into is keys), add_parts_kernel, (ceil_div(num_keys, KEYS_AT_ONCE), copies.kv_heads, batch),
        (
            *keys, *into, sums, *parts, plan.key_slots, met,
            num_keys, kv_heads, copies.first_head, routers, visit, stretch,
        ),
        lambda: {"VISITS": call.query_groups.shape[-1], **sizes, "BLOCK": KEYS_AT_ONCE},
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_queries", "heads"])
def delta_kernel(
    DO, OUT, LSE, DELTA, LSE2, do_batch, do_head, do_token, o_batch, o_head, o_token, num_queries, heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, dv = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    live = at < num_queries
    held = live[:, None] & (dv < DV)[None, :]
    slot, head_64 = at.to(tl.int64)[:, None], head.to(tl.int64)
    do = tl.load(DO + batch * do_batch + head_64 * do_head + slot * do_token + dv[None, :], mask=held, other=0.0)
    out = tl.load(OUT + batch * o_batch + head_64 * o_head + slot * o_token + dv[None, :], mask=held, other=0.0)
    row = (batch * heads + head) * num_queries + at
    tl.store(DELTA + row, tl.sum(do.to(tl.float32) * out.to(tl.float32), 1), mask=live)
    lse = tl.load(LSE + row, mask=live, other=0.0)
    # exp2(s - inf) = 0: a query that saw nothing teaches nothing.
    tl.store(LSE2 + row, tl.where(lse == -float("inf"), float("inf"), lse * LOG2E), mask=live)


@triton.jit(do_not_specialize=["num_keys", "kv_heads", "first_head", "routers", "visit", "stretch"])
def add_parts_kernel(
    DK, DV_OUT, DK_INTO, DV_INTO, SUMS, PART_K, PART_V, PART_SUMS, KEY_SLOTS, SEEN_BY,
    num_keys, kv_heads, first_head, routers, visit, stretch,
    VISITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What was there and all parts, in their order. A key was met in the parts that its range of queries touches; the
    others were not written."""
    kv_head, batch = first_head + tl.program_id(1), tl.program_id(2).to(tl.int64)
    router = batch * routers + tl.where(routers == 1, 0, kv_head)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < num_keys
    slot = tl.load(KEY_SLOTS + router * num_keys + at, mask=live, other=0)
    seen_by = SEEN_BY + (router * VISITS + visit) * 2 * num_keys + at
    first = tl.load(seen_by, mask=live, other=0) * G
    last = tl.load(seen_by + num_keys, mask=live, other=0) * G
    met = last > first
    first_part, last_part = first // stretch, (last - 1) // stretch
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    held_k, held_v = live[:, None] & (d < D)[None, :], live[:, None] & (dv < DV)[None, :]
    row = ((batch * kv_heads + kv_head) * num_keys + slot)[:, None]
    dk = tl.load(DK + row * D + d[None, :], mask=held_k, other=0.0)
    dv_sum = tl.load(DV_OUT + row * DV + dv[None, :], mask=held_v, other=0.0)
    sums = tl.zeros([BLOCK], tl.float32)
    head = batch * tl.num_programs(1) + tl.program_id(1)
    heads = tl.num_programs(2) * tl.num_programs(1)
    for part in range(tl.min(tl.where(met, first_part, 1 << 30)), tl.max(tl.where(met, last_part + 1, 0))):
        here = met & (part >= first_part) & (part <= last_part)
        place = (part * heads + head) * num_keys + at
        dk += tl.load(PART_K + place[:, None] * D + d[None, :], mask=held_k & here[:, None], other=0.0)
        dv_sum += tl.load(PART_V + place[:, None] * DV + dv[None, :], mask=held_v & here[:, None], other=0.0)
        sums += tl.load(PART_SUMS + place, mask=here, other=0.0)
    tl.store(DK_INTO + row * D + d[None, :], dk.to(DK_INTO.dtype.element_ty), mask=held_k)
    tl.store(DV_INTO + row * DV + dv[None, :], dv_sum.to(DV_INTO.dtype.element_ty), mask=held_v)
    tl.store(SUMS + ((batch * kv_heads + kv_head) * VISITS + visit) * num_keys + at, sums, mask=live)
