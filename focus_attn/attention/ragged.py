"""The visible pairs as ragged batches: what kernels for sequences of many lengths can run in a few calls.

    near   each document is a sequence, and its band a causal attention with a window
    far    the queries of a group in order meet prefixes of its keys in order. Sinks are the first keys of every group,
           or a group of their own that every query visits, where queries visit several.

A list's queries are cut into blocks. What a block's first query sees is seen by all of it, a sequence without a mask;
the keys that only later queries see are its edge. Blocks overlap in their keys, which a forward may and a backward may
not: there the blocks are the leaves of a binary tree, and in a level of it neither queries nor keys overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.plan import Line, lay_out
from focus_attn.visibility import memberships


@dataclass(frozen=True)
class Batch:
    """Sequences: queries `query_starts[i]:query_starts[i + 1]` on keys `key_starts[i]:key_starts[i + 1]`, int32.

    key_lengths: a sequence's keys are then so many from its start on, and may be those of others too.
    """

    query_starts: Tensor
    key_starts: Tensor
    longest_queries: int
    longest_keys: int
    key_lengths: Tensor | None = None
    window: int | None = None  # a causal attention, its last query with its last key, that looks back so far


MOST_SEQUENCES = 65_535  # of a batch: CUDA's limit on the second dimension of a grid


def split(batch: Batch) -> Iterator[tuple[Batch, slice, slice]]:
    """Batches of as many sequences as a kernel takes, each with its queries and its keys."""
    count = len(batch.query_starts) - 1
    if count <= MOST_SEQUENCES:
        yield batch, slice(None), slice(None)
        return
    for first in range(0, count, MOST_SEQUENCES):
        ends = slice(first, min(first + MOST_SEQUENCES, count) + 1)
        query_starts, key_starts, key_lengths = batch.query_starts[ends], batch.key_starts[ends], None
        queries, keys = (slice(int(x[0]), int(x[-1])) for x in (query_starts, key_starts))
        if batch.key_lengths is not None:  # any of the keys
            keys, key_lengths = slice(None), batch.key_lengths[ends.start : ends.stop - 1]
        starts = query_starts - queries.start, key_starts - (keys.start or 0)
        yield Batch(*starts, batch.longest_queries, batch.longest_keys, key_lengths, batch.window), queries, keys


class Band(NamedTuple):
    """The near pairs. Rows number the tokens of the whole batch; None: all of them in order."""

    batch: Batch
    queries: Tensor | None
    keys: Tensor | None


def band(call: AttentionCall) -> Band | None:
    """None where positions leave gaps or repeat, so that a document's band is none in its list of keys."""
    rows, num_queries, num_keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    window, sliding, device = call.pattern.window, call.pattern.sliding_window, call.q.device
    window = min(window if sliding is None else min(window, sliding - 1), num_keys)
    if call.tokens.plain:
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        return Band(Batch(starts * num_queries, starts * num_keys, num_queries, num_keys, window=window), None, None)
    query_counts, key_counts, queries, keys = [], [], [], []
    for row in range(rows):
        line = lay_out(call.tokens, row)
        documents, keys_in = (line.key_at - line.key_positions).unique_consecutive(return_counts=True)
        of_query = torch.searchsorted(documents, line.query_start)
        queries_in = torch.bincount(of_query, minlength=len(documents))
        if len(queries_in) > len(documents):  # a document that has queries and no key
            return None
        begins, ends = keys_in.cumsum(0) - keys_in, keys_in.cumsum(0)
        at = torch.arange(len(line.keys), device=device) - begins.repeat_interleave(keys_in)
        lasts = queries_in.cumsum(0).repeat_interleave(queries_in)
        stands = (ends - begins).repeat_interleave(queries_in) - lasts + torch.arange(len(lasts), device=device)
        starts_right = torch.equal(documents[of_query], line.query_start)
        if not (
            starts_right
            and torch.equal(at, line.key_positions)
            and torch.equal(stands, line.query_at - line.query_start)
        ):
            return None
        query_counts.append(queries_in)
        key_counts.append(keys_in)
        queries.append(line.queries + row * num_queries)
        keys.append(line.keys + row * num_keys)
    if sum(map(len, key_counts)) == 0:  # padding alone
        return None
    batch = _side_by_side(torch.cat(query_counts), torch.cat(key_counts), window)
    return Band(batch, torch.cat(queries), torch.cat(keys))


