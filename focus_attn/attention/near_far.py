"""The general way through a call: near, then far.

Far runs over copies of the keys sorted by group, and over the queries sorted by the group they visit. A query that
visits several groups takes part in several rounds of it, one after the other, so that no two programs write one row. A
few KV heads go at a time, so that the sorted copies stay small beside the output.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.attention import bulk, sorted_rows, triton_plan
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.device_plan import FarPlan, NearPlan, places, plan_far, plan_near
from focus_attn.attention.forward_kernels import far_kernel, near_kernel
from focus_attn.attention.launch import Setup, Tile, ceil_div, fitting, in_step, lies_in_rows, power_of_2, shared_memory
from focus_attn.attention.sorted_rows import Copy, room_for, sort_rows_alike
from focus_attn.attention.triton_plan import CountedPlan
from focus_attn.visibility import EVERYTHING


class Room(NamedTuple):
    """What the forward of a plain call writes on its way: the plan, and sorted copies of some heads."""

    plan: CountedPlan
    k: Tensor  # [B, lines, Tk, heads a line, D]
    v: Tensor


class Seed(NamedTuple):
    """What tokens saw in their own groups, or the gradients from there, sorted by group: near goes on from it."""

    places: Tensor  # [B, T] int32
    out: Tensor  # [B * T, heads, Dv] in memory
    lse: Tensor  # [B * T, heads] fp32
    first_head: int  # of the KV heads
    kv_heads: int


def forward(call: AttentionCall, setup: Setup, out: Tensor, lse: Tensor) -> None:
    """Fills out [B, H, Tq, Dv] and lse [B, H, Tq]."""
    if triton_plan.serves(call):
        if has_far_pairs(call):
            launch_forward(call, setup, make_room(call, setup), out, lse)
        else:
            launch_near(call, setup, None, out, lse)
        return
    query, key = places(call.tokens)
    launch_near(call, setup, plan_near(query, key, call.pattern), out, lse)
    if has_far_pairs(call):
        plan = plan_far(call, query, key)
        room = room_for_keys(call, _heads_at_once(call, setup), plan.key_slots.shape[-1])
        _launch_far(call, setup, plan, *room, out, lse)


def can_be_recorded(call: AttentionCall, setup: Setup) -> bool:
    """Whether `launch_forward` does it, in one piece."""
    return (
        triton_plan.serves(call)
        and has_far_pairs(call)
        and not bulk.serves(call, setup)
        and _heads_at_once(call, setup) == call.k.shape[1]
    )


def make_room(call: AttentionCall, setup: Setup) -> Room:
    room = room_for_keys(call, _heads_at_once(call, setup), call.k.shape[2])
    return Room(triton_plan.room_for_far(call), *room)


def launch_forward(call: AttentionCall, setup: Setup, room: Room, out: Tensor, lse: Tensor) -> None:
    """Launches alone, and no new tensors but for `bulk.py`: a CUDA graph can hold them."""
    launch_near(call, setup, None, out, lse)
    triton_plan.plan_far(call, setup, room.plan)
    _launch_far(call, setup, room.plan.far, room.k, room.v, out, lse)


def has_far_pairs(call: AttentionCall) -> bool:
    """Whether a key can lie beyond the window. Known without a look at the positions, which may have gaps."""
    return call.pattern.window < EVERYTHING


def launch_near(
    call: AttentionCall, setup: Setup, plan: NearPlan | None, out: Tensor, lse: Tensor,
    seed: Seed | None = None, ids: Tensor | None = None,
) -> None:  # fmt: skip
    """plan: None where positions are plain. seed: what queries saw in their groups, for a run of KV heads; those groups
    are `ids`, as `SquarePlan` has them."""
    (batch, _, num_queries, _), (_, kv_heads, num_keys, _) = call.q.shape, call.k.shape
    tile, pattern = tile_of(setup, "near", call), call.pattern
    assert tile.keys <= triton_plan.MOST_KEYS
    planned = (lse, lse, lse) if plan is None else (plan.query_slots, plan.key_slots, plan.ranges)
    seeds = (lse, lse, lse, lse) if seed is None else (ids, seed.places, seed.out, seed.lse)
    first_head, heads = (0, kv_heads) if seed is None else (seed.first_head, seed.kv_heads)
    tensors, strides = rows_and_strides(call, setup, out)
    rows = tile.rows // setup.heads_a_key
    setup.launch(
        "near" if seed is None else "near, seeded", near_kernel, (ceil_div(num_queries, rows), heads, batch),
        (
            *tensors, lse, *planned, *seeds, *strides, 0 if ids is None else ids.stride(0),
            num_queries, num_keys, kv_heads, first_head, heads * setup.heads_a_key, pattern.window, pattern.num_sinks,
            call.scale, call.softcap or 1.0,
        ),
        lambda: {
            "PLAIN": plan is None, "EVEN": plan is None and num_queries % rows == num_keys % tile.keys == 0,
            "SQUARE": seed is not None, "SINKS": pattern.num_sinks > 0,
            **setup.sizes, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys,
        },
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip


def _launch_far(
    call: AttentionCall, setup: Setup, plan: FarPlan, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """k, v: room for sorted copies."""
    (batch, _, num_queries, _), (_, kv_heads, num_keys, _) = call.q.shape, call.k.shape
    routers, query_k = call.query_groups.shape[1], call.query_groups.shape[3]
    groups, entries = call.pattern.num_groups, plan.key_slots.shape[-1]
    dedup, in_bulk = can_meet_twice(call), bulk.serves(call, setup)
    bits, barred = set_bits(call) if dedup else (plan.key_slots, plan.key_slots)
    ranged = call.tokens.key_segments is not None or call.pattern.sliding_window is not None
    tile = tile_of(setup, "far", call)
    rows = tile.rows // setup.heads_a_key
    tiles = ceil_div(num_queries, rows) + groups  # every group may end in a tile that is not full
    (q, _, _, out), strides = rows_and_strides(call, setup, out)
    step = _heads_at_once(call, setup)
    strides = (*strides[:3], *sorted_rows.strides(k), *sorted_rows.strides(v), *strides[9:])
    for first_head in range(0, kv_heads, step):
        slots = plan.key_slots if routers == 1 else plan.key_slots[:, first_head : first_head + step]
        sort_keys(call, setup, slots, k, v, first_head)
        for visit in range(query_k):
            part = (lse, lse)
            if in_bulk:
                part = bulk.bulk_forward(call, setup, plan, k, v, first_head, visit, rows)
            setup.launch(
                "far", far_kernel, (tiles, step, batch),
                (
                    q, k, v, out, lse,
                    plan.query_slots, plan.key_slots, plan.ranges, plan.group_starts, bits, barred, *part, *strides,
                    num_queries, num_keys, entries, kv_heads, first_head, routers, visit,
                    call.scale, call.softcap or 1.0,
                ),
                lambda: {
                    "VISITS": query_k, "GROUPS": groups, "BLOCK_GROUPS": power_of_2(groups),
                    "RANGED": ranged, "DEDUP": dedup,
                    "BULK": in_bulk, "JOB_ROWS": bulk.job_rows(rows), "LEAST": bulk.LEAST_KEYS,
                    **setup.sizes, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys,
                },
                warps=tile.warps, stages=tile.stages,
            )  # fmt: skip


def _heads_at_once(call: AttentionCall, setup: Setup) -> int:
    """KV heads whose keys are sorted at a time."""
    copies = 3 if bulk.serves(call, setup) else 2
    step: int = setup.once("far step", lambda: sorted_rows.heads_at_once(call, copies))
    return step


def room_for_keys(call: AttentionCall, kv_heads: int, entries: int) -> tuple[Tensor, Tensor]:
    k, v = room_for(call, kv_heads, "kv", entries)
    return k, v


def sort_keys(call: AttentionCall, setup: Setup, slots: Tensor, k: Tensor, v: Tensor, first_head: int) -> None:
    sort_rows_alike(setup, ("k", "v"), Copy(call.k, k, first_head, slots), Copy(call.v, v, first_head, slots))


def can_meet_twice(call: AttentionCall) -> bool:
    """Whether a pair can share several groups, and so would be met in several of them."""
    return min(call.query_groups.shape[-1], call.key_groups.shape[-1]) > 1


def set_bits(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Each key's groups as bits [B, R, Tk], and for each visit of a query those of its earlier ones [B, R, k, Tq]."""
    key_bits = _bits(call.key_groups).flatten(0, -2).T  # [key_k, ...]
    bits = key_bits[0].clone()
    for more in key_bits[1:]:
        bits |= more
    query_bits = _bits(call.query_groups).movedim(-1, 2).contiguous()  # [B, R, query_k, Tq]
    barred = torch.zeros_like(query_bits)
    for visit in range(1, query_bits.shape[2]):
        barred[:, :, visit] = barred[:, :, visit - 1] | query_bits[:, :, visit - 1]
    return bits.view(call.key_groups.shape[:3]), barred


