"""The `triton` backend's forward: two fused kernels.

`near` runs over the queries in order: the window's band and the sinks. `far` runs over the queries sorted by the group
they visit: a prefix of the group's keys, then a merge with what is in the output already. A query that visits several
groups takes part in several rounds of `far`, one after the other, so that no two programs write one row.

The query heads of one KV head share a tile: keys and values are read once for all of them. Where queries and keys share
their ids, the groups are plain causal attentions: cuDNN does those, see `square.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_attn.attention import bulk, recorded, sorted_rows, square, triton_plan
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.device_plan import FarPlan, NearPlan, places, plan_far, plan_near
from focus_attn.attention.launch import Setup, Tile, ceil_div, power_of_2, setup_for, with_ids_in_a_row
from focus_attn.attention.merge import merge_sink_logits
from focus_attn.attention.sorted_rows import Copy, room_for, sort_rows
from focus_attn.attention.tiles import load_rows, packed_rows, real_address, tile_of_group
from focus_attn.visibility import EVERYTHING

LOG2E = tl.constexpr(1.4426950408889634)
# Sizes that change from call to call: no kernel is compiled anew for them.
LENGTHS = ["num_queries", "num_keys", "num_entries", "kv_heads", "first_head", "part_heads", "routers", "visit"]
LENGTHS += ["window", "num_sinks"]


@triton.jit
def _walk(
    acc, m, norm, q, first, last, lo, hi, barred,
    K, V, SLOTS, BITS, k_stride, v_stride, scale, softcap,
    COPIED: tl.constexpr, MASKED: tl.constexpr, DEDUP: tl.constexpr, APART: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over the listed keys first:last. Row i sees lo[i]:hi[i] of the list.

    COPIED: K and V are in the order of the list; otherwise SLOTS says where each key is. DEDUP: `barred` and BITS are
    sets of groups, and pairs whose sets meet are left out. APART: they are ids, and pairs of one id are left out.
    Scores are kept in base 2, for exp2 is the instruction the hardware has, and scaled together with the subtraction of
    the maximum.
    """
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    factor = scale * LOG2E
    if SOFTCAP:
        factor = LOG2E
    for start in tl.range(first, last, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < last
        row = at.to(tl.int64)
        if not COPIED:
            row = tl.load(SLOTS + at, mask=inside, other=0).to(tl.int64)
        if MASKED or BLOCK_D != D:
            k = tl.load(K + row[None, :] * k_stride + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        else:
            k = tl.load(K + row[None, :] * k_stride + d[:, None])
        x = tl.dot(q, k, input_precision=PRECISION)
        if SOFTCAP:
            x = softcap * (2 * tl.sigmoid(2 * scale * x / softcap) - 1)
        if MASKED:
            visible = (at[None, :] >= lo[:, None]) & (at[None, :] < hi[:, None])
            x = tl.where(visible, x, -float("inf"))
        if DEDUP:
            bits = tl.load(BITS + tl.load(SLOTS + at, mask=inside, other=0), mask=inside, other=0)
            x = tl.where((bits[None, :] & barred[:, None]) == 0, x, -float("inf"))
        if APART:
            ids = tl.load(BITS + at, mask=inside, other=0).to(tl.int32)
            x = tl.where(ids[None, :] != barred[:, None], x, -float("inf"))
        m_new = tl.maximum(m, tl.max(x, 1) * factor)
        shift = m_new
        if MASKED or DEDUP:
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has seen nothing yet
        p = tl.exp2(x * factor - shift[:, None])
        alpha = tl.exp2(m - shift)
        norm = norm * alpha + tl.sum(p, 1)
        if MASKED or BLOCK_DV != DV:
            v = tl.load(V + row[:, None] * v_stride + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
        else:
            v = tl.load(V + row[:, None] * v_stride + dv[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, norm


@triton.jit(do_not_specialize=LENGTHS)
def _near_kernel(
    Q, K, V, OUT, LSE, QUERY_SLOTS, KEY_SLOTS, RANGES, IDS, PLACES, PART, PART_LSE,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    num_queries, num_keys, kv_heads, first_head, part_heads, window, num_sinks, scale, softcap,
    PLAIN: tl.constexpr, SQUARE: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_TABLE: tl.constexpr,
):  # fmt: skip
    """PLAIN: slots are positions, so that ranges are known. SQUARE: PART has what each query saw in its own group,
    sorted by group (PLACES), and only pairs of different IDS are left to see."""
    Q, K, V = real_address(Q, BY_TABLE), real_address(K, BY_TABLE), real_address(V, BY_TABLE)
    OUT, LSE, IDS = real_address(OUT, BY_TABLE), real_address(LSE, BY_TABLE), real_address(IDS, BY_TABLE)
    kv_head, batch = first_head + tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, live, head = packed_rows(tl.program_id(0) * (BLOCK_M // G), num_queries, kv_head, G, BLOCK_M)
    slot = at.to(tl.int64)
    ranges = RANGES + batch * 4 * num_queries
    if PLAIN:
        hi = at + num_keys - num_queries + 1
        lo = tl.maximum(hi - 1 - window, 0)
        hi = tl.where(live, hi, 0)
    else:
        slot = tl.load(QUERY_SLOTS + batch * num_queries + at, mask=live, other=0).to(tl.int64)
        lo = tl.load(ranges + at, mask=live, other=0)
        hi = tl.load(ranges + num_queries + at, mask=live, other=0)
    dv = tl.arange(0, BLOCK_DV)
    q = load_rows(Q + batch * q_batch, head, slot, q_head, q_token, live, D, BLOCK_D)
    ids, apart = IDS, lo
    if SQUARE:
        ids = IDS + batch * num_keys
        apart = tl.load(ids + at, mask=live, other=0).to(tl.int32)
        place = batch * num_queries + tl.load(PLACES + batch * num_queries + at, mask=live, other=0)
        part = place * part_heads + head - first_head * G
        m = tl.load(PART_LSE + part, mask=live, other=0.0) * LOG2E
        norm = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = tl.load(PART + part[:, None] * DV + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        acc = acc.to(tl.float32)
    else:
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    keys = K + batch * k_batch + kv_head.to(tl.int64) * k_head
    values = V + batch * v_batch + kv_head.to(tl.int64) * v_head
    slots = KEY_SLOTS + batch * num_keys
    seen = hi > lo
    first, last = tl.min(tl.where(seen, lo, num_keys)), tl.max(hi)
    acc, m, norm = _walk(
        acc, m, norm, q, first, last, lo, hi, apart, keys, values, slots, ids, k_token, v_token, scale, softcap,
        PLAIN, True, False, SQUARE, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    if SINKS:
        if PLAIN:
            hi = tl.where(live, tl.minimum(lo, num_sinks), 0)
            lo = tl.zeros_like(hi)
        else:
            lo = tl.load(ranges + 2 * num_queries + at, mask=live, other=0)
            hi = tl.load(ranges + 3 * num_queries + at, mask=live, other=0)
        seen = hi > lo
        first, last = tl.min(tl.where(seen, lo, num_keys)), tl.max(hi)
        acc, m, norm = _walk(
            acc, m, norm, q, first, last, lo, hi, apart, keys, values, slots, ids, k_token, v_token, scale, softcap,
            PLAIN, True, False, SQUARE, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, 16,
        )  # fmt: skip
    out = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    rows = OUT + batch * o_batch + (head.to(tl.int64) * o_head + slot * o_token)[:, None] + dv[None, :]
    tl.store(rows, out.to(OUT.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])
    lse = tl.where(norm > 0, (m + tl.log2(tl.where(norm > 0, norm, 1.0))) / LOG2E, -float("inf"))
    tl.store(LSE + (batch * kv_heads * G + head) * num_queries + slot, lse, mask=live)


@triton.jit(do_not_specialize=LENGTHS)
def _far_kernel(
    Q, K, V, OUT, LSE, QUERY_SLOTS, KEY_SLOTS, RANGES, STARTS, BITS, BARRED, PART, PART_LSE,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    num_queries, num_keys, num_entries, kv_heads, first_head, routers, visit, scale, softcap,
    VISITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, RANGED: tl.constexpr, DEDUP: tl.constexpr,
    BULK: tl.constexpr, JOB_ROWS: tl.constexpr, LEAST: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_M // G
    kv_head, batch = first_head + tl.program_id(1), tl.program_id(2).to(tl.int64)
    router = batch * routers + tl.where(routers == 1, 0, kv_head)
    line = router * VISITS + visit

    group, begin, end = tile_of_group(STARTS + line * (GROUPS + 1), tl.program_id(0), ROWS, GROUPS, BLOCK_GROUPS)
    if begin >= end:
        return
    at, live, head = packed_rows(begin, end, kv_head, G, BLOCK_M)
    ranges = RANGES + line * 2 * num_queries
    lo = tl.load(ranges + at, mask=live, other=0)
    hi = tl.load(ranges + num_queries + at, mask=live, other=0)
    last_row = tl.minimum(begin + ROWS, end) - 1
    lo_first, lo_last = tl.load(ranges + begin), tl.load(ranges + last_row)
    hi_first, hi_last = tl.load(ranges + num_queries + begin), tl.load(ranges + num_queries + last_row)
    if hi_last <= lo_first:
        return
    slot = tl.load(QUERY_SLOTS + line * num_queries + at, mask=live, other=0).to(tl.int64)
    barred = lo
    if DEDUP:  # groups that earlier visits of the query were to: keys in one of them have been met
        barred = tl.load(BARRED + line * num_queries + slot, mask=live, other=0)
    dv = tl.arange(0, BLOCK_DV)
    q = load_rows(Q + batch * q_batch, head, slot, q_head, q_token, live, D, BLOCK_D)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if BULK:  # cuDNN has seen what the first query of this tile's job sees, see `bulk.py`
        seen = tl.load(ranges + num_queries + group + (begin - group) // JOB_ROWS * JOB_ROWS)
        if seen - lo_first >= LEAST:
            own = tl.where(routers == 1, 0, tl.program_id(1))
            lines, heads = tl.where(routers == 1, 1, tl.num_programs(1)), tl.where(routers == 1, tl.num_programs(1), 1)
            part = ((batch * lines + own) * num_queries + at) * heads * G + head - (first_head + own) * G
            m = tl.load(PART_LSE + part, mask=live, other=0.0) * LOG2E
            norm += 1
            rows = PART + part[:, None] * DV + dv[None, :]
            acc = tl.load(rows, mask=live[:, None] & (dv < DV)[None, :], other=0.0).to(tl.float32)
            lo_first = seen
            lo_last = seen
    keys = K + batch * k_batch + tl.program_id(1).to(tl.int64) * k_head  # copies of this launch's heads alone
    values = V + batch * v_batch + tl.program_id(1).to(tl.int64) * v_head
    slots, bits = KEY_SLOTS + router * num_entries, BITS + router * num_keys

    # Keys that every row sees need no mask; the edges do.
    full_first = lo_first + (lo_last - lo_first + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_last = full_first + tl.maximum(hi_first - full_first, 0) // BLOCK_N * BLOCK_N
    if RANGED:
        acc, m, norm = _walk(
            acc, m, norm, q, lo_first, tl.minimum(full_first, hi_last), lo, hi, barred, keys, values, slots, bits,
            k_token, v_token, scale, softcap,
            True, True, DEDUP, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
    acc, m, norm = _walk(
        acc, m, norm, q, full_first, full_last, lo, hi, barred, keys, values, slots, bits,
        k_token, v_token, scale, softcap,
        True, False, DEDUP, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    acc, m, norm = _walk(
        acc, m, norm, q, full_last, hi_last, lo, hi, barred, keys, values, slots, bits,
        k_token, v_token, scale, softcap,
        True, True, DEDUP, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip

    # Merge with what earlier passes wrote.
    rows = OUT + batch * o_batch + (head.to(tl.int64) * o_head + slot * o_token)[:, None] + dv[None, :]
    lse_rows = LSE + (batch * kv_heads * G + head) * num_queries + slot
    found = live & (norm > 0)
    old_lse = tl.load(lse_rows, mask=found, other=0.0) * LOG2E
    old = tl.load(rows, mask=found[:, None] & (dv < DV)[None, :], other=0.0).to(tl.float32)
    lse = m + tl.log2(tl.where(norm > 0, norm, 1.0))
    weight = 1 / (1 + tl.exp2(old_lse - lse))
    out = old + weight[:, None] * (acc / tl.where(norm > 0, norm, 1.0)[:, None] - old)
    top = tl.maximum(old_lse, lse)
    merged = (top + tl.log2(tl.exp2(old_lse - top) + tl.exp2(lse - top))) / LOG2E
    tl.store(rows, out.to(OUT.dtype.element_ty), mask=found[:, None] & (dv < DV)[None, :])
    tl.store(lse_rows, merged, mask=found)


def tile_for(kernel: str, call: AttentionCall) -> Tile:
    """Measured on an H200 in bf16 at 32 heads x 128 and 9 heads x 64; smaller where a row takes more shared memory."""
    width = max(call.q.shape[-1], call.v.shape[-1]) * call.q.element_size()
    if width > 512:
        return Tile(32, 32, 4, 1)
    if width > 256:
        return Tile(64, 32, 4, 1)
    narrow = width <= 128
    tiles = {
        "near": Tile(64, 32, 4, 3),
        "far": Tile(128, 128, 8, 3),
        "near, query side": Tile(64, 32, 4, 2),
        "near, key side": Tile(32, 64, 4, 2),
        "far, query side": Tile(128, 128, 8, 2) if narrow else Tile(64, 64, 4, 2),
        "far, key side": Tile(64, 64, 4, 1) if narrow else Tile(64, 64, 4, 2),
        "sinks": Tile(64, 16, 4, 2),
    }
    return _fitting(tiles[kernel], width, _shared_memory(call.q.device))


def _fitting(tile: Tile, width: int, room: int) -> Tile:
    """Fewer stages, then fewer keys, on devices with less shared memory than an H200: an A100 has 163 KiB a block, most
    others 99. width: bytes of a row."""
    while (tile.rows + 2 * tile.stages * tile.keys) * width > room and tile.stages > 1:
        tile = tile._replace(stages=tile.stages - 1)
    while (tile.rows + 2 * tile.stages * tile.keys) * width > room and tile.keys > 16:
        tile = tile._replace(keys=tile.keys // 2)
    return tile


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have."""
    if device.type != "cuda":
        return 1 << 20  # Triton's interpreter has no such limit
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))  # AMD's


def triton_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out [B, H, Tq, Dv] in the dtype of v, logsumexp [B, H, Tq] fp32."""
    return _forward(call, square.square_forward)


def triton_inference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The same outside of PyTorch's operators, where short calls may be recorded: inside, a compiler may be at work
    that recycles all memory that it does not know of."""
    return _forward(call, recorded.square_forward)


def _forward(
    call: AttentionCall, square_forward: Callable[[AttentionCall, Setup, Tensor, Tensor], None]
) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, _ = call.q.shape
    # Laid out as the model wants it next: [B, Tq, H, Dv], seen as [B, H, Tq, Dv].
    width = call.v.shape[-1]
    # Several rounds of visits would round to half precision several times.
    out = torch.empty_strided(
        (batch, heads, num_queries, width),
        (num_queries * heads * width, width, heads * width, 1),
        dtype=call.v.dtype if call.query_groups.shape[-1] == 1 else torch.float32,
        device=call.q.device,
    )
    lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=call.q.device)
    if num_queries == 0:
        return out, lse
    call = with_ids_in_a_row(call)
    setup = setup_for(call)
    if square.serves(call, setup):
        square_forward(call, setup, out, lse)
    else:
        _near_and_far(call, setup, out, lse)
    if call.sink_logits is not None:
        out, lse = merge_sink_logits(out.float(), lse, call.sink_logits)
    return out if out.dtype == call.v.dtype else out.to(call.v.dtype), lse


def _near_and_far(call: AttentionCall, setup: Setup, out: Tensor, lse: Tensor) -> None:
    if triton_plan.serves(call):
        launch_near(call, setup, None, out, lse)
        if has_far_pairs(call):
            _launch_far(call, setup, triton_plan.plan_far(call, setup)[0], out, lse)
        return
    query, key = places(call.tokens)
    launch_near(call, setup, plan_near(query, key, call.pattern), out, lse)
    if has_far_pairs(call):
        _launch_far(call, setup, plan_far(call, query, key), out, lse)


def has_far_pairs(call: AttentionCall) -> bool:
    """Whether a key can lie beyond the window. Known without a look at the positions, which may have gaps."""
    return call.pattern.window < EVERYTHING


def launch_near(
    call: AttentionCall, setup: Setup, plan: NearPlan | None, out: Tensor, lse: Tensor, seed: square.Seed | None = None
) -> None:
    """plan: None where positions are plain. seed: what queries saw in their groups, for a run of KV heads."""
    (batch, _, num_queries, _), (_, kv_heads, num_keys, _) = call.q.shape, call.k.shape
    tile, pattern = setup.once("near tile", lambda: tile_for("near", call)), call.pattern
    planned = (lse, lse, lse) if plan is None else (plan.query_slots, plan.key_slots, plan.ranges)
    seeds = (lse, lse, lse, lse) if seed is None else (call.key_groups, seed.places, seed.out, seed.lse)
    first_head, heads = (0, kv_heads) if seed is None else (seed.first_head, seed.kv_heads)
    tensors, strides = rows_and_strides(call, setup, out)
    tiles = ceil_div(num_queries, tile.rows // setup.heads_a_key)
    setup.launch(
        "near" if seed is None else "near, seeded", _near_kernel, (tiles, heads, batch),
        (
            *tensors, lse, *planned, *seeds, *strides,
            num_queries, num_keys, kv_heads, first_head, heads * setup.heads_a_key, pattern.window, pattern.num_sinks,
            call.scale, call.softcap or 1.0,
        ),
        lambda: {
            "PLAIN": plan is None, "SQUARE": seed is not None, "SINKS": pattern.num_sinks > 0,
            **setup.sizes, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys,
        },
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip


def _launch_far(call: AttentionCall, setup: Setup, plan: FarPlan, out: Tensor, lse: Tensor) -> None:
    (batch, _, num_queries, _), (_, kv_heads, num_keys, _) = call.q.shape, call.k.shape
    routers, query_k = call.query_groups.shape[1], call.query_groups.shape[3]
    groups, entries = call.pattern.num_groups, plan.key_slots.shape[-1]
    dedup, in_bulk = can_meet_twice(call), bulk.serves(call, setup)
    bits, barred = set_bits(call) if dedup else (plan.key_slots, plan.key_slots)
    ranged = call.tokens.key_segments is not None or call.pattern.sliding_window is not None
    tile = setup.once("far tile", lambda: tile_for("far", call))
    rows = tile.rows // setup.heads_a_key
    tiles = ceil_div(num_queries, rows) + groups  # every group may end in a tile that is not full
    (q, _, _, out), strides = rows_and_strides(call, setup, out)
    step = setup.once("far step", lambda: sorted_rows.heads_at_once(call, copies=3 if in_bulk else 2))
    k, v = room_for(call, step, "kv", entries)
    strides = (*strides[:3], *sorted_rows.strides(k), *sorted_rows.strides(v), *strides[9:])
    for first_head in range(0, kv_heads, step):
        slots = plan.key_slots if routers == 1 else plan.key_slots[:, first_head : first_head + step]
        _sort_keys(call, setup, slots, k, v, first_head)
        for visit in range(query_k):
            part = (lse, lse)
            if in_bulk:
                part = bulk.bulk_forward(call, setup, plan, k, v, first_head, visit, rows)
            setup.launch(
                "far", _far_kernel, (tiles, step, batch),
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


def _sort_keys(call: AttentionCall, setup: Setup, slots: Tensor, k: Tensor, v: Tensor, first_head: int) -> None:
    keys, values = Copy(call.k, k, first_head, slots), Copy(call.v, v, first_head, slots)
    if k.shape[-1] == v.shape[-1]:
        sort_rows(setup, "k, v", keys, values)
    else:
        sort_rows(setup, "k", keys)
        sort_rows(setup, "v", values)


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
    """q, k, v and out with rows that run on in memory, and their strides (batch, head, token)."""
    tensors = call.q, call.k, call.v, out
    contiguous = setup.once("contiguous", lambda: [x.stride(-1) == 1 for x in tensors])
    if not all(contiguous):
        q, k, v, out = (x if fine else x.contiguous() for x, fine in zip(tensors, contiguous, strict=True))
        tensors = q, k, v, out
    strides = setup.once("strides", lambda: tuple(stride for x in tensors for stride in x.stride()[:3]))
    return tensors, strides
