"""The `triton` backend's backward, from the merged output and logsumexp.

Each pass of the forward has two kernels (`backward_kernels.py`): one in query order for dq, one in key order for dk
and dv. Every row is written by one program at a time, so results repeat bit for bit; where a key belongs to several
groups its gradients meet in atomic additions, or one group after the other when PyTorch is asked for deterministic
algorithms. Far walks over copies in the order of the groups, of a few KV heads at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from focus_attn.attention import sorted_rows, square, triton_plan
from focus_attn.attention.backward_copies import Row, Sorted, add_parts, rows_of, sorted_copies
from focus_attn.attention.backward_kernels import key_side_kernel, query_side_kernel, sink_kernel
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.device_plan import FarPlan, places, plan_far, plan_near, seen_by
from focus_attn.attention.launch import Setup, brought_into_step, ceil_div, power_of_2, setup_for, with_ids_in_a_row
from focus_attn.attention.merge import sink_logits_grad
from focus_attn.attention.near_far import Seed, can_meet_twice, has_far_pairs, rows_and_strides, set_bits, tile_of
from focus_attn.attention.stock import Gradients

QUERIES_A_STRETCH = 512


def triton_backward(call: AttentionCall, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Exact gradients of everything from the merged out and lse of the forward."""
    sink_grad = None
    if call.sink_logits is not None:
        sink_grad = sink_logits_grad(grad, out, lse, call.sink_logits)
    call = with_ids_in_a_row(call)
    if 0 in (call.q.shape[2], call.k.shape[2]):
        return _no_gradients(call, sink_grad)
    grad = brought_into_step(grad)
    setup = setup_for(call, grad, out)
    rows = rows_of(setup, grad, out, lse)
    if square.serves_backward(call, setup):
        total = _square_backward(call, setup, grad, out, lse, rows)
    else:
        total = _backward(call, setup, grad, rows)
    total.sink_logits = sink_grad
    return total


