"""The `triton` backend's backward, from the merged output and logsumexp.

Each pass of the forward has two here: one in query order for dq, one in key order for dk and dv, which walks the same
ranges from the keys' side. Every row is written by one program at a time, so results repeat bit for bit, except where a
key belongs to several groups: its gradients then meet in atomic additions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.device_plan import places, plan_far, plan_near, seen_by
from focus_attn.attention.merge import sink_logits_grad
from focus_attn.attention.stock import Gradients
from focus_attn.attention.triton import (
    LENGTHS,
    LOG2E,
    can_meet_twice,
    has_far_pairs,
    set_bits,
    shared_arguments,
    tile_for,
)


@triton.jit
def _score_grad(
    x, visible, dp, lse, delta, softcap, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """p, the gradient of the scores, and that of q . k * scale. x is before softcap, [M, N]."""
    if SOFTCAP:
        capped = 2 * tl.sigmoid(2 * x / softcap) - 1
        x = softcap * capped
    p = tl.where(visible, tl.exp2((x - lse) * LOG2E), 0.0)
    ds = p * (dp - delta)
    inner = ds
    if SOFTCAP:
        inner = ds * (1 - capped * capped)
    return p, ds, inner


@triton.jit
def _walk_keys(
    dq, sums, q, do, lse, delta, first, last, lo, hi, barred,
    K, V, SLOTS, BITS, k_stride, v_stride, scale, softcap,
    DEDUP: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    for start in tl.range(first, last, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < last
        slot = tl.load(SLOTS + at, mask=inside, other=0).to(tl.int64)
        k = tl.load(K + slot[None, :] * k_stride + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(V + slot[None, :] * v_stride + dv[:, None], mask=inside[None, :] & (dv < DV)[:, None], other=0.0)
        visible = (at[None, :] >= lo[:, None]) & (at[None, :] < hi[:, None])
        if DEDUP:
            bits = tl.load(BITS + slot, mask=inside, other=0)
            visible &= (bits[None, :] & barred[:, None]) == 0
        x = tl.dot(q, k, input_precision=PRECISION) * scale
        dp = tl.dot(do, v, input_precision=PRECISION)
        _, ds, inner = _score_grad(x, visible, dp, lse[:, None], delta[:, None], softcap, SOFTCAP)
        sums += tl.sum(ds, 1)
        dq = tl.dot(inner.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    return dq, sums


@triton.jit
def _walk_queries(
    dk, dv_sum, sums, k, v, first, last, begin, end, key_bits,
    Q, DO, LSE, DELTA, SLOTS, BARRED, kv_head, num_queries,
    q_head, q_token, do_head, do_token, scale, softcap,
    DEDUP: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Entries begin:end of the line, each with the G heads of the KV head. Key j is met by entries first[j]:last[j]."""
    ROWS: tl.constexpr = BLOCK_M // G
    d, dv, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_M)
    head = kv_head * G + r % G
    for start in tl.range(begin, end, ROWS):
        at = start + r // G
        live = (r < ROWS * G) & (at < end)
        slot = tl.load(SLOTS + at, mask=live, other=0).to(tl.int64)
        q = tl.load(
            Q + (head.to(tl.int64) * q_head + slot * q_token)[:, None] + d[None, :],
            mask=live[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        do = tl.load(
            DO + (head.to(tl.int64) * do_head + slot * do_token)[:, None] + dv[None, :],
            mask=live[:, None] & (dv < DV)[None, :], other=0.0,
        )  # fmt: skip
        row = head.to(tl.int64) * num_queries + slot
        lse = tl.load(LSE + row, mask=live, other=float("inf"))
        delta = tl.load(DELTA + row, mask=live, other=0.0)
        visible = live[:, None] & (at[:, None] >= first[None, :]) & (at[:, None] < last[None, :])
        if DEDUP:
            barred = tl.load(BARRED + slot, mask=live, other=0)
            visible &= (key_bits[None, :] & barred[:, None]) == 0
        x = tl.dot(q, k, input_precision=PRECISION) * scale
        dp = tl.dot(do, v, input_precision=PRECISION)
        p, ds, inner = _score_grad(x, visible, dp, lse[:, None], delta[:, None], softcap, SOFTCAP)
        sums += tl.sum(ds, 0)
        dv_sum = tl.dot(tl.trans(p.to(do.dtype)), do, dv_sum, input_precision=PRECISION)
        dk = tl.dot(tl.trans(inner.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv_sum, sums


@triton.jit(do_not_specialize=LENGTHS)
def _query_side_kernel(
    Q, K, V, DO, LSE, DELTA, DQ, SUMS, QUERY_SLOTS, KEY_SLOTS, RANGES, SINK_RANGES, BITS, BARRED,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, do_batch, do_head, do_token,
    num_queries, num_keys, num_entries, kv_heads, routers, visit, scale, softcap,
    VISITS: tl.constexpr, FAR: tl.constexpr, SINKS: tl.constexpr, DEDUP: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one pass, added to what is there. The line is that of the queries (near) or of a round of visits (far)."""
    ROWS: tl.constexpr = BLOCK_M // G
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    router = batch * routers + tl.where(routers == 1, 0, kv_head)
    line = router * VISITS + visit
    r = tl.arange(0, BLOCK_M)
    # The last tiles of a line have the longest ranges.
    at = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + r // G
    live = (r < ROWS * G) & (at < num_queries)
    head = kv_head * G + r % G
    lo = tl.load(RANGES + line * 2 * num_queries + at, mask=live, other=num_entries)
    hi = tl.load(RANGES + line * 2 * num_queries + num_queries + at, mask=live, other=0)
    slot = tl.load(QUERY_SLOTS + line * num_queries + at, mask=live, other=0).to(tl.int64)
    barred = lo
    if DEDUP:
        barred = tl.load(BARRED + line * num_queries + slot, mask=live, other=0)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row = (batch * kv_heads * G + head) * num_queries + slot
    q = tl.load(
        Q + batch * q_batch + (head.to(tl.int64) * q_head + slot * q_token)[:, None] + d[None, :],
        mask=live[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    do = tl.load(
        DO + batch * do_batch + (head.to(tl.int64) * do_head + slot * do_token)[:, None] + dv[None, :],
        mask=live[:, None] & (dv < DV)[None, :], other=0.0,
    )  # fmt: skip
    lse = tl.load(LSE + row, mask=live, other=float("inf"))
    delta = tl.load(DELTA + row, mask=live, other=0.0)
    dq, sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    keys = K + batch * k_batch + kv_head.to(tl.int64) * k_head
    values = V + batch * v_batch + kv_head.to(tl.int64) * v_head
    slots, bits = KEY_SLOTS + router * num_entries, BITS + router * num_keys
    first, last = tl.min(tl.where(hi > lo, lo, num_entries)), tl.max(tl.where(hi > lo, hi, 0))
    dq, sums = _walk_keys(
        dq, sums, q, do, lse, delta, first, last, lo, hi, barred, keys, values, slots, bits, k_token, v_token,
        scale, softcap, DEDUP, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    if SINKS:
        lo = tl.load(SINK_RANGES + line * 2 * num_queries + at, mask=live, other=num_entries)
        hi = tl.load(SINK_RANGES + line * 2 * num_queries + num_queries + at, mask=live, other=0)
        first, last = tl.min(tl.where(hi > lo, lo, num_entries)), tl.max(tl.where(hi > lo, hi, 0))
        dq, sums = _walk_keys(
            dq, sums, q, do, lse, delta, first, last, lo, hi, barred, keys, values, slots, bits, k_token, v_token,
            scale, softcap, False, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, 16,
        )  # fmt: skip
    into = DQ + row[:, None] * D + d[None, :]
    held = live[:, None] & (d < D)[None, :]
    tl.store(into, tl.load(into, mask=held, other=0.0) + dq * scale, mask=held)
    if FAR:
        tl.store(SUMS + ((batch * kv_heads * G + head) * VISITS + visit) * num_queries + slot, sums, mask=live)


@triton.jit(do_not_specialize=LENGTHS)
def _key_side_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV_OUT, SUMS, QUERY_SLOTS, KEY_SLOTS, SEEN_BY, SINK_SEEN_BY, BITS, BARRED,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, do_batch, do_head, do_token,
    num_queries, num_keys, num_entries, kv_heads, routers, visit, scale, softcap,
    VISITS: tl.constexpr, FAR: tl.constexpr, SINKS: tl.constexpr, DEDUP: tl.constexpr, ATOMIC: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one pass, added to what is there."""
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    router = batch * routers + tl.where(routers == 1, 0, kv_head)
    line = router * VISITS + visit
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = at < num_entries
    first = tl.load(SEEN_BY + line * 2 * num_entries + at, mask=live, other=num_queries)
    last = tl.load(SEEN_BY + line * 2 * num_entries + num_entries + at, mask=live, other=0)
    slot = tl.load(KEY_SLOTS + router * num_entries + at, mask=live, other=0).to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k = tl.load(
        K + batch * k_batch + kv_head.to(tl.int64) * k_head + slot[None, :] * k_token + d[:, None],
        mask=live[None, :] & (d < D)[:, None], other=0.0,
    )  # fmt: skip
    v = tl.load(
        V + batch * v_batch + kv_head.to(tl.int64) * v_head + slot[None, :] * v_token + dv[:, None],
        mask=live[None, :] & (dv < DV)[:, None], other=0.0,
    )  # fmt: skip
    key_bits = slot
    if DEDUP:
        key_bits = tl.load(BITS + router * num_keys + slot, mask=live, other=0)
    dk, dv_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    sums = tl.zeros([BLOCK_N], tl.float32)
    queries, grads = Q + batch * q_batch, DO + batch * do_batch
    rows = batch * kv_heads * G * num_queries
    met = last > first
    begin, end = tl.min(tl.where(met, first, num_queries)), tl.max(tl.where(met, last, 0))
    dk, dv_sum, sums = _walk_queries(
        dk, dv_sum, sums, k, v, first, last, begin, end, key_bits,
        queries, grads, LSE + rows, DELTA + rows, QUERY_SLOTS + line * num_queries, BARRED + line * num_queries,
        kv_head, num_queries, q_head, q_token, do_head, do_token, scale, softcap,
        DEDUP, SOFTCAP, PRECISION, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
    )  # fmt: skip
    if SINKS:
        first = tl.load(SINK_SEEN_BY + line * 2 * num_entries + at, mask=live, other=num_queries)
        last = tl.load(SINK_SEEN_BY + line * 2 * num_entries + num_entries + at, mask=live, other=0)
        met |= last > first
        begin = tl.min(tl.where(last > first, first, num_queries))
        end = tl.max(tl.where(last > first, last, 0))
        dk, dv_sum, sums = _walk_queries(
            dk, dv_sum, sums, k, v, first, last, begin, end, key_bits,
            queries, grads, LSE + rows, DELTA + rows, QUERY_SLOTS + line * num_queries, BARRED + line * num_queries,
            kv_head, num_queries, q_head, q_token, do_head, do_token, scale, softcap,
            False, SOFTCAP, PRECISION, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
        )  # fmt: skip
    row = (batch * kv_heads + kv_head) * num_keys + slot
    into_k, into_v = DK + row[:, None] * D + d[None, :], DV_OUT + row[:, None] * DV + dv[None, :]
    held_k, held_v = met[:, None] & (d < D)[None, :], met[:, None] & (dv < DV)[None, :]
    if ATOMIC:
        tl.atomic_add(into_k, dk * scale, mask=held_k)
        tl.atomic_add(into_v, dv_sum, mask=held_v)
    else:
        tl.store(into_k, tl.load(into_k, mask=held_k, other=0.0) + dk * scale, mask=held_k)
        tl.store(into_v, tl.load(into_v, mask=held_v, other=0.0) + dv_sum, mask=held_v)
    if FAR:
        tl.store(SUMS + ((batch * kv_heads + kv_head) * VISITS + visit) * num_entries + at, sums, mask=live)


def triton_backward(call: AttentionCall, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Exact gradients of everything from the merged out and lse of the forward."""
    num_queries, (kv_heads, num_keys) = call.q.shape[2], call.k.shape[1:3]
    total = Gradients(*(_zeros(call, *x.shape) for x in (call.q, call.k, call.v)))
    if call.sink_logits is not None:
        total.sink_logits = sink_logits_grad(grad, out, lse, call.sink_logits)
    delta = (grad.float() * out.float()).sum(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).contiguous()  # exp(s - inf) = 0
    query, key = places(call.tokens)
    near = plan_near(query, key, call.pattern)
    band, sinks = (x.contiguous() for x in near.ranges.split(2, 1))
    seen = [seen_by(x, num_keys) for x in (band, sinks)]
    nothing = near.key_slots  # stands for a tensor that a pass does not read
    sizes, (q, k, v, grad, *_), strides = shared_arguments(call, grad, lse)
    common = (q, k, v, grad, lse, delta)
    lengths = (num_queries, num_keys, num_keys, kv_heads, 1, 0, call.scale, call.softcap or 1.0)
    near_only = {"VISITS": 1, "FAR": False, "SINKS": call.pattern.num_sinks > 0, "DEDUP": False}
    grid, options = _launch("query side", call, sizes, num_queries)
    _query_side_kernel[grid](
        *common, total.q, nothing, near.query_slots, near.key_slots, band, sinks, nothing, nothing, *strides, *lengths,
        **near_only, **options,
    )  # fmt: skip
    grid, options = _launch("key side", call, sizes, num_keys)
    _key_side_kernel[grid](
        *common, total.k, total.v, nothing, near.query_slots, near.key_slots, *seen, nothing, nothing,
        *strides, *lengths, ATOMIC=False, **near_only, **options,
    )  # fmt: skip
    if has_far_pairs(call):
        _far_backward(call, total, query, key, common, strides, sizes)
    elif call.query_gate is not None and call.key_gate is not None:
        total.query_gate, total.key_gate = (_zeros(call, *x.shape) for x in (call.query_gate, call.key_gate))
    total.q, total.k, total.v = total.q.to(q.dtype), total.k.to(k.dtype), total.v.to(v.dtype)
    return total


def _launch(kernel: str, call: AttentionCall, sizes: dict[str, Any], length: int) -> tuple[tuple[int, ...], dict]:
    tile = tile_for(kernel, call)
    rows = tile.rows // sizes["G"] if kernel == "query side" else tile.keys
    blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}
    return (triton.cdiv(length, rows), call.k.shape[1], call.q.shape[0]), {**sizes, **blocks}


def _far_backward(
    call: AttentionCall,
    total: Gradients,
    query: Tensor,
    key: Tensor,
    common: tuple[Tensor, ...],
    strides: list[int],
    sizes: dict[str, Any],
) -> None:
    far = plan_far(call, query, key)
    batch, heads, num_queries, _ = call.q.shape
    kv_heads, num_keys = call.k.shape[1], call.k.shape[2]
    routers, query_k, key_k = call.query_groups.shape[1], call.query_groups.shape[3], call.key_groups.shape[3]
    entries = far.key_slots.shape[-1]
    dedup = can_meet_twice(call)
    bits, barred = set_bits(call) if dedup else (far.key_slots, far.key_slots)
    seen = seen_by(far.ranges, entries)
    by_query, by_key = _zeros(call, batch, heads, query_k, num_queries), _zeros(call, batch, kv_heads, query_k, entries)
    far_only = {"VISITS": query_k, "FAR": True, "SINKS": False, "DEDUP": dedup}
    for visit in range(query_k):
        lengths = (num_queries, num_keys, entries, kv_heads, routers, visit, call.scale, call.softcap or 1.0)
        grid, options = _launch("query side", call, sizes, num_queries)
        _query_side_kernel[grid](
            *common, total.q, by_query, far.query_slots, far.key_slots, far.ranges, far.ranges, bits, barred,
            *strides, *lengths, **far_only, **options,
        )  # fmt: skip
        grid, options = _launch("key side", call, sizes, entries)
        _key_side_kernel[grid](
            *common, total.k, total.v, by_key, far.query_slots, far.key_slots, seen, seen, bits, barred,
            *strides, *lengths, ATOMIC=key_k > 1, **far_only, **options,
        )  # fmt: skip
    if call.query_gate is not None and call.key_gate is not None:
        total.query_gate, total.key_gate = _gate_grads(call, far.key_entries, by_query, by_key)


def _gate_grads(call: AttentionCall, key_entries: Tensor, by_query: Tensor, by_key: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over far pairs to gradients of the log assignments, [B, R, Tq, K] and [B, R, Tk, K]."""
    assert call.query_gate is not None and call.key_gate is not None
    routers = call.query_groups.shape[1]
    by_query = by_query.unflatten(1, (routers, -1)).sum(2).transpose(2, 3)  # [B, R, Tq, query_k]
    query_gate = torch.zeros(call.query_gate.shape, dtype=torch.float32, device=by_query.device)
    query_gate.scatter_add_(-1, call.query_groups, by_query)
    by_key = by_key.sum(2).unflatten(1, (routers, -1)).sum(2)  # [B, R, entries]
    ids = call.key_groups.flatten(2)
    place = key_entries // call.key_groups.shape[-1] * call.pattern.num_groups + ids.gather(-1, key_entries)
    key_gate = torch.zeros(call.key_gate.shape, dtype=torch.float32, device=by_key.device)
    key_gate.flatten(2).scatter_add_(-1, place, by_key)
    return query_gate, key_gate


def _zeros(call: AttentionCall, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=call.q.device)
