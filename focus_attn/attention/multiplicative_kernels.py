"""The multiplicative gate in the manner of FlashAttention: scores, gates and probabilities live in registers.

A distant score is multiplied by sigmoid(a_i . b_j), a being lambda times the query's assignment; near ones stay as they
are. Three kernels: the forward over the queries, and backward over the keys (dk, dv, db) and over the queries (dq, da).
The backward makes the scores anew from the logsumexp, so that nothing is kept for a pair. a and b are C wide, a power
of two that holds the groups: what is beyond them is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

LENGTHS = ["num_queries", "num_keys", "heads", "routers", "window", "num_sinks", "sliding"]


@triton.jit
def _rows(X, begin, end, token_stride, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr):
    """Rows begin:end of X, [BLOCK, BLOCK_W], 0 outside."""
    row, w = begin + tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    at = X + row.to(tl.int64)[:, None] * token_stride + w[None, :]
    return tl.load(at, mask=(row < end)[:, None] & (w < W)[None, :], other=0.0)


@triton.jit
def _numbers(X, begin, end, other, BLOCK: tl.constexpr):
    i = begin + tl.arange(0, BLOCK)
    return tl.load(X + i, mask=i < end, other=other)


@triton.jit
def _put(X, x, begin, end, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr):
    """Into rows of width W that lie one after the other."""
    row, w = begin + tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    at = X + row.to(tl.int64)[:, None] * W + w[None, :]
    tl.store(at, x.to(X.dtype.element_ty), mask=(row < end)[:, None] & (w < W)[None, :])


@triton.jit
def _gated(
    q, k, a, b, query_at, key_at, query_in, key_in, scale, softcap, window, num_sinks, sliding,
    SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """(score before the gate, gate, near, score as the softmax takes it) of a tile, queries by keys."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    gate = tl.sigmoid(tl.dot(a, tl.trans(b), input_precision=GATES))
    distance = query_at[:, None] - key_at[None, :]
    reachable = (key_at >= 0)[None, :] & (distance >= 0) & (distance < sliding)
    if SEGMENTS:
        reachable &= query_in[:, None] == key_in[None, :]
    near = (distance <= window) | (key_at < num_sinks)[None, :]
    return score, gate, near, tl.where(reachable, tl.where(near, score, score * gate), -float("inf"))