class _Pass:
    """Both kernels of one pass of the forward: `near` unless a far plan is given."""

    def __init__(self, call: AttentionCall, setup: Setup, grad: Tensor, rows: Row, far: FarPlan | None = None) -> None:
        self.call, self.setup, self.far, self.name = call, setup, far, "far" if far else "near"
        (self.q, self.k, self.v, self.grad), self.strides = rows_and_strides(call, setup, grad)
        self.rows = rows
        self.nothing = rows.lse  # stands for a tensor that a pass does not read
        self.ranged = call.tokens.key_segments is not None or call.pattern.sliding_window is not None
        groups = call.pattern.num_groups
        self.flags = {
            "VISITS": call.query_groups.shape[-1] if far else 1,
            "GROUPS": groups,
            "BLOCK_GROUPS": power_of_2(groups),
            "FAR": far is not None,
            "SINKS": far is None and call.pattern.num_sinks > 0,
            "RANGED": self.ranged,
            "DEDUP": far is not None and can_meet_twice(call),
        }

    def _lengths(self, first_head: int, heads: int, visit: int) -> tuple[float, ...]:
        call = self.call
        num_queries, kv_heads, num_keys = call.q.shape[2], call.k.shape[1], call.k.shape[2]
        entries = self.far.key_slots.shape[-1] if self.far else num_keys
        routers = call.query_groups.shape[1] if self.far else 1
        pattern = call.pattern
        sizes = num_queries, num_keys, entries, kv_heads, first_head, heads, routers, visit
        return *sizes, pattern.window, pattern.num_sinks, call.scale, call.softcap or 1.0

    def _launch(
        self, side: str, kernel: Any, length: int, heads: int, arguments: tuple[Any, ...], *, parts: int = 1,
        **flags: bool | int,
    ) -> None:  # fmt: skip
        tile = tile_of(self.setup, f"{self.name}, {side} side", self.call)
        rows = tile.rows // self.setup.heads_a_key if side == "query" else tile.keys
        tiles = ceil_div(length, rows) + (self.call.pattern.num_groups if self.far else 0)
        self.setup.launch(
            (self.name, side, *flags.values()), kernel, (tiles, heads, self.call.q.shape[0] * parts), arguments,
            lambda: {**self.flags, **flags, **self.setup.sizes, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys},
            warps=tile.warps, stages=tile.stages,
        )  # fmt: skip

    def _heads(self, part: Seed | Sorted | None) -> tuple[int, int]:
        return (0, self.call.k.shape[1]) if part is None else (part.first_head, part.kv_heads)

    def query_side(
        self, dq: Tensor, sums: Tensor | None, planned: tuple[Tensor, ...], sets: tuple[Tensor, Tensor],
        *, visit: int = 0, plain: bool = False, seed: Seed | None = None, copies: Sorted | None = None,
        into: Tensor | None = None,
    ) -> None:  # fmt: skip
        """planned: query slots, key slots, ranges, sink ranges, group starts. seed: cuDNN's dq. into: where far writes
        the sum with dq, if not there; its dtype is the same for all calls of one signature."""
        first, heads = self._heads(seed or copies)
        parts = (self.nothing, self.nothing) if seed is None else (seed.places, seed.out)
        (k, v), strides = (self.k, self.v), self.strides
        if copies is not None:
            k, v = copies.keys
            strides = (*strides[:3], *sorted_rows.strides(k), *sorted_rows.strides(v), *strides[9:])
        arguments = (
            self.q, k, v, self.grad, *self.rows, dq, dq if into is None else into,
            self.nothing if sums is None else sums,
            *planned, *sets, *parts, *strides, *self._lengths(first, heads * self.setup.heads_a_key, visit),
        )  # fmt: skip
        length, is_square = self.call.q.shape[2], seed is not None
        self._launch("query", query_side_kernel, length, heads, arguments, PLAIN=plain, SQUARE=is_square)

    def key_side(
        self, dk: Tensor, dv: Tensor, sums: Tensor | None, planned: tuple[Tensor, ...], sets: tuple[Tensor, Tensor],
        *, visit: int = 0, plain: bool = False, seed: Seed | None = None, seed_v: Tensor | None = None,
        copies: Sorted | None = None,
    ) -> None:  # fmt: skip
        """planned: query slots, key slots, seen by, sinks seen by, group starts, key entries. seed: cuDNN's dk."""
        first, heads = self._heads(seed or copies)
        parts = (self.nothing,) * 3 if seed is None else (seed.places, seed.out, seed_v)
        sinks = (self.nothing, self.nothing)
        if plain and self.flags["SINKS"]:
            sinks = self._sink_sums(first, heads, sets[0], square=seed is not None)
        (q, grad), rows, strides = (self.q, self.grad), self.rows, self.strides
        if copies is not None:
            (q, grad), rows = copies.queries, copies.rows
            strides = (*copies.row_strides(q), *strides[3:9], *copies.row_strides(grad))
        choices = self.call.key_groups.shape[-1] if self.far else 1
        cut = None if copies is None else copies.parts
        count, stretch = (1, 0) if cut is None else (cut.number, cut.stretch)
        atomic = choices > 1 and not torch.are_deterministic_algorithms_enabled()
        for turn in range(1 if atomic else choices):
            arguments = (
                q, self.k, self.v, grad, *rows, dk, dv, self.nothing if sums is None else sums,
                *planned, *sets, *parts, *sinks, *strides, *self._lengths(first, heads, visit), turn,
                count, stretch,
            )  # fmt: skip
            self._launch(
                "key", key_side_kernel, planned[1].shape[-1] if self.far else self.call.k.shape[2], heads, arguments,
                parts=count, PLAIN=plain, SQUARE=seed is not None, CHOICES=choices, ATOMIC=atomic, PARTS=count > 1,
            )  # fmt: skip

    def _sink_sums(self, first_head: int, heads: int, ids: Tensor, square: bool) -> tuple[Tensor, Tensor]:
        """dk and dv [B, heads, num_sinks, D] fp32 that the sinks get from queries beyond the window."""
        call, tile = self.call, tile_of(self.setup, "sinks", self.call)
        num_queries, num_keys, num_sinks = call.q.shape[2], call.k.shape[2], call.pattern.num_sinks
        stretches = ceil_div(num_queries, QUERIES_A_STRETCH)
        batch, blocks = call.q.shape[0], ceil_div(num_sinks, tile.keys)
        parts = [
            torch.empty(stretches, batch, heads, num_sinks, x.shape[-1], dtype=torch.float32, device=x.device)
            for x in (call.k, call.v)
        ]
        self.setup.launch(
            ("sinks", square), sink_kernel, (stretches, heads, batch * blocks),
            (
                self.q, self.k, self.v, self.grad, *self.rows, *parts, ids, *self.strides,
                num_queries, num_keys, call.k.shape[1], first_head, call.pattern.window, num_sinks,
                call.scale, call.softcap or 1.0, QUERIES_A_STRETCH,
            ),
            lambda: {"SQUARE": square, **self.setup.sizes, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys},
            warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
        return parts[0].sum(0), parts[1].sum(0)


def _backward(call: AttentionCall, setup: Setup, grad: Tensor, rows: Row) -> Gradients:
    device = call.q.device
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=device) for x in (call.q, call.k, call.v))
    near, nothing = _Pass(call, setup, grad, rows), rows.lse
    counted = triton_plan.serves(call)
    if counted:
        near.query_side(dq, None, (nothing,) * 5, (nothing, nothing), plain=True)
        near.key_side(dk, dv, None, (nothing,) * 6, (nothing, nothing), plain=True)
    else:
        query, key = places(call.tokens)
        plan = plan_near(query, key, call.pattern)
        band, sinks = (x.contiguous() for x in plan.ranges.split(2, 1))
        seen = [seen_by(x, call.k.shape[2]) for x in (band, sinks)]
        slots = plan.query_slots, plan.key_slots
        near.query_side(dq, None, (*slots, band, sinks, nothing), (nothing, nothing))
        near.key_side(dk, dv, None, (*slots, *seen, nothing, nothing), (nothing, nothing))
    total = Gradients(dq, dk, dv)
    gated = call.query_gate is not None and call.key_gate is not None
    if has_far_pairs(call):
        if counted:
            counted_plan = triton_plan.room_for_far(call, backward=True)
            triton_plan.plan_far(call, setup, counted_plan)
            far, met, _ = counted_plan
        else:
            far = plan_far(call, query, key)
            met = seen_by(far.ranges, far.key_slots.shape[-1])
        assert met is not None
        _far_backward(call, setup, grad, rows, far, met, total)
    elif gated:
        total.query_gate, total.key_gate = (_zeros(call, *x.shape) for x in (call.query_gate, call.key_gate))  # type: ignore[union-attr]
    total.q, total.k, total.v = (x.to(call.q.dtype) for x in (total.q, total.k, total.v))  # one dtype for all
    return total


