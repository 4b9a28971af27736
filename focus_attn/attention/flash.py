"""`stock` on CUDA in half precision: all visible pairs by a few calls of PyTorch's Flash attention.

One call with a window does what is near, one the prefixes that whole blocks of a group's queries see (`ragged.py`), and
small masked attentions the edges of the blocks. The parts are merged by their logsumexps; the backward is given the
merged ones, so that gradients add up to the exact ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.kernels import efficient_attention, widen
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
    sliding = call.pattern.sliding_window
    return (
        has_kernel(call.q.device, call.q.dtype)
        and _width(call) <= _widest(call.q.device)
        and call.softcap is None
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
    batch, _, num_queries, _ = call.q.shape
    part, part_lse = run(_rows(call, 1, near.queries, near.keys), near.batch, call.scale)
    out, lse = _spread(part, part_lse, near.queries, (batch, 1, num_queries))
    lists = far_lists(call)
    if lists is not None:
        routers = call.query_groups.shape[1]
        part, part_lse = _far(call, _rows(call, routers, lists.queries, lists.keys), lists)
        shape = batch, routers, num_queries
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
    call: AttentionCall,
    near: Band,
    final: tuple[Tensor, Tensor, Tensor],
    into: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor] | None,
) -> None:
    """Adds the gradients to those of q, k and v (`into`), and of the gates; all fp32.

    final: the gradient of the merged output, that output, and its logsumexp, +inf for a query that meets nothing.
    """
    grad, out, lse = final
    finals = grad.to(call.q.dtype), out.to(call.q.dtype), lse[..., None]
    seen = [_pick(x, 1, near.queries) for x in finals]
    parts = run_backward(_rows(call, 1, near.queries, near.keys), seen, near.batch, call.scale)
    _add_up(into, parts, (near.queries, near.keys, near.keys), 1)
    lists = far_lists(call)
    if lists is None:
        return
    routers = call.query_groups.shape[1]
    seen = [_pick(x, routers, lists.queries) for x in finals]
    far = _far_backward(call, _rows(call, routers, lists.queries, lists.keys), lists, seen)
    _add_up(into, far[:3], (lists.queries, lists.keys, lists.keys), routers)
    if gates is not None and far.by_query is not None and far.by_key is not None:
        real = lists.query_groups < call.pattern.num_groups  # not the list of sinks
        for gate, at, groups, sums in (
            (gates[0], lists.queries[real], lists.query_groups[real], far.by_query[real]),
            (gates[1], lists.keys[~lists.sinks], lists.key_groups[~lists.sinks], far.by_key[~lists.sinks]),
        ):
            gate.index_put_((*_places(at, routers, gate.shape[2]), groups), sums, accumulate=True)


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
    q, k, v = (_fit(x, width) for x in _edge_rows(rows, edge))
    bias = torch.zeros(edge.visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~edge.visible, -math.inf)
    out, lse = efficient_attention(q, k, v, bias[:, None].expand(-1, q.shape[1], -1, -1), scale)
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


def _rows(call: AttentionCall, routers: int, queries: Tensor | None, keys: Tensor | None) -> Rows:
    return Rows(_pick(call.q, routers, queries), _pick(call.k, routers, keys), _pick(call.v, routers, keys))


def _pick(x: Tensor, routers: int, rows: Tensor | None) -> Tensor:
    """[B, H, T, D] -> [rows, H / routers, D]; None: all of them in order."""
    by_token = x.unflatten(1, (routers, -1)).transpose(2, 3)  # [B, R, T, H / R, D]
    return by_token.flatten(0, 2) if rows is None else by_token[_places(rows, routers, x.shape[2])]


def _places(rows: Tensor, routers: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence, the router and the slot of a row."""
    line = rows // tokens
    return line // routers, line % routers, rows % tokens


def _by_head(x: Tensor, batch: int, routers: int) -> Tensor:
    """[B * R * T, H / R, ...] -> [B, H, T, ...]."""
    return x.unflatten(0, (batch, routers, -1)).transpose(2, 3).flatten(1, 2)


def _spread(out: Tensor, lse: Tensor, rows: Tensor | None, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """By row -> by token: [B, H, T, Dv] and [B, H, T], fp32, nothing seen where no row is. shape: B, R, T."""
    batch, routers, tokens = shape
    if rows is not None:
        whole = out.new_zeros(batch * routers * tokens, *out.shape[1:], dtype=torch.float32)
        whole_lse = lse.new_full(whole.shape[:2], -math.inf)
        out, lse = whole.index_copy_(0, rows, out.float()), whole_lse.index_copy_(0, rows, lse)
    return _by_head(out.float(), batch, routers), _by_head(lse, batch, routers)


def _add_up(into: tuple[Tensor, ...], parts: Sequence[Tensor], places: tuple[Tensor | None, ...], routers: int) -> None:
    """By row -> by token [B, H, T, D], where one token may have several rows."""
    for total, part, rows in zip(into, parts, places, strict=True):
        batch, heads, tokens, width = total.shape
        if rows is not None:
            whole = total.new_zeros(batch * routers * tokens, heads // routers, width)
            part = whole.index_add_(0, rows, part.float())
        total += _by_head(part, batch, routers)


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
    q, k, v = (_fit(x, width) for x in rows)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, batch.query_starts, batch.key_starts, batch.longest_queries, batch.longest_keys, 0.0,
        batch.window is not None, False, scale=scale, **_window(batch), seqused_k=batch.key_lengths,
    )  # fmt: skip
    lse = lse.transpose(0, 1)
    return out[..., : rows.v.shape[-1]], lse.masked_fill(lse == math.inf, -math.inf)  # the kernel's word for nothing


def _run_backward(rows: Rows, final: list[Tensor], batch: Batch, scale: float) -> list[Tensor]:
    grad, out, lse = final
    width = _aligned(rows)
    q, k, v = (_fit(x, width).contiguous() for x in rows)
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a generator that drops nothing
    grads = aten._flash_attention_backward(
        _fit(grad, width), q, k, v, _fit(out, width), lse[..., 0].t().contiguous(), batch.query_starts,
        batch.key_starts, batch.longest_queries, batch.longest_keys, 0.0, batch.window is not None, nothing, nothing,
        scale=scale, **_window(batch),
    )  # fmt: skip
    return [grad[..., : x.shape[-1]] for grad, x in zip(grads, rows, strict=True)]


def _window(batch: Batch) -> dict[str, int]:
    return {} if batch.window is None else {"window_size_left": batch.window, "window_size_right": 0}


def _aligned(rows: Rows) -> int:
    return -(-max(rows.q.shape[-1], rows.v.shape[-1]) // 8) * 8


def _fit(x: Tensor, width: int) -> Tensor:
    """The kernel wants a width of whole eights, and each vector in one piece."""
    x = widen(x, width)
    return x if x.stride(-1) == 1 else x.contiguous()
