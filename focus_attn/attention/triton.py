"""The `triton` backend's forward: two fused kernels, keys gathered as they are read, nothing copied.

`near` runs over the queries in order: the window's band and the sinks. `far` runs over the queries sorted by the group
they visit: a prefix of the group's keys, then a merge with what is in the output already. A query that visits several
groups takes part in several rounds of `far`, one after the other, so that no two programs write one row.

The query heads of one KV head share a tile: keys and values are read once for all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.device_plan import FarPlan, NearPlan, places, plan_far, plan_near
from focus_attn.attention.merge import merge_sink_logits
from focus_attn.visibility import EVERYTHING

LOG2E = tl.constexpr(1.4426950408889634)
# Sizes that change from call to call: no kernel is compiled anew for them.
LENGTHS = ["num_queries", "num_keys", "num_entries", "kv_heads", "first_head", "routers", "visit"]


@triton.jit
def _walk(
    acc, m, norm, q, first, last, lo, hi, barred,
    K, V, SLOTS, BITS, k_stride, v_stride, scale, softcap,
    COPIED: tl.constexpr, MASKED: tl.constexpr, DEDUP: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over the listed keys first:last. Row i sees lo[i]:hi[i] of the list.

    COPIED: K and V are in the order of the list; otherwise SLOTS says where each key is. Scores are kept in base 2, for
    exp2 is the instruction the hardware has, and scaled together with the subtraction of the maximum.
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
    Q, K, V, OUT, LSE, QUERY_SLOTS, KEY_SLOTS, RANGES,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    num_queries, num_keys, kv_heads, scale, softcap,
    SINKS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_M // G
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r = tl.arange(0, BLOCK_M)
    at = tl.program_id(0) * ROWS + r // G
    live = (r < ROWS * G) & (at < num_queries)
    head = kv_head * G + r % G
    slot = tl.load(QUERY_SLOTS + batch * num_queries + at, mask=live, other=0).to(tl.int64)
    ranges = RANGES + batch * 4 * num_queries
    lo = tl.load(ranges + at, mask=live, other=0)
    hi = tl.load(ranges + num_queries + at, mask=live, other=0)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q = tl.load(
        Q + batch * q_batch + (head.to(tl.int64) * q_head + slot * q_token)[:, None] + d[None, :],
        mask=live[:, None] & (d < D)[None, :],
        other=0.0,
    )
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    keys = K + batch * k_batch + kv_head.to(tl.int64) * k_head
    values = V + batch * v_batch + kv_head.to(tl.int64) * v_head
    slots = KEY_SLOTS + batch * num_keys
    seen = hi > lo
    first, last = tl.min(tl.where(seen, lo, num_keys)), tl.max(hi)
    acc, m, norm = _walk(
        acc, m, norm, q, first, last, lo, hi, lo, keys, values, slots, slots, k_token, v_token, scale, softcap,
        False, True, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    if SINKS:
        lo = tl.load(ranges + 2 * num_queries + at, mask=live, other=0)
        hi = tl.load(ranges + 3 * num_queries + at, mask=live, other=0)
        seen = hi > lo
        first, last = tl.min(tl.where(seen, lo, num_keys)), tl.max(hi)
        acc, m, norm = _walk(
            acc, m, norm, q, first, last, lo, hi, lo, keys, values, slots, slots, k_token, v_token, scale, softcap,
            False, True, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, 16,
        )  # fmt: skip
    out = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    rows = OUT + batch * o_batch + (head.to(tl.int64) * o_head + slot * o_token)[:, None] + dv[None, :]
    tl.store(rows, out.to(OUT.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])
    lse = tl.where(norm > 0, (m + tl.log2(tl.where(norm > 0, norm, 1.0))) / LOG2E, -float("inf"))
    tl.store(LSE + (batch * kv_heads * G + head) * num_queries + slot, lse, mask=live)


@triton.jit(do_not_specialize=LENGTHS)
def _far_kernel(
    Q, K, V, OUT, LSE, QUERY_SLOTS, KEY_SLOTS, RANGES, STARTS, BITS, BARRED,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    num_queries, num_keys, num_entries, kv_heads, first_head, routers, visit, scale, softcap,
    VISITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, RANGED: tl.constexpr, DEDUP: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_M // G
    kv_head, batch = first_head + tl.program_id(1), tl.program_id(2).to(tl.int64)
    router = batch * routers + tl.where(routers == 1, 0, kv_head)
    line = router * VISITS + visit

    # Which tile of which group: groups one after the other, the longest prefixes of each first.
    g = tl.arange(0, BLOCK_GROUPS)
    begins = tl.load(STARTS + line * (GROUPS + 1) + g, mask=g < GROUPS, other=0)
    ends = tl.load(STARTS + line * (GROUPS + 1) + g + 1, mask=g < GROUPS, other=0)
    tiles = (ends - begins + ROWS - 1) // ROWS
    upto = tl.cumsum(tiles, 0)
    number = tl.program_id(0)
    mine = (upto - tiles <= number) & (number < upto)
    begin, end = tl.sum(tl.where(mine, begins, 0)), tl.sum(tl.where(mine, ends, 0))
    if begin == end:
        return
    begin += (tl.sum(tl.where(mine, upto, 0)) - 1 - number) * ROWS

    r = tl.arange(0, BLOCK_M)
    at = begin + r // G
    live = (r < ROWS * G) & (at < end)
    head = kv_head * G + r % G
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
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q = tl.load(
        Q + batch * q_batch + (head.to(tl.int64) * q_head + slot * q_token)[:, None] + d[None, :],
        mask=live[:, None] & (d < D)[None, :],
        other=0.0,
    )
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
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
            True, True, DEDUP, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
    acc, m, norm = _walk(
        acc, m, norm, q, full_first, full_last, lo, hi, barred, keys, values, slots, bits,
        k_token, v_token, scale, softcap,
        True, False, DEDUP, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    acc, m, norm = _walk(
        acc, m, norm, q, full_last, hi_last, lo, hi, barred, keys, values, slots, bits,
        k_token, v_token, scale, softcap,
        True, True, DEDUP, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
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


class Tile(NamedTuple):
    """How one kernel is launched: rows and keys a tile, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_for(kernel: str, call: AttentionCall) -> Tile:
    """Measured on an H200 at 32 heads x 128 in bf16; smaller where a row takes more shared memory."""
    width = max(call.q.shape[-1], call.v.shape[-1]) * call.q.element_size()
    if width > 512:
        return Tile(32, 32, 4, 1)
    if width > 256:
        return Tile(64, 32, 4, 1)
    return {"near": Tile(64, 64, 4, 2), "far": Tile(128, 128, 8, 3)}.get(kernel, Tile(64, 64, 4, 2))