def _far_backward(
    call: AttentionCall, setup: Setup, grad: Tensor, rows: Row, far: FarPlan, met: Tensor, total: Gradients
) -> None:
    batch, heads, num_queries, _ = call.q.shape
    kv_heads, query_k, entries = call.k.shape[1], call.query_groups.shape[3], far.key_slots.shape[-1]
    sets = set_bits(call) if can_meet_twice(call) else (rows.lse, rows.lse)
    by_query, by_key = _zeros(call, batch, heads, query_k, num_queries), _zeros(call, batch, kv_heads, query_k, entries)
    passes, slots = _Pass(call, setup, grad, rows, far), (far.query_slots, far.key_slots)
    # In a plain call every query has its visit, so that the only one can write all of dq as it is wanted.
    finish = triton_plan.serves(call) and query_k == 1 and call.q.dtype != torch.float32
    into = _like(call.q) if finish else total.q
    planned = (*slots, met, met, far.key_starts, far.key_entries)
    keys_into: tuple[Tensor, Tensor] | None = None
    for visit, copies in sorted_copies(call, setup, far, (passes.q, passes.grad), rows):
        queries = (*slots, far.ranges, far.ranges, far.group_starts)
        passes.query_side(total.q, by_query, queries, sets, visit=visit, copies=copies, into=into)
        if copies.parts is None:
            passes.key_side(total.k, total.v, by_key, planned, sets, visit=visit, copies=copies)
            continue
        passes.key_side(*copies.parts[2:], planned, sets, visit=visit, copies=copies)
        keys_into = keys_into or (_like(call.k), _like(call.v))
        keys = total.k, total.v
        to = keys_into if visit == query_k - 1 else keys
        add_parts(call, setup, far, copies, keys, to, by_key, met, visit)
    total.q = into
    if keys_into is not None:
        total.k, total.v = keys_into
    if call.query_gate is not None and call.key_gate is not None:
        total.query_gate, total.key_gate = _gate_grads(call, far.key_entries.long(), by_query, by_key)