def _side_by_side(queries: Tensor, keys: Tensor, window: int | None = None) -> Batch:
    """Sequences of so many queries and keys, one after the other."""
    most_queries, most_keys = torch.stack([queries.max(), keys.max()]).tolist()
    query_starts, key_starts = (pad(counts.cumsum(0), (1, 0)).int() for counts in (queries, keys))
    return Batch(query_starts, key_starts, most_queries, most_keys, window=window)


@dataclass(frozen=True)
class Lists:
    """The far pairs, all lists end to end: entry i of the queries meets entries lo[i]:hi[i] of the keys.

    Rows number the tokens of every router of every sequence: (row * routers + router) * tokens + slot.
    """

    queries: Tensor  # [n] rows
    query_groups: Tensor  # [n]
    visits: Tensor  # [n] how many entries before this one have the same query
    lo: Tensor
    hi: Tensor
    keys: Tensor  # [m] rows
    key_groups: Tensor  # [m]
    sinks: Tensor  # [m] bool

    @property
    def num_visits(self) -> int:
        return int(self.visits.max()) + 1 if len(self.visits) else 0


def far_lists(call: AttentionCall) -> Lists | None:
    """None where no query stands far enough from the start. For calls in which a pair shares one group at most."""
    pattern = call.pattern
    if pattern.sliding_window is not None and pattern.sliding_window <= pattern.window + 1:
        return None
    if call.tokens.plain and call.k.shape[2] - 1 <= pattern.window:
        return None
    per_row = [_lists_of_row(call, row) for row in range(call.q.shape[0])]
    found, keys_before = [], 0
    for lists in per_row:
        if lists is not None:
            found.append((*lists[:3], lists[3] + keys_before, lists[4] + keys_before, *lists[5:]))
            keys_before += len(lists[5])
    return Lists(*(torch.cat(parts) for parts in zip(*found, strict=True))) if found else None


def _lists_of_row(call: AttentionCall, row: int) -> tuple[Tensor, ...] | None:
    """What `Lists` holds, in its order."""
    line, pattern = lay_out(call.tokens, row), call.pattern
    at, start = line.query_at, line.query_start
    if len(at) == 0 or len(line.keys) == 0:
        return None
    if not call.tokens.plain and int((at - start).max()) <= pattern.window:
        return None
    query_in, key_in, sinks = _members(call, line, row)
    of_query, of_key = (torch.stack(x.transpose(1, 2).nonzero(as_tuple=True)) for x in (query_in, key_in))
    (router, group, query), (key_router, key_group, key) = of_query, of_key
    lists, beyond = query_in.shape[2], int(torch.maximum(at.max(), line.key_at.max())) + 1
    place = (key_router * lists + key_group) * beyond + line.key_at[key]
    before = (router * lists + group) * beyond
    lo = torch.searchsorted(place, before + start[query])
    hi = torch.maximum(lo, torch.searchsorted(place, before + torch.maximum(start, at - pattern.window)[query]))
    several = call.query_groups.shape[-1] > 1
    visits = (query_in.cumsum(-1) - 1)[router, query, group] if several else torch.zeros_like(query)
    first_router = row * query_in.shape[0]
    queries = (first_router + router) * call.q.shape[2] + line.queries[query]
    keys = (first_router + key_router) * call.k.shape[2] + line.keys[key]
    return queries, group, visits, lo, hi, keys, key_group, sinks[key]


