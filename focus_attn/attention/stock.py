"""The `stock` backend: the visible pairs through kernels that already exist, in memory linear in n.

Each branch of the plan is cut into blocks of queries. A block meets a run of keys that all its queries see (no bias)
and an edge where they differ (a small bias); the parts are merged by their logsumexps. The backward walks the same
blocks with the merged output and logsumexp, so the gradients add up to the exact ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from focus_attn.attention import flash
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.kernels import Kernel, Tile, TileGrads, kernel_for
from focus_attn.attention.merge import merge, merge_sink_logits, sink_logits_grad
from focus_attn.attention.pieces import Piece, pieces
from focus_attn.attention.plan import Branch, branches
from focus_attn.attention.ragged import Band, band
from focus_attn.visibility import Tokens, count_positions, visible_mask

DENSE_PAIRS = 1 << 20  # up to some times so many query-key pairs masked calls beat sorting; see `_prefers_mask`
FLASH_FROM = 4  # times as many for Flash, on an H200 (results/attention_h200/stock.json)
MASKED_ROWS = 512  # queries a masked call


def stock_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out [B, H, Tq, Dv] and logsumexp [B, H, Tq], both fp32: the backward wants the output before it is rounded."""
    out, lse = _forward(call)
    out = out.float()
    if call.sink_logits is not None:
        out, lse = merge_sink_logits(out, lse, call.sink_logits)
    return out, lse


def _forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = call.q.shape
    something, kernel = queries > 0 and call.k.shape[2] > 0, kernel_for(call)
    near = _flash_band(call) if something else None
    if near is not None:
        return flash.flash_forward(call, near)
    if something and is_plain_causal(call):
        out, lse = kernel.forward(_causal_tile(call))
        return _merge_heads(out, call), _merge_heads(lse, call)
    out = torch.zeros(batch, heads, queries, call.v.shape[-1], dtype=torch.float32, device=call.q.device)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float32, device=call.q.device)
    if something and _prefers_mask(call):
        for start, stop, tile in _masked_tiles(call):
            part, part_lse = kernel.forward(tile)
            out[:, :, start:stop], lse[:, :, start:stop] = _merge_heads(part, call), _merge_heads(part_lse, call)
    elif something:
        _forward_branches(call, kernel, _by_kv_head(out, call), _by_kv_head(lse, call))
    return out, lse


@dataclass
class Gradients:
    q: Tensor
    k: Tensor
    v: Tensor
    sink_logits: Tensor | None = None
    query_gate: Tensor | None = None
    key_gate: Tensor | None = None