def _square_backward(call: AttentionCall, setup: Setup, grad: Tensor, out: Tensor, lse: Tensor, rows: Row) -> Gradients:
    """The groups by cuDNN with the merged output and logsumexp, the rest by the near kernels."""
    grads = Gradients(*map(_like, (call.q, call.k, call.v)))
    near, nothing = _Pass(call, setup, grad, rows), rows.lse
    ids = call.key_groups
    for places_, first, step, (dq, dk, dv) in square.group_gradients(call, setup, grad, out, lse):
        near.query_side(
            grads.q, None, (nothing,) * 5, (ids, ids), plain=True, seed=Seed(places_, dq, nothing, first, step)
        )
        near.key_side(
            grads.k, grads.v, None, (nothing,) * 6, (ids, ids), plain=True,
            seed=Seed(places_, dk, nothing, first, step), seed_v=dv,
        )  # fmt: skip
    return grads


def _gate_grads(call: AttentionCall, key_entries: Tensor, by_query: Tensor, by_key: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over far pairs to gradients of the log assignments, [B, R, Tq, K] and [B, R, Tk, K]."""
    assert call.query_gate is not None and call.key_gate is not None
    routers = call.query_groups.shape[1]
    by_query = _sum_or_only(by_query.unflatten(1, (routers, -1)), 2).transpose(2, 3)  # [B, R, Tq, query_k]
    query_gate = torch.zeros(call.query_gate.shape, dtype=torch.float32, device=by_query.device)
    query_gate.scatter_add_(-1, call.query_groups, by_query)
    by_key = _sum_or_only(_sum_or_only(by_key, 2).unflatten(1, (routers, -1)), 2)  # [B, R, entries]
    ids, key_k = call.key_groups.flatten(2), call.key_groups.shape[-1]
    slots = key_entries if key_k == 1 else key_entries // key_k
    place = torch.add(ids.gather(-1, key_entries), slots, alpha=call.pattern.num_groups)
    key_gate = torch.zeros(call.key_gate.shape, dtype=torch.float32, device=by_key.device)
    key_gate.flatten(2).scatter_add_(-1, place, by_key)
    return query_gate, key_gate


def _sum_or_only(x: Tensor, dim: int) -> Tensor:
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _no_gradients(call: AttentionCall, sink_grad: Tensor | None) -> Gradients:
    """Of a call without queries, or whose queries see nothing."""
    gates = (None if x is None else _zeros(call, *x.shape) for x in (call.query_gate, call.key_gate))
    q, k, v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v))
    return Gradients(q, k, v, sink_grad, *gates)


def _zeros(call: AttentionCall, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=call.q.device)