def _members(call: AttentionCall, line: Line, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which lists queries [R, nq, K] and keys [R, nk, K] are in, and which keys are sinks [nk]."""
    groups, sinks = call.pattern.num_groups, line.key_positions < call.pattern.num_sinks
    query_in = memberships(call.query_groups[row][:, line.queries], groups)
    key_in = memberships(call.key_groups[row][:, line.keys], groups)
    if call.query_groups.shape[-1] == 1:
        return query_in, key_in | sinks[:, None], sinks
    own = sinks[:, None].expand(len(key_in), -1, -1)
    return pad(query_in, (0, 1), value=True), torch.cat([key_in & ~own, own], -1), sinks


# Blocks of queries, and what becomes of them.


class Blocks(NamedTuple):
    """Queries start:stop; no block crosses into another list or document. `number` counts from the first of its own."""

    start: Tensor
    stop: Tensor
    number: Tensor


def cut(lists: Lists, size: int) -> Blocks:
    """Queries whose keys begin alike follow each other, and their prefixes only grow."""
    _, counts = lists.lo.unique_consecutive(return_counts=True)
    ends, per_run = counts.cumsum(0), (counts + size - 1) // size
    run = torch.arange(len(counts), device=counts.device).repeat_interleave(per_run)
    number = torch.arange(len(run), device=run.device) - (per_run.cumsum(0) - per_run)[run]
    start = (ends - counts)[run] + number * size
    return Blocks(start, torch.minimum(start + size, ends[run]), number)


def prefixes(lists: Lists, blocks: Blocks, size: int) -> Batch:
    """Every block on all that its first query sees."""
    first, last = lists.lo[blocks.start], lists.hi[blocks.start]
    starts = torch.cat([blocks.start, blocks.stop[-1:]]).int()
    return Batch(starts, pad(first, (0, 1)).int(), size, len(lists.keys), key_lengths=(last - first).int())


class Level(NamedTuple):
    """Some entries of the queries and of the keys, and the batch that they make."""

    queries: Tensor
    keys: Tensor
    batch: Batch


def levels(lists: Lists, blocks: Blocks) -> Iterator[Level]:
    """The same pairs in batches without an overlap.

    The right half of a node of the tree meets what its first query sees beyond the left half's first. What the first
    query of a run sees comes first, for the whole run.
    """
    opens = (blocks.number == 0).nonzero()[:, 0]
    end = torch.cat([opens[1:], opens.new_tensor([len(blocks.number)])])  # one past the last block of each run
    yield from _disjoint(lists, blocks.start[opens], blocks.stop[end - 1], lists.lo[blocks.start[opens]])
    run, highest, step = (blocks.number == 0).cumsum(0) - 1, int(blocks.number.max()), 1
    while step <= highest:
        right = (blocks.number % (2 * step) == step).nonzero()[:, 0]
        last = torch.minimum(right + step, end[run[right]]) - 1
        yield from _disjoint(lists, blocks.start[right], blocks.stop[last], lists.hi[blocks.start[right - step]])
        step *= 2


def _disjoint(lists: Lists, start: Tensor, stop: Tensor, first: Tensor) -> Iterator[Level]:
    """Queries start:stop on keys from `first` to the end of what the first of them sees; nothing without keys."""
    last = lists.hi[start]
    some = (last > first).nonzero()[:, 0]
    if len(some):
        start, stop, first, last = (x[some] for x in (start, stop, first, last))
        yield Level(_ranges(start, stop), _ranges(first, last), _side_by_side(stop - start, last - first))


def _ranges(first: Tensor, last: Tensor) -> Tensor:
    """All of first:last, one after the other."""
    counts = last - first
    begins = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum()), device=first.device) + (first - begins).repeat_interleave(counts)


class Edge(NamedTuple):
    """Some blocks, and of the keys that only a part of each sees at most `size`, padded."""

    queries: Tensor  # [U, S] entries; one past the last for padding
    keys: Tensor  # [U, E] entries; any for padding
    visible: Tensor  # [U, S, E]


def edges(lists: Lists, blocks: Blocks, size: int, at_once: int) -> Iterator[Edge]:
    """No query stands twice in one of them. at_once: blocks."""
    first, last = lists.hi[blocks.start], lists.hi[blocks.stop - 1]
    rows = torch.arange(int((blocks.stop - blocks.start).max()), device=first.device)
    columns, some = torch.arange(size, device=first.device), last > first
    while some.any():
        for part in some.nonzero()[:, 0].split(at_once):
            queries, keys = blocks.start[part, None] + rows, first[part, None] + columns
            real = queries < blocks.stop[part, None]
            sees = torch.where(real, lists.hi[queries.clamp_max(len(lists.queries) - 1)], 0)
            visible = keys[:, None, :] < sees[:, :, None]
            yield Edge(torch.where(real, queries, len(lists.queries)), keys.clamp_max(len(lists.keys) - 1), visible)
        first = first + size
        some = last > first