@triton.jit
def _score_grads(
    score, gate, near, x, dp, lse, delta, softcap, SOFTCAP: tl.constexpr
):  # fmt: skip
    """(p, d/d q.k, d/d a.b) of a tile. A row that sees nothing has a lse of -inf, and no probabilities."""
    p = tl.exp(x - tl.where(lse == -float("inf"), 0.0, lse)[:, None])
    dx = p * (dp - delta[:, None])
    d_affinity = tl.where(near, 0.0, dx * score * gate * (1 - gate))
    d_score = tl.where(near, dx, dx * gate)
    if SOFTCAP:
        capped = score / softcap
        d_score *= 1 - capped * capped
    return p, d_score, d_affinity


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    Q, K, V, A, B, QUERY_AT, KEY_AT, QUERY_IN, KEY_IN, OUT, LSE,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    num_queries, num_keys, heads, routers, window, num_sinks, sliding, scale, softcap,
    PLAIN: tl.constexpr, SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, GATES: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """OUT [B, H, Tq, Dv] and LSE [B, H, Tq] lie in a row. PLAIN: slots are positions, the queries the last of them."""
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # those with the most keys first
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head, router = head // G, head * routers // heads
    q = _rows(Q + batch * q_batch + head * q_head, begin, num_queries, q_token, D, BLOCK_D, BLOCK_M)
    a = _rows(A + (batch * routers + router) * num_queries * C, begin, num_queries, C, C, C, BLOCK_M)
    query_at = _numbers(QUERY_AT + batch * num_queries, begin, num_queries, -1, BLOCK_M)
    query_in = _numbers(QUERY_IN + batch * num_queries, begin, num_queries, -1, BLOCK_M) if SEGMENTS else query_at
    K += batch * k_batch + kv_head * k_head
    V += batch * v_batch + kv_head * v_head
    B += (batch * routers + router) * num_keys * C
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    last = tl.minimum(begin + BLOCK_M + num_keys - num_queries, num_keys) if PLAIN else num_keys
    for start in tl.range(0, last, BLOCK_N):
        k = _rows(K, start, num_keys, k_token, D, BLOCK_D, BLOCK_N)
        b = _rows(B, start, num_keys, C, C, C, BLOCK_N)
        key_at = _numbers(KEY_AT + batch * num_keys, start, num_keys, -1, BLOCK_N)
        key_in = _numbers(KEY_IN + batch * num_keys, start, num_keys, -1, BLOCK_N) if SEGMENTS else key_at
        _, _, _, x = _gated(
            q, k, a, b, query_at, key_at, query_in, key_in, scale, softcap, window, num_sinks, sliding,
            SEGMENTS, SOFTCAP, PRECISION, GATES,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(x, 1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has seen nothing yet
        p = tl.exp(x - shift[:, None])
        alpha = tl.exp(m - shift)
        norm = norm * alpha + tl.sum(p, 1)
        v = _rows(V, start, num_keys, v_token, DV, BLOCK_DV, BLOCK_N)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    some = norm > 0
    row = batch * heads + head
    out = acc * (1 / tl.where(some, norm, 1.0))[:, None]
    _put(OUT + row * num_queries * DV, out, begin, num_queries, DV, BLOCK_DV, BLOCK_M)
    i = begin + tl.arange(0, BLOCK_M)
    lse = tl.where(some, m + tl.log(tl.where(some, norm, 1.0)), -float("inf"))
    tl.store(LSE + row * num_queries + i, lse, mask=i < num_queries)


@triton.jit(do_not_specialize=LENGTHS)
def key_grad_kernel(
    Q, K, V, A, B, QUERY_AT, KEY_AT, QUERY_IN, KEY_IN, DO, LSE, DELTA, DK, DV_OUT, DB,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, do_batch, do_head, do_token,
    num_queries, num_keys, heads, routers, window, num_sinks, sliding, scale, softcap,
    PLAIN: tl.constexpr, SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, GATES: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DK, DV_OUT and DB [B, Hkv, Tk, ...]: of some keys of a KV head, from all of its query heads."""
    begin = tl.program_id(0) * BLOCK_N
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_heads = heads // G
    router = kv_head * routers // kv_heads
    k = _rows(K + batch * k_batch + kv_head * k_head, begin, num_keys, k_token, D, BLOCK_D, BLOCK_N)
    v = _rows(V + batch * v_batch + kv_head * v_head, begin, num_keys, v_token, DV, BLOCK_DV, BLOCK_N)
    b = _rows(B + (batch * routers + router) * num_keys * C, begin, num_keys, C, C, C, BLOCK_N)
    key_at = _numbers(KEY_AT + batch * num_keys, begin, num_keys, -1, BLOCK_N)
    key_in = _numbers(KEY_IN + batch * num_keys, begin, num_keys, -1, BLOCK_N) if SEGMENTS else key_at
    A += (batch * routers + router) * num_queries * C
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    db = tl.zeros([BLOCK_N, C], tl.float32)
    first = tl.maximum(begin - (num_keys - num_queries), 0) // BLOCK_M * BLOCK_M if PLAIN else 0
    for g in tl.range(0, G):
        head = kv_head * G + g
        row = (batch * heads + head) * num_queries
        for start in tl.range(first, num_queries, BLOCK_M):
            q = _rows(Q + batch * q_batch + head * q_head, start, num_queries, q_token, D, BLOCK_D, BLOCK_M)
            do = _rows(DO + batch * do_batch + head * do_head, start, num_queries, do_token, DV, BLOCK_DV, BLOCK_M)
            a = _rows(A, start, num_queries, C, C, C, BLOCK_M)
            query_at = _numbers(QUERY_AT + batch * num_queries, start, num_queries, -1, BLOCK_M)
            query_in = (
                _numbers(QUERY_IN + batch * num_queries, start, num_queries, -1, BLOCK_M) if SEGMENTS else query_at
            )
            lse = _numbers(LSE + row, start, num_queries, -float("inf"), BLOCK_M)
            delta = _numbers(DELTA + row, start, num_queries, 0.0, BLOCK_M)
            score, gate, near, x = _gated(
                q, k, a, b, query_at, key_at, query_in, key_in, scale, softcap, window, num_sinks, sliding,
                SEGMENTS, SOFTCAP, PRECISION, GATES,
            )  # fmt: skip
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            p, d_score, d_affinity = _score_grads(score, gate, near, x, dp, lse, delta, softcap, SOFTCAP)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(d_score.to(q.dtype)), q, dk, input_precision=PRECISION)
            db = tl.dot(tl.trans(d_affinity), a, db, input_precision=GATES)
    row = (batch * kv_heads + kv_head) * num_keys
    _put(DK + row * D, dk * scale, begin, num_keys, D, BLOCK_D, BLOCK_N)
    _put(DV_OUT + row * DV, dv, begin, num_keys, DV, BLOCK_DV, BLOCK_N)
    _put(DB + row * C, db, begin, num_keys, C, C, BLOCK_N)


@triton.jit(do_not_specialize=LENGTHS)
def query_grad_kernel(
    Q, K, V, A, B, QUERY_AT, KEY_AT, QUERY_IN, KEY_IN, DO, LSE, DELTA, DQ, DA,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, do_batch, do_head, do_token,
    num_queries, num_keys, heads, routers, window, num_sinks, sliding, scale, softcap,
    PLAIN: tl.constexpr, SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, GATES: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DQ and DA [B, H, Tq, ...]."""
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head, router = head // G, head * routers // heads
    row = (batch * heads + head) * num_queries
    q = _rows(Q + batch * q_batch + head * q_head, begin, num_queries, q_token, D, BLOCK_D, BLOCK_M)
    do = _rows(DO + batch * do_batch + head * do_head, begin, num_queries, do_token, DV, BLOCK_DV, BLOCK_M)
    a = _rows(A + (batch * routers + router) * num_queries * C, begin, num_queries, C, C, C, BLOCK_M)
    query_at = _numbers(QUERY_AT + batch * num_queries, begin, num_queries, -1, BLOCK_M)
    query_in = _numbers(QUERY_IN + batch * num_queries, begin, num_queries, -1, BLOCK_M) if SEGMENTS else query_at
    lse = _numbers(LSE + row, begin, num_queries, -float("inf"), BLOCK_M)
    delta = _numbers(DELTA + row, begin, num_queries, 0.0, BLOCK_M)
    K += batch * k_batch + kv_head * k_head
    V += batch * v_batch + kv_head * v_head
    B += (batch * routers + router) * num_keys * C
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    da = tl.zeros([BLOCK_M, C], tl.float32)
    last = tl.minimum(begin + BLOCK_M + num_keys - num_queries, num_keys) if PLAIN else num_keys
    for start in tl.range(0, last, BLOCK_N):
        k = _rows(K, start, num_keys, k_token, D, BLOCK_D, BLOCK_N)
        v = _rows(V, start, num_keys, v_token, DV, BLOCK_DV, BLOCK_N)
        b = _rows(B, start, num_keys, C, C, C, BLOCK_N)
        key_at = _numbers(KEY_AT + batch * num_keys, start, num_keys, -1, BLOCK_N)
        key_in = _numbers(KEY_IN + batch * num_keys, start, num_keys, -1, BLOCK_N) if SEGMENTS else key_at
        score, gate, near, x = _gated(
            q, k, a, b, query_at, key_at, query_in, key_in, scale, softcap, window, num_sinks, sliding,
            SEGMENTS, SOFTCAP, PRECISION, GATES,
        )  # fmt: skip
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        _, d_score, d_affinity = _score_grads(score, gate, near, x, dp, lse, delta, softcap, SOFTCAP)
        dq = tl.dot(d_score.to(k.dtype), k, dq, input_precision=PRECISION)
        da = tl.dot(d_affinity, b, da, input_precision=GATES)
    _put(DQ + row * D, dq * scale, begin, num_queries, D, BLOCK_D, BLOCK_M)
    _put(DA + row * C, da, begin, num_queries, C, C, BLOCK_M)
