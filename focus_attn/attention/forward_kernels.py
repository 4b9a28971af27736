"""The two kernels of the `triton` backend's forward.

`near` runs over the queries in order: the window's band and the sinks. `far` runs over the queries sorted by the group
they visit: a prefix of the group's keys, then a merge with what is in the output already.

The query heads of one KV head share a tile: keys and values are read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from focus_attn.attention.tiles import below, load_rows, packed_rows, real_address, tile_of_group

LOG2E = tl.constexpr(1.4426950408889634)
# Sizes that change from call to call: no kernel is compiled anew for them.
LENGTHS = ["num_queries", "num_keys", "num_entries", "kv_heads", "first_head", "part_heads", "routers", "visit"]
LENGTHS += ["window", "num_sinks"]


@triton.jit
def _walk(
    acc, m, norm, q, first, last, lo, hi, barred,
    K, V, SLOTS, BITS, k_stride, v_stride, scale, softcap,
    COPIED: tl.constexpr, MASKED: tl.constexpr, FROM_LO: tl.constexpr, EVEN: tl.constexpr,
    DEDUP: tl.constexpr, APART: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over the listed keys first:last. Row i sees lo[i]:hi[i] of the list.

    COPIED: K and V are in the order of the list; otherwise SLOTS says where each key is. MASKED: not every row sees all
    of the keys; without FROM_LO none lies before its row's lo. EVEN: whole tiles of keys can be read, wherever `last`
    is. DEDUP: `barred` and BITS are sets of groups, and pairs whose sets meet are left out. APART: they are ids, and
    pairs of one id are left out. Scores are kept in base 2, for exp2 is the instruction the hardware has, and scaled
    together with the subtraction of the maximum.
    """
    d, dv, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)
    factor = scale * LOG2E
    if SOFTCAP:
        factor = LOG2E
    # What a turn adds to is the same in all of them: made anew, addresses were a third of its instructions.
    k_at, v_at = n[None, :] * k_stride + d[:, None], n[:, None] * v_stride + dv[None, :]
    span = tl.maximum(hi - lo, 0).to(tl.uint32)
    ids = n
    if APART:
        ids = tl.load(BITS + first + n)
    for start in tl.range(first, last, BLOCK_N):
        inside = n < last - start
        if COPIED:
            begin = tl.cast(start, tl.int64)
            k_rows, v_rows = K + begin * k_stride + k_at, V + begin * v_stride + v_at
        else:
            row = tl.load(SLOTS + start + n, mask=inside, other=0).to(tl.int64)
            k_rows, v_rows = K + row[None, :] * k_stride + d[:, None], V + row[:, None] * v_stride + dv[None, :]
        if (MASKED and not EVEN) or BLOCK_D != D:
            k = tl.load(k_rows, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        else:
            k = tl.load(k_rows)
        x = tl.dot(q, k, input_precision=PRECISION)
        if SOFTCAP:
            x = softcap * (2 * tl.sigmoid(2 * scale * x / softcap) - 1)
        if MASKED:
            if FROM_LO:  # lo <= place < hi in one comparison
                visible = (n[None, :] + (start - lo)[:, None]).to(tl.uint32) < span[:, None]
            else:
                visible = n[None, :] < (hi - start)[:, None]
            if APART:
                visible &= ids[None, :] != barred[:, None]
                ids = tl.load(BITS + tl.multiple_of(start + BLOCK_N, 16) + n)
            x = tl.where(visible, x, -float("inf"))
        if DEDUP:
            bits = tl.load(BITS + tl.load(SLOTS + start + n, mask=inside, other=0), mask=inside, other=0)
            x = tl.where((bits[None, :] & barred[:, None]) == 0, x, -float("inf"))
        m_new = tl.maximum(m, tl.max(x, 1) * factor)
        shift = m_new
        if MASKED or DEDUP:
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has seen nothing yet
        p = tl.exp2(x * factor - shift[:, None])
        alpha = tl.exp2(m - shift)
        norm = norm * alpha + tl.sum(p, 1)
        if (MASKED and not EVEN) or BLOCK_DV != DV:
            v = tl.load(v_rows, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
        else:
            v = tl.load(v_rows)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, norm


@triton.jit(do_not_specialize=LENGTHS)
def near_kernel(
    Q, K, V, OUT, LSE, QUERY_SLOTS, KEY_SLOTS, RANGES, IDS, PLACES, PART, PART_LSE,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    ids_batch, num_queries, num_keys, kv_heads, first_head, part_heads, window, num_sinks, scale, softcap,
    PLAIN: tl.constexpr, EVEN: tl.constexpr, SQUARE: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_TABLE: tl.constexpr,
):  # fmt: skip
    """PLAIN: slots are positions, so that ranges are known. EVEN: tiles divide the numbers of queries and keys.
    SQUARE: PART has what each query saw in its own group, sorted by group (PLACES), and only pairs of different IDS are
    left to see."""
    Q, K, V = real_address(Q, BY_TABLE), real_address(K, BY_TABLE), real_address(V, BY_TABLE)
    OUT, LSE = real_address(OUT, BY_TABLE), real_address(LSE, BY_TABLE)
    kv_head, batch = first_head + tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.program_id(0) * (BLOCK_M // G)
    at, live, head = packed_rows(begin, num_queries, kv_head, G, BLOCK_M, EVEN)
    slot = at.to(tl.int64)
    ranges = RANGES + batch * 4 * num_queries
    if PLAIN:
        hi = at + num_keys - num_queries + 1
        lo = tl.maximum(hi - 1 - window, 0)
        hi = tl.where(live, hi, 0)
        first = tl.maximum(begin + num_keys - num_queries - window, 0)
        last = tl.minimum(begin + BLOCK_M // G, num_queries) + num_keys - num_queries
    else:
        slot = tl.load(QUERY_SLOTS + batch * num_queries + at, mask=live, other=0).to(tl.int64)
        lo = tl.load(ranges + at, mask=live, other=0)
        hi = tl.load(ranges + num_queries + at, mask=live, other=0)
        first, last = tl.min(tl.where(hi > lo, lo, num_keys)), tl.max(tl.where(hi > lo, hi, 0))
    dv = tl.arange(0, BLOCK_DV)
    held = live[:, None] & below(dv, DV, DV == BLOCK_DV)[None, :]
    q = load_rows(Q + batch * q_batch, head, slot, q_head, q_token, live, D, BLOCK_D)
    ids, apart = IDS, lo
    if SQUARE:
        ids = IDS + batch * ids_batch
        apart = tl.load(ids + at, mask=live, other=0)
        place = tl.load(PLACES + batch * num_queries + at, mask=live, other=0).to(tl.int64)
        row = batch * num_queries * part_heads - first_head * G
        m = tl.load(PART_LSE + row + place * part_heads + head, mask=live, other=0.0) * LOG2E
        norm = tl.full([BLOCK_M], 1.0, tl.float32)
        rows = PART + row * DV + (place * (part_heads * DV) + head * DV)[:, None] + dv[None, :]
        acc = tl.load(rows, mask=held, other=0.0).to(tl.float32)
    else:
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    keys = K + batch * k_batch + kv_head.to(tl.int64) * k_head
    values = V + batch * v_batch + kv_head.to(tl.int64) * v_head
    slots = KEY_SLOTS + batch * num_keys
    first = tl.multiple_of(first // BLOCK_N * BLOCK_N, BLOCK_N)
    acc, m, norm = _walk(
        acc, m, norm, q, first, last, lo, hi, apart, keys, values, slots, ids, k_token, v_token, scale, softcap,
        PLAIN, True, True, EVEN, False, SQUARE, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    if SINKS:
        if PLAIN:
            hi = tl.where(live, tl.minimum(lo, num_sinks), 0)
            lo = tl.zeros_like(hi)
            first, last = 0, tl.minimum(tl.maximum(last - 1 - window, 0), num_sinks)
        else:
            lo = tl.load(ranges + 2 * num_queries + at, mask=live, other=0)
            hi = tl.load(ranges + 3 * num_queries + at, mask=live, other=0)
            first, last = tl.min(tl.where(hi > lo, lo, num_keys)), tl.max(tl.where(hi > lo, hi, 0))
        acc, m, norm = _walk(
            acc, m, norm, q, first, last, lo, hi, apart, keys, values, slots, ids, k_token, v_token, scale, softcap,
            PLAIN, True, True, EVEN, False, SQUARE, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, 16,
        )  # fmt: skip
    out = acc * (1 / tl.where(norm > 0, norm, 1.0))[:, None]
    rows = OUT + batch * o_batch + (head.to(tl.int64) * o_head + slot * o_token)[:, None] + dv[None, :]
    tl.store(rows, out.to(OUT.dtype.element_ty), mask=held)
    lse = tl.where(norm > 0, (m + tl.log2(tl.where(norm > 0, norm, 1.0))) / LOG2E, -float("inf"))
    tl.store(LSE + (batch * kv_heads * G + head) * num_queries + slot, lse, mask=live)


@triton.jit(do_not_specialize=LENGTHS)
def far_kernel(
    Q, K, V, OUT, LSE, QUERY_SLOTS, KEY_SLOTS, RANGES, STARTS, BITS, BARRED, PART, PART_LSE,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    num_queries, num_keys, num_entries, kv_heads, first_head, routers, visit, scale, softcap,
    VISITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, RANGED: tl.constexpr, DEDUP: tl.constexpr,
    BULK: tl.constexpr, JOB_ROWS: tl.constexpr, LEAST: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_TABLE: tl.constexpr,
):  # fmt: skip
    """K and V are sorted copies of the launch's KV heads. BULK: PART has what cuDNN saw, see `bulk.py`."""
    Q, OUT, LSE = real_address(Q, BY_TABLE), real_address(OUT, BY_TABLE), real_address(LSE, BY_TABLE)
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
    wide = below(dv, DV, DV == BLOCK_DV)[None, :]
    q = load_rows(Q + batch * q_batch, head, slot, q_head, q_token, live, D, BLOCK_D)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if BULK:  # what the first query of this tile's job sees has been seen
        seen = tl.load(ranges + num_queries + group + (begin - group) // JOB_ROWS * JOB_ROWS)
        if seen - lo_first >= LEAST:
            own = tl.where(routers == 1, 0, tl.program_id(1))
            lines, heads = tl.where(routers == 1, 1, tl.num_programs(1)), tl.where(routers == 1, tl.num_programs(1), 1)
            part = ((batch * lines + own) * num_queries + at) * heads * G + head - (first_head + own) * G
            m = tl.load(PART_LSE + part, mask=live, other=0.0) * LOG2E
            norm += 1
            rows = PART + part[:, None] * DV + dv[None, :]
            acc = tl.load(rows, mask=live[:, None] & wide, other=0.0).to(tl.float32)
            lo_first = seen
            lo_last = seen
    keys = K + batch * k_batch + tl.program_id(1).to(tl.int64) * k_head
    values = V + batch * v_batch + tl.program_id(1).to(tl.int64) * v_head
    slots, bits = KEY_SLOTS + router * num_entries, BITS + router * num_keys

    # Keys that every row sees need no mask; the edges do.
    full_first = lo_first + (lo_last - lo_first + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_last = full_first + tl.maximum(hi_first - full_first, 0) // BLOCK_N * BLOCK_N
    if RANGED:
        acc, m, norm = _walk(
            acc, m, norm, q, lo_first, tl.minimum(full_first, hi_last), lo, hi, barred, keys, values, slots, bits,
            k_token, v_token, scale, softcap,
            True, True, RANGED, False, DEDUP, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
    acc, m, norm = _walk(
        acc, m, norm, q, full_first, full_last, lo, hi, barred, keys, values, slots, bits,
        k_token, v_token, scale, softcap,
        True, False, False, False, DEDUP, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    acc, m, norm = _walk(
        acc, m, norm, q, full_last, hi_last, lo, hi, barred, keys, values, slots, bits,
        k_token, v_token, scale, softcap,
        True, True, RANGED, False, DEDUP, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip

    # Merge with what earlier passes wrote.
    rows = OUT + batch * o_batch + (head.to(tl.int64) * o_head + slot * o_token)[:, None] + dv[None, :]
    lse_rows = LSE + (batch * kv_heads * G + head) * num_queries + slot
    found = live & (norm > 0)
    old_lse = tl.load(lse_rows, mask=found, other=0.0) * LOG2E
    old = tl.load(rows, mask=found[:, None] & wide, other=0.0).to(tl.float32)
    lse = m + tl.log2(tl.where(norm > 0, norm, 1.0))
    weight = 1 / (1 + tl.exp2(old_lse - lse))
    out = old + weight[:, None] * (acc * (1 / tl.where(norm > 0, norm, 1.0))[:, None] - old)
    top = tl.maximum(old_lse, lse)
    merged = (top + tl.log2(tl.exp2(old_lse - top) + tl.exp2(lse - top))) / LOG2E
    tl.store(rows, out.to(OUT.dtype.element_ty), mask=found[:, None] & wide)
    tl.store(lse_rows, merged, mask=found)