def stock_backward(call: AttentionCall, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Exact gradients of everything from the merged out and lse of the forward."""
    kernel = kernel_for(call)
    total = Gradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (call.q, call.k, call.v)))
    if call.sink_logits is not None:
        total.sink_logits = sink_logits_grad(grad, out, lse, call.sink_logits)
    if call.query_gate is not None and call.key_gate is not None:
        total.query_gate, total.key_gate = (
            torch.zeros_like(x, dtype=torch.float32) for x in (call.query_gate, call.key_gate)
        )
    if call.q.shape[2] and call.k.shape[2]:
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(s - inf) = 0: a query that saw nothing teaches nothing
        near = _flash_band(call)
        if near is not None:
            gates = None
            if total.query_gate is not None and total.key_gate is not None:
                gates = total.query_gate, total.key_gate
            flash.flash_backward(call, near, (grad, out, lse), (total.q, total.k, total.v), gates)
        elif is_plain_causal(call):
            tiles = [(0, call.q.shape[2], _causal_tile(call))]
            _backward_tiles(call, kernel, tiles, grad, out, lse, total)
        elif _prefers_mask(call):
            _backward_tiles(call, kernel, _masked_tiles(call), grad, out, lse, total)
        else:
            _backward_branches(call, kernel, grad, out, lse, total)
    return Gradients(
        total.q.to(call.q.dtype), total.k.to(call.k.dtype), total.v.to(call.v.dtype),
        total.sink_logits, total.query_gate, total.key_gate,
    )  # fmt: skip


# Which way: Flash, plain causal, one mask, or branches. Forward and backward must choose alike.


def _flash_band(call: AttentionCall) -> Band | None:
    """The near pairs for Flash attention; None where it does not serve the call, or a mask is faster."""
    return band(call) if flash.serves(call) and not _is_short(call, FLASH_FROM) else None


def is_plain_causal(call: AttentionCall) -> bool:
    """Full causal attention in slot order: one call, no plan. Decided by value on the CPU, never guessed elsewhere."""
    tokens, pattern = call.tokens, call.pattern
    length = call.k.shape[2]
    if call.q.shape[2] != length or pattern.window < length - 1:
        return False
    if pattern.sliding_window is not None and pattern.sliding_window < length:
        return False
    if tokens.key_segments is not None:
        return False
    straight = torch.arange(length, device=call.q.device).expand_as(tokens.key_positions)
    return torch.equal(tokens.key_positions, straight) and torch.equal(tokens.query_positions, straight)


def _prefers_mask(call: AttentionCall) -> bool:
    several, half = call.query_groups.shape[1] > 1, call.q.element_size() == 2
    if call.q.device.type == "cuda":  # Python walks over the blocks of every router
        return _is_short(call, 64 if several else 16)
    # On two CPU cores several routers are several sorts, and half precision makes the masked products cheap.
    return _is_short(call, 1 if not several else 4 if half else 2)


def _is_short(call: AttentionCall, times: int) -> bool:
    """Whether a mask beats what plans its pairs, as measured. Gates need to know which pairs are far."""
    short = call.q.shape[2] <= 16 or call.q.shape[2] * call.k.shape[2] <= times * DENSE_PAIRS
    return short and call.query_gate is None


def is_published_setting(call: AttentionCall) -> bool:
    """k = 1, shared ids, no sinks: where the split of the paper applies."""
    tokens, pattern = call.tokens, call.pattern
    if pattern.num_sinks or pattern.sliding_window is not None or call.query_gate is not None:
        return False
    if call.query_groups.shape[-1] != 1 or call.query_groups.shape != call.key_groups.shape:
        return False
    if tokens.key_segments is not None or not torch.equal(tokens.query_positions, tokens.key_positions):
        return False
    counted = count_positions(tokens.key_positions >= 0)  # causal by slot is causal by position only where these count
    if not torch.equal(tokens.key_positions, counted):
        return False
    return call.query_groups is call.key_groups or torch.equal(call.query_groups, call.key_groups)


def _branches(call: AttentionCall, row: int, published: bool) -> Iterator[tuple[Branch, slice]]:
    """The branches of a batch row, each with the KV heads that it serves."""
    single_router = call.query_groups.shape[1] == 1
    for branch in branches(call.query_groups, call.key_groups, call.tokens, call.pattern, row, published):
        all_heads = single_router or branch.router is None
        yield branch, slice(None) if all_heads else slice(branch.router, branch.router + 1)  # type: ignore[operator]


# Branches.


def _forward_branches(call: AttentionCall, kernel: Kernel, out: Tensor, lse: Tensor) -> None:
    """Fills out [B, Hkv, G, Tq, Dv] (zeros) and lse [B, Hkv, G, Tq] (-inf), both fp32, in place."""
    q, published = _by_kv_head(call.q, call), is_published_setting(call)
    for row in range(call.q.shape[0]):
        for number, (branch, heads) in enumerate(_branches(call, row, published)):
            queries = _take(q[row, heads], branch.queries, 2)
            keys, values = (_take(x[row, heads], branch.keys, 1) for x in (call.k, call.v))
            row_out, row_lse = out[row, heads], lse[row, heads]
            in_place = number == 0 and branch.queries is None  # the band of a straight row: nothing to merge with yet
            part_out = row_out if in_place else row_out.new_zeros(*queries.shape[:-1], row_out.shape[-1])
            part_lse = row_lse if in_place else row_lse.new_full(queries.shape[:-1], -math.inf)
            for piece in pieces(branch, call.q.dtype):
                tile = _tile(call, queries[:, :, piece.rows], keys, values, piece)
                new_out, new_lse = kernel.forward(tile)
                if not piece.opens_block:
                    new_out, new_lse = merge(part_out[:, :, piece.rows], part_lse[:, :, piece.rows], new_out, new_lse)
                part_out[:, :, piece.rows], part_lse[:, :, piece.rows] = new_out, new_lse
            if not in_place:
                before_out, before_lse = (_take(x, branch.queries, 2) for x in (row_out, row_lse))
                merged = merge(before_out, before_lse, part_out, part_lse)
                _put(branch.queries, (row_out, row_lse), merged)


def _backward_branches(
    call: AttentionCall, kernel: Kernel, grad: Tensor, out: Tensor, lse: Tensor, total: Gradients
) -> None:
    published = is_published_setting(call)
    by_head = [_by_kv_head(x, call) for x in (call.q, grad, out, lse)]
    total_q = _by_kv_head(total.q, call)
    for row in range(call.q.shape[0]):
        for branch, heads in _branches(call, row, published):
            queries, row_grad, row_out, row_lse = (_take(x[row, heads], branch.queries, 2) for x in by_head)
            keys, values = (_take(x[row, heads], branch.keys, 1) for x in (call.k, call.v))
            grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (queries, keys, values))
            marks = _marks(call, branch, row)
            for piece in pieces(branch, call.q.dtype):
                tile = _tile(call, queries[:, :, piece.rows], keys, values, piece)
                final = tuple(x[:, :, piece.rows] for x in (row_grad, row_out, row_lse))
                grads = kernel.backward(tile, final, None if marks is None else marks[piece.span])
                grad_q[:, :, piece.rows] += grads.q
                grad_k[:, piece.span] += grads.k
                grad_v[:, piece.span] += grads.v
                if marks is not None:
                    _add_gate_grads(total, branch, row, piece, marks, grads)
            _add(total_q[row, heads], branch.queries, 2, grad_q)
            _add(total.k[row, heads], branch.keys, 1, grad_k)
            _add(total.v[row, heads], branch.keys, 1, grad_v)


def _tile(call: AttentionCall, q: Tensor, keys: Tensor, values: Tensor, piece: Piece) -> Tile:
    k, v = keys[:, piece.span], values[:, piece.span]
    return Tile(q, k, v, call.scale, piece.causal, piece.bias, piece.sees, call.softcap)


# Gates: a far pair of group g carries log a_i[g] + log b_j[g] with its value taken off, so the gradient of its score is
# also that of the query's and of the key's log assignment.


def _marks(call: AttentionCall, branch: Branch, row: int) -> Tensor | None:
    """Which of the class's groups each key is met in, [nk, query_k] one-hot; None where no gate acts."""
    if call.query_gate is None or branch.groups is None:
        return None
    ids = _take(call.key_groups[row, branch.router], branch.keys, 0)  # [nk, key_k]
    marks = (ids[:, :, None] == branch.groups).any(1)
    marks[:, 1:] &= branch.groups[1:] != branch.groups[:-1]  # a repeated id counts once
    return marks


def _add_gate_grads(total: Gradients, branch: Branch, row: int, piece: Piece, marks: Tensor, grads: TileGrads) -> None:
    """Adds the sums over a tile; a router serves all its heads, so they add up too."""
    assert total.query_gate is not None and total.key_gate is not None  # for the type checker
    assert grads.by_query is not None and grads.by_key is not None
    assert branch.groups is not None and branch.queries is not None and branch.keys is not None
    for gate, slots, sums in (
        (total.query_gate, branch.queries[piece.rows], grads.by_query.sum((0, 1))),
        (total.key_gate, branch.keys[piece.span], grads.by_key.sum(0)[:, None] * marks[piece.span]),
    ):
        gate[row, branch.router].index_put_((slots[:, None], branch.groups[None]), sums.float(), accumulate=True)


# One call for everything: a mask, or none.


def _causal_tile(call: AttentionCall) -> Tile:
    q = _by_kv_head(call.q, call).flatten(0, 1)
    return Tile(q, call.k.flatten(0, 1), call.v.flatten(0, 1), call.scale, causal=True, softcap=call.softcap)


def _masked_tiles(call: AttentionCall) -> Iterator[tuple[int, int, Tile]]:
    """Query chunks against the keys before their last query, with the predicate as a bias: for decoding and for texts
    too short to sort."""
    q, kv_heads = _by_kv_head(call.q, call), call.k.shape[1]
    for start in range(0, call.q.shape[2], MASKED_ROWS):
        stop = min(start + MASKED_ROWS, call.q.shape[2])
        tokens = call.tokens.queries(start, stop)
        last = _last_key(tokens)
        tokens, key_groups = tokens.keys(last), call.key_groups[:, :, :last]
        mask = visible_mask(call.query_groups[:, :, start:stop], key_groups, tokens, call.pattern)
        mask = mask.expand(-1, kv_heads, -1, -1).flatten(0, 1)
        bias = torch.zeros(mask.shape, dtype=call.q.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
        chunk = q[..., start:stop, :].flatten(0, 1)
        k, v = call.k[:, :, :last].flatten(0, 1), call.v[:, :, :last].flatten(0, 1)
        yield start, stop, Tile(chunk, k, v, call.scale, bias=bias, sees=mask.any(-1), softcap=call.softcap)


def _last_key(tokens: Tokens) -> int:
    """One past the last slot that any of these queries could see; at least 1."""
    reachable = (tokens.key_positions <= tokens.query_positions.amax(-1, keepdim=True)) & (tokens.key_positions >= 0)
    slots = torch.arange(1, reachable.shape[-1] + 1, device=reachable.device)
    return max(1, int((reachable * slots).max()))


def _backward_tiles(
    call: AttentionCall,
    kernel: Kernel,
    tiles: Iterator[tuple[int, int, Tile]] | list[tuple[int, int, Tile]],
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    total: Gradients,
) -> None:
    for start, stop, tile in tiles:
        final = tuple(_by_kv_head(x[:, :, start:stop], call).flatten(0, 1) for x in (grad, out, lse))
        grads = kernel.backward(tile, final)
        total.q[:, :, start:stop] += _merge_heads(grads.q, call)
        for whole, part in ((total.k, grads.k), (total.v, grads.v)):
            whole[:, :, : part.shape[1]] += part.unflatten(0, whole.shape[:2])


def _by_kv_head(x: Tensor, call: AttentionCall) -> Tensor:
    """[B, H, ...] -> [B, Hkv, G, ...], a view."""
    return x.unflatten(1, (call.k.shape[1], -1))


def _merge_heads(x: Tensor, call: AttentionCall) -> Tensor:
    """[B * Hkv, G, ...] -> [B, H, ...]."""
    return x.unflatten(0, (call.q.shape[0], -1)).flatten(1, 2)


# Slots: None stands for all of them in order, which needs no copy.


def _take(x: Tensor, slots: Tensor | None, dim: int) -> Tensor:
    return x if slots is None else x.index_select(dim, slots)


def _put(slots: Tensor | None, targets: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        if slots is None:
            target.copy_(value)
        else:
            target.index_copy_(2, slots, value)


def _add(target: Tensor, slots: Tensor | None, dim: int, value: Tensor) -> None:
    if slots is None:
        target += value
    else:
        target.index_add_(dim, slots, value)
