"""The kernels of the `triton` backend's backward.

The query side makes dq, the key side dk and dv by walking the same ranges from the keys. Keys (queries) that every row
of a tile meets need no mask, the edges do. Far walks over sorted copies: of k and v on the query side; of q, dO and
what belongs to their rows on the key side, where the heads of a KV head stand together, so that a tile is one run of
memory. Sinks, which every query meets, have a kernel of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from focus_attn.attention.forward_kernels import LENGTHS, LOG2E
from focus_attn.attention.tiles import load_rows, packed_rows, tile_of_group


@triton.jit
def _score_grad(x, dp, lse, delta, scale, softcap, SOFTCAP: tl.constexpr):
    """p, the gradient of the scores, and that of q . k * scale. x = q . k, lse in base 2."""
    if SOFTCAP:
        capped = 2 * tl.sigmoid(2 * scale * x / softcap) - 1
        p = tl.exp2((softcap * capped) * LOG2E - lse)
    else:
        p = tl.exp2(x * (scale * LOG2E) - lse)
    ds = p * (dp - delta)
    inner = ds
    if SOFTCAP:
        inner = ds * (1 - capped * capped)
    return p, ds, inner


@triton.jit
def _walk_keys(
    dq, sums, q, do, lse, delta, first, last, lo, hi, barred,
    K, V, SLOTS, BITS, k_stride, v_stride, scale, softcap,
    GATHER: tl.constexpr, MASKED: tl.constexpr, DEDUP: tl.constexpr, APART: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Entries first:last of the line. GATHER: the key of an entry stands at its slot, otherwise at the entry."""
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    for start in tl.range(first, last, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < last
        slot = at.to(tl.int64)
        if GATHER:
            slot = tl.load(SLOTS + at, mask=inside, other=0).to(tl.int64)
        k = tl.load(K + slot[None, :] * k_stride + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(V + slot[None, :] * v_stride + dv[:, None], mask=inside[None, :] & (dv < DV)[:, None], other=0.0)
        x = tl.dot(q, k, input_precision=PRECISION)
        dp = tl.dot(do, v, input_precision=PRECISION)
        _, ds, inner = _score_grad(x, dp, lse[:, None], delta[:, None], scale, softcap, SOFTCAP)
        if MASKED or DEDUP or APART:
            visible = (at[None, :] >= lo[:, None]) & (at[None, :] < hi[:, None])
            if DEDUP:
                bits = tl.load(BITS + tl.load(SLOTS + at, mask=inside, other=0), mask=inside, other=0)
                visible &= (bits[None, :] & barred[:, None]) == 0
            if APART:
                ids = tl.load(BITS + at, mask=inside, other=0).to(tl.int32)
                visible &= ids[None, :] != barred[:, None]
            ds, inner = tl.where(visible, ds, 0.0), tl.where(visible, inner, 0.0)
        sums += tl.sum(ds, 1)
        dq = tl.dot(inner.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    return dq, sums


@triton.jit
def _walk_queries(
    dk, dv_sum, sums, k, v, first, last, begin, end, key_bits,
    Q, DO, LSE, DELTA, SLOTS, BARRED, kv_head, num_queries,
    q_head, q_token, do_head, do_token, scale, softcap,
    PACKED: tl.constexpr, GATHER: tl.constexpr, MASKED: tl.constexpr, DEDUP: tl.constexpr, APART: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Entries begin:end of the line, each with the G heads of the KV head. Key j is met by entries first[j]:last[j].

    PACKED: the heads of an entry follow each other in memory, and begin and end count rows, G an entry.
    """
    STEP: tl.constexpr = BLOCK_M if PACKED else BLOCK_M // G
    for start in tl.range(begin, end, STEP):
        if PACKED:
            row = start + tl.arange(0, BLOCK_M)
            at, live, head, slot = row // G, row < end, tl.zeros_like(row), row.to(tl.int64)
        else:
            at, live, head = packed_rows(start, end, kv_head, G, BLOCK_M)
            slot = at.to(tl.int64)
            if GATHER:
                slot = tl.load(SLOTS + at, mask=live, other=0).to(tl.int64)
        q = load_rows(Q, head, slot, q_head, q_token, live, D, BLOCK_D)
        do = load_rows(DO, head, slot, do_head, do_token, live, DV, BLOCK_DV)
        row = head.to(tl.int64) * num_queries + slot
        lse = tl.load(LSE + row, mask=live, other=float("inf"))  # of a row that is not real: p = 0
        delta = tl.load(DELTA + row, mask=live, other=0.0)
        # Keys down, queries across: p and ds then stay in registers for the products that follow.
        x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        p, ds, inner = _score_grad(x, dp, lse[None, :], delta[None, :], scale, softcap, SOFTCAP)
        if MASKED or DEDUP or APART:
            visible = (at[None, :] >= first[:, None]) & (at[None, :] < last[:, None])
            if DEDUP:
                barred = tl.load(BARRED + tl.load(SLOTS + at, mask=live, other=0), mask=live, other=0)
                visible &= (key_bits[:, None] & barred[None, :]) == 0
            if APART:
                ids = tl.load(BARRED + at, mask=live, other=0).to(tl.int32)
                visible &= key_bits[:, None] != ids[None, :]
            p, ds, inner = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0), tl.where(visible, inner, 0.0)
        sums += tl.sum(ds, 1)
        dv_sum = tl.dot(p.to(do.dtype), do, dv_sum, input_precision=PRECISION)
        dk = tl.dot(inner.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv_sum, sums


@triton.jit(do_not_specialize=LENGTHS)
def query_side_kernel(
    Q, K, V, DO, LSE, DELTA, DQ, DQ_INTO, SUMS, QUERY_SLOTS, KEY_SLOTS, RANGES, SINK_RANGES, STARTS, BITS, BARRED,
    PLACES, PART,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, do_batch, do_head, do_token,
    num_queries, num_keys, num_entries, kv_heads, first_head, part_heads, routers, visit, window, num_sinks,
    scale, softcap,
    VISITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    FAR: tl.constexpr, PLAIN: tl.constexpr, SQUARE: tl.constexpr, SINKS: tl.constexpr, RANGED: tl.constexpr,
    DEDUP: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one pass: near writes it, or adds cuDNN's PART to it (SQUARE); far adds to what is in DQ. In far, K and V
    are sorted copies of the heads that are launched."""
    ROWS: tl.constexpr = BLOCK_M // G
    kv_head, batch = first_head + tl.program_id(1), tl.program_id(2).to(tl.int64)
    router = batch * routers + tl.where(routers == 1, 0, kv_head)
    line = router * VISITS + visit
    ranges = RANGES + line * 2 * num_queries
    begin, end = tl.program_id(0) * ROWS, num_queries
    if FAR:
        _, begin, end = tile_of_group(STARTS + line * (GROUPS + 1), tl.program_id(0), ROWS, GROUPS, BLOCK_GROUPS)
        if begin >= end:
            return
    at, live, head = packed_rows(begin, end, kv_head, G, BLOCK_M)
    slot = at.to(tl.int64)
    if PLAIN:
        hi = at + num_keys - num_queries + 1
        lo = tl.maximum(hi - 1 - window, 0)
        lo, hi = tl.where(live, lo, num_entries), tl.where(live, hi, 0)
    else:
        lo = tl.load(ranges + at, mask=live, other=num_entries)
        hi = tl.load(ranges + num_queries + at, mask=live, other=0)
        slot = tl.load(QUERY_SLOTS + line * num_queries + at, mask=live, other=0).to(tl.int64)
    barred, bits = lo, BITS
    if DEDUP:
        barred, bits = tl.load(BARRED + line * num_queries + slot, mask=live, other=0), BITS + router * num_keys
    if SQUARE:
        bits = BITS + batch * num_keys
        barred = tl.load(bits + at, mask=live, other=0).to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    row = (batch * kv_heads * G + head) * num_queries + slot
    q = load_rows(Q + batch * q_batch, head, slot, q_head, q_token, live, D, BLOCK_D)
    do = load_rows(DO + batch * do_batch, head, slot, do_head, do_token, live, DV, BLOCK_DV)
    lse = tl.load(LSE + row, mask=live, other=float("inf"))
    delta = tl.load(DELTA + row, mask=live, other=0.0)
    dq, sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    key_head = (tl.program_id(1) if FAR else kv_head).to(tl.int64)
    keys, values = K + batch * k_batch + key_head * k_head, V + batch * v_batch + key_head * v_head
    slots = KEY_SLOTS + router * num_entries
    seen = hi > lo
    first, last = tl.min(tl.where(seen, lo, num_entries)), tl.max(tl.where(seen, hi, 0))
    if FAR:  # within a group, ranges never move back
        lo_last, hi_first = tl.max(tl.where(live, lo, 0)), tl.min(tl.where(live, hi, num_entries))
        full_first = first + (tl.maximum(lo_last - first, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        full_last = full_first + tl.maximum(hi_first - full_first, 0) // BLOCK_N * BLOCK_N
        if RANGED:
            dq, sums = _walk_keys(
                dq, sums, q, do, lse, delta, first, tl.minimum(full_first, last), lo, hi, barred,
                keys, values, slots, bits, k_token, v_token, scale, softcap,
                False, True, DEDUP, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
            )  # fmt: skip
        dq, sums = _walk_keys(
            dq, sums, q, do, lse, delta, full_first, full_last, lo, hi, barred,
            keys, values, slots, bits, k_token, v_token, scale, softcap,
            False, False, DEDUP, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
        first = full_last
    dq, sums = _walk_keys(
        dq, sums, q, do, lse, delta, first, last, lo, hi, barred,
        keys, values, slots, bits, k_token, v_token, scale, softcap,
        not FAR and not PLAIN, True, DEDUP, SQUARE, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    if SINKS:
        if PLAIN:
            hi = tl.where(live, tl.minimum(lo, num_sinks), 0)
            lo = tl.zeros_like(hi)
        else:
            lo = tl.load(SINK_RANGES + line * 2 * num_queries + at, mask=live, other=num_entries)
            hi = tl.load(SINK_RANGES + line * 2 * num_queries + num_queries + at, mask=live, other=0)
        first, last = tl.min(tl.where(hi > lo, lo, num_entries)), tl.max(tl.where(hi > lo, hi, 0))
        dq, sums = _walk_keys(
            dq, sums, q, do, lse, delta, first, last, lo, hi, barred,
            keys, values, slots, bits, k_token, v_token, scale, softcap,
            not PLAIN, True, False, SQUARE, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, 16,
        )  # fmt: skip
    at_row = row[:, None] * D + d[None, :]
    held = live[:, None] & (d < D)[None, :]
    dq *= scale
    if SQUARE:
        place = batch * num_queries + tl.load(PLACES + batch * num_queries + at, mask=live, other=0)
        part = PART + (place * part_heads + head - first_head * G)[:, None] * D + d[None, :]
        dq += tl.load(part, mask=held, other=0.0).to(tl.float32)
    if FAR:
        dq += tl.load(DQ + at_row, mask=held, other=0.0)
        tl.store(SUMS + ((batch * kv_heads * G + head) * VISITS + visit) * num_queries + slot, sums, mask=live)
    tl.store(DQ_INTO + at_row, dq.to(DQ_INTO.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=[*LENGTHS, "turn", "parts", "stretch"])
def key_side_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV_OUT, SUMS, QUERY_SLOTS, KEY_SLOTS, SEEN_BY, SINK_SEEN_BY, STARTS, ENTRIES,
    BITS, BARRED, PLACES, PART_K, PART_V, SINK_K, SINK_V,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, do_batch, do_head, do_token,
    num_queries, num_keys, num_entries, kv_heads, first_head, part_heads, routers, visit, window, num_sinks,
    scale, softcap, turn, parts, stretch,
    VISITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    FAR: tl.constexpr, PLAIN: tl.constexpr, SQUARE: tl.constexpr, SINKS: tl.constexpr, RANGED: tl.constexpr,
    DEDUP: tl.constexpr, CHOICES: tl.constexpr, ATOMIC: tl.constexpr, PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one pass: near writes them, or adds cuDNN's (SQUARE); far adds to what is there. In far, Q, DO, LSE
    and DELTA are sorted copies of the heads that are launched, packed. In plain calls, what comes to the sinks from
    beyond the window was summed by `sink_kernel`.

    PARTS: a program walks over one stretch of rows only and writes its part of DK, DV_OUT and SUMS, [parts, B, heads,
    entries, ...]: keys that most queries look at would keep one program busy long after all others.
    """
    kv_head, batch, part = first_head + tl.program_id(1), tl.program_id(2).to(tl.int64), 0
    if PARTS:
        part, batch = tl.program_id(2) % parts, batch // parts
    router = batch * routers + tl.where(routers == 1, 0, kv_head)
    line = router * VISITS + visit
    start, stop = tl.program_id(0) * BLOCK_N, num_entries
    if FAR:
        # The first keys of a group are met by most queries.
        _, start, stop = tile_of_group(
            STARTS + router * (GROUPS + 1), tl.program_id(0), BLOCK_N, GROUPS, BLOCK_GROUPS, LAST_FIRST=False
        )
        if start >= stop:
            return
    at = start + tl.arange(0, BLOCK_N)
    live = at < stop
    slot = at.to(tl.int64)
    if PLAIN:  # the query at place i has position i + num_keys - num_queries
        own = at - num_keys + num_queries
        first = tl.where(live, tl.maximum(own, 0), num_queries)
        last = tl.where(live, tl.minimum(tl.maximum(own + window + 1, 0), num_queries), 0)
    else:
        slot = tl.load(KEY_SLOTS + router * num_entries + at, mask=live, other=0).to(tl.int64)
        first = tl.load(SEEN_BY + line * 2 * num_entries + at, mask=live, other=num_queries)
        last = tl.load(SEEN_BY + line * 2 * num_entries + num_entries + at, mask=live, other=0)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k = load_rows(K + batch * k_batch, kv_head, slot, k_head, k_token, live, D, BLOCK_D)
    v = load_rows(V + batch * v_batch, kv_head, slot, v_head, v_token, live, DV, BLOCK_DV)
    key_bits, barred = first, BARRED
    if DEDUP:
        key_bits = tl.load(BITS + router * num_keys + slot, mask=live, other=0)
        barred = BARRED + line * num_queries
    if SQUARE:
        barred = BITS + batch * num_keys
        key_bits = tl.load(barred + at, mask=live, other=0).to(tl.int32)
    dk, dv_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    sums = tl.zeros([BLOCK_N], tl.float32)
    queries, grads = Q + batch * q_batch, DO + batch * do_batch
    rows = batch * kv_heads * G * num_queries
    if FAR:
        queries += tl.program_id(1).to(tl.int64) * q_head
        grads += tl.program_id(1).to(tl.int64) * do_head
        rows = (batch * tl.num_programs(1) + tl.program_id(1)) * G * num_queries
    query_slots = QUERY_SLOTS + line * num_queries
    met = last > first
    begin, end = tl.min(tl.where(met, first, num_queries)), tl.max(tl.where(met, last, 0))
    if FAR:
        begin, end = begin * G, end * G
        if PARTS:
            begin, end = tl.maximum(begin, part * stretch), tl.minimum(end, part * stretch + stretch)
            if begin >= end:
                return
        first_last, last_first = tl.max(tl.where(live, first, 0)) * G, tl.min(tl.where(live, last, num_queries)) * G
        full_begin = begin + (tl.maximum(first_last - begin, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        full_end = full_begin + tl.maximum(tl.minimum(last_first, end) - full_begin, 0) // BLOCK_M * BLOCK_M
        dk, dv_sum, sums = _walk_queries(
            dk, dv_sum, sums, k, v, first, last, begin, tl.minimum(full_begin, end), key_bits,
            queries, grads, LSE + rows, DELTA + rows, query_slots, barred,
            kv_head, num_queries, q_head, q_token, do_head, do_token, scale, softcap,
            True, False, True, DEDUP, False, SOFTCAP, PRECISION, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
        )  # fmt: skip
        dk, dv_sum, sums = _walk_queries(
            dk, dv_sum, sums, k, v, first, last, full_begin, full_end, key_bits,
            queries, grads, LSE + rows, DELTA + rows, query_slots, barred,
            kv_head, num_queries, q_head, q_token, do_head, do_token, scale, softcap,
            True, False, False, DEDUP, False, SOFTCAP, PRECISION, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
        )  # fmt: skip
        begin = tl.maximum(full_end, begin)
    dk, dv_sum, sums = _walk_queries(
        dk, dv_sum, sums, k, v, first, last, begin, end, key_bits,
        queries, grads, LSE + rows, DELTA + rows, query_slots, barred,
        kv_head, num_queries, q_head, q_token, do_head, do_token, scale, softcap,
        FAR, not PLAIN, True, DEDUP, SQUARE, SOFTCAP, PRECISION, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
    )  # fmt: skip
    if SINKS and not PLAIN:
        first = tl.load(SINK_SEEN_BY + line * 2 * num_entries + at, mask=live, other=num_queries)
        last = tl.load(SINK_SEEN_BY + line * 2 * num_entries + num_entries + at, mask=live, other=0)
        begin = tl.min(tl.where(last > first, first, num_queries))
        end = tl.max(tl.where(last > first, last, 0))
        dk, dv_sum, sums = _walk_queries(
            dk, dv_sum, sums, k, v, first, last, begin, end, key_bits,
            queries, grads, LSE + rows, DELTA + rows, query_slots, barred,
            kv_head, num_queries, q_head, q_token, do_head, do_token, scale, softcap,
            False, True, True, False, SQUARE, SOFTCAP, PRECISION, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
        )  # fmt: skip
    dk *= scale
    row = (batch * kv_heads + kv_head) * num_keys + slot
    sums_row = ((batch * kv_heads + kv_head) * VISITS + visit) * num_entries + at
    if PARTS:
        batches = tl.num_programs(2) // parts
        row = ((part * batches + batch) * tl.num_programs(1) + tl.program_id(1)) * num_entries + at
        sums_row = row
    into_k, into_v = DK + row[:, None] * D + d[None, :], DV_OUT + row[:, None] * DV + dv[None, :]
    if FAR:
        tl.store(SUMS + sums_row, sums, mask=live)
        live = live if PARTS else met
    if CHOICES > 1 and not ATOMIC:  # one of a key's groups at a time
        live &= tl.load(ENTRIES + router * num_entries + at, mask=live, other=0) % CHOICES == turn
    held_k, held_v = live[:, None] & (d < D)[None, :], live[:, None] & (dv < DV)[None, :]
    if SQUARE:
        place = batch * num_keys + tl.load(PLACES + batch * num_keys + at, mask=live, other=0)
        part = (place * part_heads + kv_head - first_head)[:, None]
        dk += tl.load(PART_K + part * D + d[None, :], mask=held_k, other=0.0).to(tl.float32)
        dv_sum += tl.load(PART_V + part * DV + dv[None, :], mask=held_v, other=0.0).to(tl.float32)
    if SINKS and PLAIN:
        sink = ((batch * tl.num_programs(1) + tl.program_id(1)) * num_sinks + at)[:, None]
        a_sink = (at < num_sinks)[:, None]
        dk += tl.load(SINK_K + sink * D + d[None, :], mask=held_k & a_sink, other=0.0)
        dv_sum += tl.load(SINK_V + sink * DV + dv[None, :], mask=held_v & a_sink, other=0.0)
    if ATOMIC:
        tl.atomic_add(into_k, dk, mask=held_k)
        tl.atomic_add(into_v, dv_sum, mask=held_v)
    else:
        if FAR and not PARTS:
            dk += tl.load(into_k, mask=held_k, other=0.0)
            dv_sum += tl.load(into_v, mask=held_v, other=0.0)
        tl.store(into_k, dk.to(DK.dtype.element_ty), mask=held_k)
        tl.store(into_v, dv_sum.to(DV_OUT.dtype.element_ty), mask=held_v)


@triton.jit(do_not_specialize=[*LENGTHS, "stretch"])
def sink_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV_OUT, IDS,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, do_batch, do_head, do_token,
    num_queries, num_keys, kv_heads, first_head, window, num_sinks, scale, softcap, stretch,
    SQUARE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What a stretch of queries gives to sinks that lie beyond their windows. Every query meets the few sinks: program
    (stretch, KV head, row and block of sinks) writes its own part, to be summed."""
    kv_head, blocks = first_head + tl.program_id(1), (num_sinks + BLOCK_N - 1) // BLOCK_N
    batch, block = (tl.program_id(2) // blocks).to(tl.int64), tl.program_id(2) % blocks
    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    live = (at < num_sinks) & (at < num_keys)
    slot = at.to(tl.int64)
    past = at - num_keys + num_queries + window + 1  # the first query whose window does not hold the key
    first = tl.where(live, tl.maximum(past, 0), num_queries)
    last = tl.where(live, num_queries, 0)
    begin = tl.maximum(tl.program_id(0) * stretch, tl.min(first))
    end = tl.minimum(tl.program_id(0) * stretch + stretch, num_queries)
    k = load_rows(K + batch * k_batch, kv_head, slot, k_head, k_token, live, D, BLOCK_D)
    v = load_rows(V + batch * v_batch, kv_head, slot, v_head, v_token, live, DV, BLOCK_DV)
    ids, key_ids = IDS, first
    if SQUARE:
        ids = IDS + batch * num_keys
        key_ids = tl.load(ids + at, mask=live, other=0).to(tl.int32)
    dk, dv_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    rows = batch * kv_heads * G * num_queries
    dk, dv_sum, _ = _walk_queries(
        dk, dv_sum, tl.zeros([BLOCK_N], tl.float32), k, v, first, last, begin, end, key_ids,
        Q + batch * q_batch, DO + batch * do_batch, LSE + rows, DELTA + rows, ids, ids,
        kv_head, num_queries, q_head, q_token, do_head, do_token, scale, softcap,
        False, False, True, False, SQUARE, SOFTCAP, PRECISION, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
    )  # fmt: skip
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    batches = tl.num_programs(2) // blocks
    head = (tl.program_id(0) * batches + batch) * tl.num_programs(1) + tl.program_id(1)
    into = (head * num_sinks + at)[:, None]
    tl.store(DK + into * D + d[None, :], dk * scale, mask=live[:, None] & (d < D)[None, :])
    tl.store(DV_OUT + into * DV + dv[None, :], dv_sum, mask=live[:, None] & (dv < DV)[None, :])
