"""The visible pairs as ranges: who meets whom, without a mask.

Lay a row's real tokens on a line, sorted by (segment, position). Then every part of the predicate is a *range* of some
list of keys, and the ends of the ranges never move back from one query to the next:

    near   keys within the window                   a band over all keys
    sinks  the first tokens, outside the window     a short prefix of the sink keys
    far    keys that share a group, outside the window, not sinks: a prefix of the group's keys

The three are disjoint, so their softmax parts merge exactly. Queries are classed by their whole set of ids, and a class
meets the keys whose set meets its own: a pair that shares two groups still appears once.

`published` instead gives the split of the paper for one shared id a token and no sinks: a standard causal attention in
each group, and a band from which pairs of one group are taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from focus_attn.visibility import Pattern, Tokens, far_run, memberships


@dataclass(frozen=True)
class Branch:
    """Query `queries[i]` meets keys `keys[lo[i]:hi[i]]`; lo and hi never fall. Lists of slots of one batch row."""

    queries: Tensor | None  # [nq] slots; None: all of them, in order
    keys: Tensor | None  # [nk] slots; None: all of them, in order
    lo: Tensor  # [nq]
    hi: Tensor  # [nq]
    kind: Literal["near", "sinks", "far"]
    router: int | None = None  # whose heads; None: all heads
    groups: Tensor | None = None  # far: the ids of this class, [query_k]
    causal: bool = False  # published: query i meets keys[: i + 1]
    apart: tuple[Tensor, Tensor] | None = None  # published: ids of queries and keys; equal ones do not meet here


@dataclass(frozen=True)
class Line:
    """The real tokens of one batch row in order. `*_at` is the place on the line, `*_start` that of position 0."""

    queries: Tensor
    query_at: Tensor
    query_start: Tensor
    keys: Tensor
    key_at: Tensor
    key_positions: Tensor
    straight: tuple[bool, bool]  # whether queries and keys are simply all slots in order


def lay_out(tokens: Tokens, row: int) -> Line:
    if tokens.plain:
        return _plain_line(tokens)
    query_positions, key_positions = tokens.query_positions[row], tokens.key_positions[row]
    queries, keys = (query_positions >= 0).nonzero()[:, 0], (key_positions >= 0).nonzero()[:, 0]
    query_positions, key_positions = query_positions[queries], key_positions[keys]
    if tokens.query_segments is None or tokens.key_segments is None:
        query_start, key_start = torch.zeros_like(query_positions), torch.zeros_like(key_positions)
    else:
        segments = torch.cat([tokens.query_segments[row][queries], tokens.key_segments[row][keys]])
        number = segments.unique(return_inverse=True)[1]
        longest = torch.cat([query_positions, key_positions, query_positions.new_zeros(1)]).max() + 1
        query_start, key_start = (number * longest).split([len(queries), len(keys)])
    query_at, query_order = (query_positions + query_start).sort(stable=True)
    key_at, key_order = (key_positions + key_start).sort(stable=True)
    queries, keys = queries[query_order], keys[key_order]
    straight = _is_straight(queries, tokens.query_positions), _is_straight(keys, tokens.key_positions)
    return Line(queries, query_at, query_start[query_order], keys, key_at, key_positions[key_order], straight)


def _plain_line(tokens: Tokens) -> Line:
    """The same without a look at values, which a GPU would wait for."""
    (num_queries, num_keys), device = (x.shape[-1] for x in tokens[:2]), tokens.key_positions.device
    keys = torch.arange(num_keys, device=device)
    queries, query_at = keys[:num_queries], keys[num_keys - num_queries :]
    return Line(queries, query_at, torch.zeros_like(queries), keys, keys, keys, (True, True))


def _is_straight(slots: Tensor, positions: Tensor) -> bool:
    return len(slots) == positions.shape[-1] and torch.equal(slots, torch.arange(len(slots), device=slots.device))


def branches(
    query_groups: Tensor,
    key_groups: Tensor,
    tokens: Tokens,
    pattern: Pattern,
    row: int,
    published: bool = False,
) -> Iterator[Branch]:
    """All visible pairs of one batch row, each in exactly one branch. The near branch comes first."""
    line = lay_out(tokens, row)
    if len(line.queries) == 0 or len(line.keys) == 0:
        return
    query_groups, key_groups = query_groups[row][:, line.queries], key_groups[row][:, line.keys]
    if published:
        yield from _published(query_groups[..., 0], key_groups[..., 0], line, pattern)
        return
    yield _near(line, pattern)
    if int((line.query_at - line.query_start).max()) <= pattern.window:  # no query stands far enough from the start
        return
    sinks = line.key_positions < pattern.num_sinks
    if pattern.num_sinks:
        yield from _sinks(line, pattern, sinks)
    for router in range(query_groups.shape[0]):
        yield from _far(query_groups[router], key_groups[router], line, pattern, sinks, router)


def _floor(line: Line, pattern: Pattern, at: Tensor, start: Tensor) -> Tensor:
    """The first place a query may look at: its segment's start, or the sliding window's edge."""
    if pattern.sliding_window is None:
        return start
    return torch.maximum(start, at - pattern.sliding_window + 1)


def _near(line: Line, pattern: Pattern) -> Branch:
    first = torch.maximum(_floor(line, pattern, line.query_at, line.query_start), line.query_at - pattern.window)
    lo = torch.searchsorted(line.key_at, first)
    hi = torch.searchsorted(line.key_at, line.query_at, right=True)
    queries, keys = (None if line.straight[i] else x for i, x in enumerate((line.queries, line.keys)))
    return Branch(queries, keys, lo, torch.maximum(lo, hi), "near")


def _sinks(line: Line, pattern: Pattern, sinks: Tensor) -> Iterator[Branch]:
    keys, key_at = line.keys[sinks], line.key_at[sinks]
    first = _floor(line, pattern, line.query_at, line.query_start)
    last = torch.minimum(line.query_start + pattern.num_sinks, line.query_at - pattern.window)
    lo, hi = torch.searchsorted(key_at, first), torch.searchsorted(key_at, last)
    yield Branch(None if line.straight[0] else line.queries, keys, lo, torch.maximum(lo, hi), "sinks")


def _far(
    query_groups: Tensor, key_groups: Tensor, line: Line, pattern: Pattern, sinks: Tensor, router: int
) -> Iterator[Branch]:
    key_members = memberships(key_groups, pattern.num_groups)
    key_members[sinks] = False
    classes, of_query = _classes(query_groups)
    order = of_query.argsort(stable=True)
    counts = torch.bincount(of_query, minlength=len(classes)).tolist()
    for groups, chosen in zip(classes, order.split(counts), strict=True):
        keys = key_members[:, groups].any(-1).nonzero()[:, 0]
        if len(chosen) == 0 or len(keys) == 0:
            continue
        at, start, key_at = line.query_at[chosen], line.query_start[chosen], line.key_at[keys]
        lo = torch.searchsorted(key_at, _floor(line, pattern, at, start))
        hi = torch.maximum(lo, torch.searchsorted(key_at, at - pattern.window))
        reach = hi > lo
        if reach.any():
            yield Branch(line.queries[chosen], line.keys[keys], lo, hi, "far", router, groups)


def _classes(query_groups: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct id sets, [C, query_k], and which of them each query has, [nq]."""
    if query_groups.shape[-1] == 1:
        classes, of_query = query_groups[:, 0].unique(return_inverse=True)
        return classes[:, None], of_query
    ids = query_groups.sort(-1).values
    # Ids are sets: a repeated id becomes a copy of the smallest one, so equal sets are equal rows.
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    ids = torch.where(repeated, ids[:, :1], ids).sort(-1).values
    return ids.unique(dim=0, return_inverse=True)


