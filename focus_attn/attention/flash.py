"""`stock` on CUDA in half precision: all visible pairs by a few calls of PyTorch's Flash attention.

One call with a window does what is near, one the prefixes that whole blocks of a group's queries see (`ragged.py`), and
small masked attentions the edges of the blocks. The parts are merged by their logsumexps; the backward is given the
merged ones, so that gradients add up to the exact ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.merge import merge
from focus_attn.attention.ragged import Band, Batch, Edge, Lists, cut, edges, far_lists, levels, prefixes, split

aten = torch.ops.aten

BLOCK = 128  # queries, in a forward; as many as a tile of the kernel has
BACKWARD_BLOCK = 64  # the edges of a backward are plain products: half the block, half of them
EDGE_KEYS = 128
BACKWARD_EDGE_KEYS = 64
EDGE_BYTES = 1 << 29  # of what is gathered for edges at once


def serves(call: AttentionCall) -> bool:
    """Known without a look at values, but for positions: see `ragged.band`."""
    return has_kernel(call.q.device, call.q.dtype) and could_serve(call) and _width(call) <= _widest(call.q.device)


def could_serve(call: AttentionCall) -> bool:
    """On a device that has the kernel."""
    sliding = call.pattern.sliding_window
    return (
        call.softcap is None
        and call.scale > 0  # the kernel hides a pair before it multiplies with it
        and min(call.query_groups.shape[-1], call.key_groups.shape[-1]) == 1
        and (sliding is None or sliding <= call.pattern.window + 1)
        and call.q.shape[2] <= call.k.shape[2]
    )


def _width(call: AttentionCall) -> int:
    """Of the vectors that a backward has: see `_far_backward`."""
    gated = call.query_gate is not None
    return max(call.q.shape[-1] + 2 * gated, call.v.shape[-1])


def _widest(device: torch.device) -> int:
    """Backwards of wider heads want the shared memory of data-centre GPUs."""
    return 256 if torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0)) else 192


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None  # its kernel takes no `seqused_k`
        and dtype in (torch.bfloat16, torch.float16)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


class Rows(NamedTuple):
    """Tensors as the kernel takes them, [rows, heads, width]."""

    q: Tensor
    k: Tensor
    v: Tensor


def flash_forward(call: AttentionCall, near: Band) -> tuple[Tensor, Tensor]:
    """out [B, H, Tq, Dv] and logsumexp [B, H, Tq], fp32."""
    batch, heads, num_queries, _ = call.q.shape
    rows = Rows(*(_pick(_by_token(x, 1), at) for x, at in _with(call, near.queries, near.keys)))
    part, part_lse = run(rows, near.batch, call.scale)
    out, lse = _spread(part, part_lse, near.queries, (batch, 1, num_queries, heads))
    lists = far_lists(call)
    if lists is not None:
        routers = call.query_groups.shape[1]
        rows = Rows(*(_pick(_by_token(x, routers), at) for x, at in _with(call, lists.queries, lists.keys)))
        part, part_lse = _far(call, rows, lists)
        shape = batch, routers, num_queries, heads // routers
        if lists.num_visits == 1:
            return merge(out, lse, *_spread(part, part_lse, lists.queries, shape))
        for visit in range(lists.num_visits):
            at = (lists.visits == visit).nonzero()[:, 0]
            out, lse = merge(out, lse, *_spread(part[at], part_lse[at], lists.queries[at], shape))
    return out, lse


def _far(call: AttentionCall, rows: Rows, lists: Lists) -> tuple[Tensor, Tensor]:
    """By entry: [n, heads of a router, Dv] and [n, heads of a router], fp32."""
    blocks = cut(lists, BLOCK)
    part, part_lse = run(rows, prefixes(lists, blocks, BLOCK), call.scale)
    out = part.new_empty(len(part) + 1, *part.shape[1:], dtype=torch.float32)  # one row more, for padded queries
    lse = part_lse.new_empty(len(part) + 1, part.shape[1])
    out[:-1], lse[:-1], out[-1], lse[-1] = part, part_lse, 0.0, -math.inf
    for edge in edges(lists, blocks, EDGE_KEYS, _edges_at_once(rows, BLOCK + 2 * EDGE_KEYS)):
        part, part_lse = _edge_forward(rows, edge, call.scale)
        at = edge.queries.flatten()
        out[at], lse[at] = merge(out[at], lse[at], part, part_lse)
    return out[:-1], lse[:-1]


class FarGradients(NamedTuple):
    """By entry of the lists, fp32. by_query, by_key: of the scores, summed over the other side and the heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    by_query: Tensor | None
    by_key: Tensor | None