def triton_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out [B, H, Tq, Dv] in the dtype of v, logsumexp [B, H, Tq] fp32."""
    batch, heads, num_queries, _ = call.q.shape
    # Laid out as the model wants it next: [B, Tq, H, Dv], seen as [B, H, Tq, Dv].
    out = torch.empty(batch, num_queries, heads, call.v.shape[-1], dtype=call.v.dtype, device=call.q.device)
    out = out.transpose(1, 2)
    lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=call.q.device)
    if num_queries == 0:
        return out, lse
    query, key = places(call.tokens)
    _launch_near(call, plan_near(query, key, call.pattern), out, lse)
    if has_far_pairs(call):
        _launch_far(call, plan_far(call, query, key), out, lse)
    if call.sink_logits is not None:
        merged, lse = merge_sink_logits(out.float(), lse, call.sink_logits)
        out = merged.to(out.dtype)
    return out, lse


def has_far_pairs(call: AttentionCall) -> bool:
    """Whether a key can lie beyond the window. Known without a look at the positions, which may have gaps."""
    return call.pattern.window < EVERYTHING


def _launch_near(call: AttentionCall, plan: NearPlan, out: Tensor, lse: Tensor) -> None:
    num_queries, num_keys, kv_heads = call.q.shape[2], call.k.shape[2], call.k.shape[1]
    tile, (sizes, tensors, strides) = tile_for("near", call), shared_arguments(call, out, lse)
    _near_kernel[(triton.cdiv(num_queries, tile.rows // sizes["G"]), kv_heads, call.q.shape[0])](
        *tensors, plan.query_slots, plan.key_slots, plan.ranges, *strides,
        num_queries, num_keys, kv_heads, call.scale, call.softcap or 1.0,
        SINKS=call.pattern.num_sinks > 0, BLOCK_M=tile.rows, BLOCK_N=tile.keys, **sizes,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _launch_far(call: AttentionCall, plan: FarPlan, out: Tensor, lse: Tensor) -> None:
    num_queries, num_keys, kv_heads = call.q.shape[2], call.k.shape[2], call.k.shape[1]
    routers, query_k = call.query_groups.shape[1], call.query_groups.shape[3]
    groups = call.pattern.num_groups
    dedup = can_meet_twice(call)
    bits, barred = set_bits(call) if dedup else (plan.key_slots, plan.key_slots)
    ranged = call.tokens.key_segments is not None or call.pattern.sliding_window is not None
    tile, (sizes, (q, _, _, *outputs), strides) = tile_for("far", call), shared_arguments(call, out, lse)
    # Every group may end in a tile that is not full.
    tiles = triton.cdiv(num_queries, tile.rows // sizes["G"]) + groups
    step = heads_at_once(call, plan.key_slots.shape[-1])
    for first_head in range(0, kv_heads, step):
        heads = slice(first_head, min(first_head + step, kv_heads))
        copies = [
            sorted_copy(x[:, heads], plan.key_slots if routers == 1 else plan.key_slots[:, heads])
            for x in (call.k, call.v)
        ]
        strides[3:9] = [stride for x in copies for stride in x.stride()[:3]]
        for visit in range(query_k):
            _far_kernel[(tiles, copies[0].shape[1], call.q.shape[0])](
                q, *copies, *outputs, plan.query_slots, plan.key_slots, plan.ranges, plan.group_starts, bits, barred,
                *strides, num_queries, num_keys, plan.key_slots.shape[-1], kv_heads, first_head, routers, visit,
                call.scale, call.softcap or 1.0,
                VISITS=query_k, GROUPS=groups, BLOCK_GROUPS=triton.next_power_of_2(groups), RANGED=ranged, DEDUP=dedup,
                BLOCK_M=tile.rows, BLOCK_N=tile.keys, **sizes, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip


SMALL_COPY = 64 << 20  # bytes


def heads_at_once(call: AttentionCall, entries: int) -> int:
    """How many KV heads to copy in sorted order at a time: all of them while that is little, otherwise so many that the
    copies take a quarter of what the output takes."""
    per_head = entries * call.q.shape[0] * (call.k.shape[-1] + call.v.shape[-1]) * call.k.element_size()
    output = call.q.shape[:3].numel() * call.v.shape[-1] * call.v.element_size()
    return max(1, min(call.k.shape[1], max(SMALL_COPY, output // 4) // per_head))


@triton.jit(do_not_specialize=LENGTHS)
def _copy_kernel(
    X, SLOTS, OUT, x_batch, x_head, x_token, slots_batch, slots_head, num_entries, kv_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    at, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside = at < num_entries
    slot = tl.load(SLOTS + batch * slots_batch + head * slots_head + at, mask=inside, other=0).to(tl.int64)
    held = inside[:, None] & (d < D)[None, :]
    rows = tl.load(X + batch * x_batch + head * x_head + slot[:, None] * x_token + d[None, :], mask=held, other=0.0)
    place = (batch * kv_heads + head) * num_entries + at
    tl.store(OUT + place[:, None] * D + d[None, :], rows, mask=held)


def sorted_copy(x: Tensor, slots: Tensor) -> Tensor:
    """Rows of x [B, heads, T, D] in the order of slots [B, heads or 1, N] -> [B, heads, N, D]."""
    batch, heads, _, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    entries = slots.shape[-1]
    out = torch.empty(batch, heads, entries, width, dtype=x.dtype, device=x.device)
    block = 64
    _copy_kernel[(triton.cdiv(entries, block), heads, batch)](
        x, slots, out, *x.stride()[:3], slots.stride(0), 0 if slots.shape[1] == 1 else slots.stride(1), entries, heads,
        D=width, BLOCK_D=triton.next_power_of_2(width), BLOCK_N=block, num_warps=4,
    )  # fmt: skip
    return out


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


def shared_arguments(call: AttentionCall, out: Tensor, lse: Tensor) -> tuple[dict[str, Any], list[Tensor], list[int]]:
    """What every kernel is given: constants, tensors, and the strides of q, k, v and out (batch, head, token)."""
    q, k, v, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v, out))
    width, value_width = q.shape[-1], v.shape[-1]
    sizes = {
        "SOFTCAP": call.softcap is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "G": q.shape[1] // k.shape[1],
        "D": width,
        "DV": value_width,
        "BLOCK_D": max(16, triton.next_power_of_2(width)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_width)),
    }
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:3]]
    return sizes, [q, k, v, out, lse], strides