def _published(query_ids: Tensor, key_ids: Tensor, line: Line, pattern: Pattern) -> Iterator[Branch]:
    near = _near(line, pattern)
    for router in range(query_ids.shape[0]):
        ids = query_ids[router]
        yield Branch(near.queries, near.keys, near.lo, near.hi, "near", router, apart=(ids, key_ids[router]))
        order = ids.argsort(stable=True)
        for chosen in order.split(torch.bincount(ids, minlength=pattern.num_groups).tolist()):
            if len(chosen):
                lo = torch.zeros_like(chosen)
                hi = torch.arange(1, len(chosen) + 1, device=chosen.device)
                yield Branch(line.queries[chosen], line.keys[chosen], lo, hi, "far", router, causal=True)


def count_pairs(query_groups: Tensor, key_groups: Tensor, tokens: Tokens, pattern: Pattern) -> Tensor:
    """How many pairs each router keeps, [B, R] int64: `visibility.count_visible_pairs` without its n² steps."""
    if tokens.plain and min(query_groups.shape[-1], key_groups.shape[-1]) == 1:
        return _count_plain(query_groups, key_groups, pattern)
    total = torch.zeros(query_groups.shape[:2], dtype=torch.int64, device=query_groups.device)
    for row in range(total.shape[0]):
        for branch in branches(query_groups, key_groups, tokens, pattern, row):
            heads = slice(None) if branch.router is None else slice(branch.router, branch.router + 1)
            total[row, heads] += (branch.hi - branch.lo).sum()
    return total


def _count_plain(query_groups: Tensor, key_groups: Tensor, pattern: Pattern) -> Tensor:
    """The same for one sequence a row and pairs that share at most one group, without a wait for the device: the far
    keys of a query are a run of slots, and running sums say how many of them are in each group."""
    slots = key_groups.shape[2]
    position = torch.arange(slots - query_groups.shape[2], slots, device=query_groups.device)
    first, last, near = far_run(position, pattern)
    first, last = first.clamp_max(slots), last.clamp_max(slots)  # more sinks than slots
    members = memberships(key_groups, pattern.num_groups).int().cumsum(2)
    members = torch.nn.functional.pad(members, (0, 0, 1, 0))  # of the keys before a slot
    far = members.index_select(2, last) - members.index_select(2, first)
    return near.sum() + (far * memberships(query_groups, pattern.num_groups)).sum((2, 3))