def flash_backward(
    call: AttentionCall, near: Band, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Gradients of q, k, v and the gates, fp32, from the gradient of the merged output, that output and logsumexp.

    lse is +inf for a query that meets nothing.
    """
    final = [(grad.to(call.q.dtype), 1), (out.to(call.q.dtype), 1), (lse[..., None], 1)]
    rows = Rows(*(_pick(_by_token(x, 1), at) for x, at in _with(call, near.queries, near.keys)))
    seen = [_pick(_by_token(x, 1), near.queries) for x, _ in final]
    shapes = [x.shape for x in (call.q, call.k, call.v)]
    places = near.queries, near.keys, near.keys
    parts = run_backward(rows, seen, near.batch, call.scale)
    q, k, v = (_add_up(part, at, shape, 1) for part, at, shape in zip(parts, places, shapes, strict=True))
    lists = far_lists(call)
    gates = _no_gates(call)
    if lists is not None:
        routers = call.query_groups.shape[1]
        rows = Rows(*(_pick(_by_token(x, routers), at) for x, at in _with(call, lists.queries, lists.keys)))
        seen = [_pick(_by_token(x, routers), lists.queries) for x, _ in final]
        far = _far_backward(call, rows, lists, seen)
        places = lists.queries, lists.keys, lists.keys
        for total, part, at in zip((q, k, v), far[:3], places, strict=True):
            total += _add_up(part, at, total.shape, routers)
        if gates is not None and far.by_query is not None and far.by_key is not None:
            real = lists.query_groups < call.pattern.num_groups  # not the list of sinks
            for gate, at, groups, sums in (
                (gates[0], lists.queries[real], lists.query_groups[real], far.by_query[real]),
                (gates[1], lists.keys[~lists.sinks], lists.key_groups[~lists.sinks], far.by_key[~lists.sinks]),
            ):
                gate.flatten(0, 2).index_put_((at, groups), sums, accumulate=True)
    return q, k, v, gates


def _no_gates(call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    if call.query_gate is None or call.key_gate is None:
        return None
    return tuple(torch.zeros_like(x, dtype=torch.float32).contiguous() for x in (call.query_gate, call.key_gate))  # type: ignore[return-value]


def _far_backward(call: AttentionCall, rows: Rows, lists: Lists, final: list[Tensor]) -> FarGradients:
    blocks, width = cut(lists, BACKWARD_BLOCK), rows.q.shape[-1]
    if call.query_gate is not None:
        # Two columns that add nothing to q . k: the gradient of a zero against ones is the sum over those.
        marks = (~lists.sinks)[:, None, None].to(rows.k.dtype).expand(-1, rows.k.shape[1], 1)
        q = torch.cat([rows.q, torch.zeros_like(rows.q[..., :1]), torch.ones_like(rows.q[..., :1])], -1)
        rows = Rows(q, torch.cat([rows.k, marks, torch.zeros_like(marks)], -1), rows.v)
    q, k, v = (torch.zeros_like(x, dtype=torch.float32) for x in rows)
    for queries, keys, batch in levels(lists, blocks):
        some = Rows(rows.q[queries], rows.k[keys], rows.v[keys])
        parts = run_backward(some, [x[queries] for x in final], batch, call.scale)
        for total, at, part in zip((q, k, v), (queries, keys, keys), parts, strict=True):
            total.index_add_(0, at, part.float())
    at_once = _edges_at_once(rows, 4 * BACKWARD_BLOCK + 6 * BACKWARD_EDGE_KEYS)  # fp32, and scores beside them
    for edge in edges(lists, blocks, BACKWARD_EDGE_KEYS, at_once):
        _edge_backward(rows, final, edge, call.scale, (q, k, v))
    if call.query_gate is None:
        return FarGradients(q, k, v, None, None)
    by_query, by_key = (x.sum(1) / call.scale for x in (q[..., width], k[..., width + 1]))
    return FarGradients(q[..., :width], k[..., :width], v, by_query, by_key)


# Edges: small attentions under a mask.


def _edges_at_once(rows: Rows, rows_each: int) -> int:
    return max(4, EDGE_BYTES // (rows_each * rows.q[0].numel() * rows.q.element_size()))


def _edge_forward(rows: Rows, edge: Edge, scale: float) -> tuple[Tensor, Tensor]:
    """By row of the flattened queries: [U * S, heads, Dv] and [U * S, heads], -inf where nothing is seen."""
    width = _aligned(rows)
    q, k, v = (_widen(x, width) for x in _edge_rows(rows, edge))
    bias = torch.zeros(edge.visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~edge.visible, -math.inf)
    out, lse = masked(q, k, v, bias[:, None], scale)
    blind = ~edge.visible.any(-1)[:, None]
    out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -math.inf)
    return out[..., : rows.v.shape[-1]].transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _edge_backward(
    rows: Rows, final: list[Tensor], edge: Edge, scale: float, total: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Plain products in fp32, added to the total."""
    at = edge.queries.clamp_max(len(rows.q) - 1)
    q, k, v = (x.float() for x in _edge_rows(rows, edge))
    grad, out, lse = (x[at].float().transpose(1, 2) for x in final)
    p = (q @ k.transpose(-1, -2) * scale - lse).exp_().masked_fill_(~edge.visible[:, None], 0.0)
    delta = (grad * out).sum(-1, keepdim=True)
    scores = p * (grad @ v.transpose(-1, -2) - delta) * scale
    for whole, places, part in (
        (total[0], at, scores @ k),
        (total[1], edge.keys, scores.transpose(-1, -2) @ q),
        (total[2], edge.keys, p.transpose(-1, -2) @ grad),
    ):
        heads = whole.shape[1]
        part = part.transpose(1, 2).unflatten(2, (heads, -1)).sum(3)  # the query heads of a key/value head
        whole.index_add_(0, places.flatten(), part.flatten(0, 1))


def _edge_rows(rows: Rows, edge: Edge) -> list[Tensor]:
    """q, k, v of an edge, [U, heads, S or E, width]: keys once for each query head."""
    heads = rows.q.shape[1]
    q = rows.q[edge.queries.clamp_max(len(rows.q) - 1)]
    k, v = (x[edge.keys].repeat_interleave(heads // x.shape[1], 2) for x in (rows.k, rows.v))
    return [x.transpose(1, 2) for x in (q, k, v)]


# Rows of tokens. `routers` lines of tokens, each with the heads of a router, or one with all of them.


def _by_token(x: Tensor, routers: int) -> Tensor:
    """[B, H, T, D] -> [B, R, T, H / R, D], a view."""
    return x.unflatten(1, (routers, -1)).transpose(2, 3)


def _with(call: AttentionCall, queries: Tensor | None, keys: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    return [(call.q, queries), (call.k, keys), (call.v, keys)]


def _pick(x: Tensor, rows: Tensor | None) -> Tensor:
    """[B, R, T, heads, D] -> [rows, heads, D]."""
    if rows is None:
        return x.flatten(0, 2)
    _, routers, tokens = x.shape[:3]
    line, slot = rows // tokens, rows % tokens
    return x[line // routers, line % routers, slot]


def _spread(out: Tensor, lse: Tensor, rows: Tensor | None, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """By row -> by token: [B, H, T, Dv] and [B, H, T], fp32, nothing seen where no row is. shape: B, R, T, H / R."""
    batch, routers, tokens, heads = shape
    if rows is not None:
        whole = out.new_zeros(batch * routers * tokens, heads, out.shape[-1], dtype=torch.float32)
        whole_lse = lse.new_full(whole.shape[:2], -math.inf)
        out, lse = whole.index_copy_(0, rows, out.float()), whole_lse.index_copy_(0, rows, lse)
    out, lse = (x.unflatten(0, (batch, routers, tokens)).transpose(2, 3).flatten(1, 2) for x in (out.float(), lse))
    return out, lse


def _add_up(part: Tensor, rows: Tensor | None, shape: torch.Size, routers: int) -> Tensor:
    """By row -> by token, where one token may have several rows: [B, H, T, D] fp32."""
    batch, heads, tokens, width = shape
    if rows is not None:
        whole = part.new_zeros(batch * routers * tokens, heads // routers, width, dtype=torch.float32)
        part = whole.index_add_(0, rows, part.float())
    return part.float().unflatten(0, (batch, routers, tokens)).transpose(2, 3).flatten(1, 2)


# The kernels.


def run(rows: Rows, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
    """out [n, heads, Dv] and logsumexp [n, heads] fp32, -inf for a query without keys."""
    parts = [
        _run(Rows(rows.q[queries], rows.k[keys], rows.v[keys]), part, scale) for part, queries, keys in split(batch)
    ]
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))  # type: ignore[return-value]


def run_backward(rows: Rows, final: list[Tensor], batch: Batch, scale: float) -> list[Tensor]:
    """Gradients of q, k and v from the gradient of the merged output, that output, and its logsumexp [n, heads, 1]."""
    parts = []
    for part, queries, keys in split(batch):
        some = Rows(rows.q[queries], rows.k[keys], rows.v[keys])
        parts.append(_run_backward(some, [x[queries] for x in final], part, scale))
    return parts[0] if len(parts) == 1 else list(map(torch.cat, zip(*parts, strict=True)))


def _run(rows: Rows, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
    width = _aligned(rows)
    q, k, v = (_widen(x, width) for x in rows)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, batch.query_starts, batch.key_starts, batch.longest_queries, batch.longest_keys, 0.0,
        batch.window is not None, False, scale=scale, **_window(batch), seqused_k=batch.key_lengths,
    )  # fmt: skip
    lse = lse.transpose(0, 1)
    return out[..., : rows.v.shape[-1]], lse.masked_fill(lse == math.inf, -math.inf)  # the kernel's word for nothing


def _run_backward(rows: Rows, final: list[Tensor], batch: Batch, scale: float) -> list[Tensor]:
    grad, out, lse = final
    width = _aligned(rows)
    q, k, v = (_widen(x, width).contiguous() for x in rows)
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a generator that drops nothing
    grads = aten._flash_attention_backward(
        _widen(grad, width), q, k, v, _widen(out, width), lse[..., 0].t().contiguous(), batch.query_starts,
        batch.key_starts, batch.longest_queries, batch.longest_keys, 0.0, batch.window is not None, nothing, nothing,
        scale=scale, **_window(batch),
    )  # fmt: skip
    return [grad[..., : x.shape[-1]] for grad, x in zip(grads, rows, strict=True)]


def _window(batch: Batch) -> dict[str, int]:
    return {} if batch.window is None else {"window_size_left": batch.window, "window_size_right": 0}


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[N, heads, S, D] under a bias [N, 1, S, E]: out, and logsumexp [N, heads, S] fp32."""
    bias = bias.expand(-1, q.shape[1], -1, -1)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
    return out, lse[..., : q.shape[2]]


def _aligned(rows: Rows) -> int:
    return -(-max(rows.q.shape[-1], rows.v.shape[-1]) // 8) * 8


def _widen(x: Tensor, width: int) -> Tensor:
    """The kernel wants a width of whole eights, and each vector in one piece."""
    x = x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