def _bits(ids: Tensor) -> Tensor:
    return torch.ones_like(ids) << ids


def rows_and_strides(
    call: AttentionCall, setup: Setup, out: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[int, ...]]:
    """q, k and v with rows that run on in memory, out (or its gradient) as it is; strides (batch, head, token)."""
    q, k, v = call.q, call.k, call.v
    if not setup.once("in rows", lambda: all(map(lies_in_rows, (q, k, v)))):
        q, k, v = (x if lies_in_rows(x) else x.contiguous() for x in (q, k, v))
    strides = setup.once("strides", lambda: tuple(stride for x in (q, k, v, out) for stride in x.stride()[:3]))
    return (q, k, v, out), strides


def tile_of(setup: Setup, kernel: str, call: AttentionCall) -> Tile:
    """`tile_for`, found once for all calls with one signature."""
    tile: Tile = setup.once(("tile", kernel), lambda: tile_for(kernel, call))
    return tile


def tile_for(kernel: str, call: AttentionCall) -> Tile:
    """Measured on an H200 in bf16 at 32 heads x 128 and 9 heads x 64; smaller where a row takes more shared memory, or
    rows are out of step, or the device has less."""
    width = max(call.q.shape[-1], call.v.shape[-1]) * call.q.element_size()
    narrow = width <= 128
    tiles = {
        "near": Tile(64, 32, 4, 3),
        "far": Tile(128, 128, 8, 3),
        "near, query side": Tile(64, 32, 4, 2),
        "near, key side": Tile(32, 64, 4, 2),
        "far, query side": Tile(128, 128, 8, 3) if narrow else Tile(64, 64, 4, 2),
        "far, key side": Tile(64, 64, 4, 1) if narrow else Tile(64, 64, 4, 2),
        "sinks": Tile(64, 16, 4, 2),
    }
    tile = tiles[kernel]
    if width > 512 or not in_step(call.q, call.k, call.v):
        tile = Tile(32, 32, 4, 1)
    elif width > 256:
        tile = Tile(64, 32, 4, 1)
    fewest = max(16, power_of_2(call.q.shape[1] // call.k.shape[1]))  # the heads of a KV head share a tile
    needed = functools.partial(bytes_of, kernel=kernel, width=width, exact=call.q.element_size() == 4)
    return fitting(tile, needed, shared_memory(call.q.device), fewest)


def bytes_of(tile: Tile, kernel: str, width: int, exact: bool) -> int:
    """Of shared memory, as compiled for GPUs with 99 KiB of it. What stays, what streams past in stages, and room to
    change the layout of scores. width: bytes of a row; exact: fp32."""
    rows, keys, stages, scores = tile.rows, tile.keys, tile.stages, tile.rows * tile.keys
    if "key side" in kernel or kernel == "sinks":
        return 2 * width * (keys + stages * rows) + 8 * scores
    if "query side" in kernel:
        return 2 * width * (rows + stages * keys)
    return width * (rows + 2 * stages * keys) + (2 * scores + 4 * rows if exact and stages == 1 else 0)
