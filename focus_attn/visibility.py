"""The one predicate: which key a query may see. Oracle, backends, training, decoding and reports all mean this.

    visible(i, j) = same_segment(i, j) and pos_j <= pos_i
                    and ( pos_i - pos_j <= window  or  pos_j < num_sinks  or  query_groups(i) & key_groups(j) != {} )
                    and ( sliding_window is None  or  pos_i - pos_j < sliding_window )

Positions count the real tokens of a sequence; padding and unwritten cache slots have position -1 and neither see nor
are seen. Group ids are sets: a repeated id counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

EVERYTHING = 1 << 30  # a window that no distance reaches


@dataclass(frozen=True)
class Pattern:
    """The sizes in the predicate."""

    num_groups: int
    window: int
    num_sinks: int = 0
    sliding_window: int | None = None


class Tokens(NamedTuple):
    """Where queries and keys stand. Positions and segments are integers; segments are None when there is one.

    plain: known, without a look at the values, to be one sequence a row without padding: a key's position is its slot,
    and the queries are the last of the slots.
    """

    query_positions: Tensor  # [B, Tq], -1 = padding
    key_positions: Tensor  # [B, Tk], -1 = padding or an unwritten cache slot
    query_segments: Tensor | None = None  # [B, Tq]
    key_segments: Tensor | None = None  # [B, Tk]
    plain: bool = False

    def queries(self, start: int, stop: int) -> Tokens:
        """The same keys, a slice of the queries."""
        segments = None if self.query_segments is None else self.query_segments[:, start:stop]
        positions = self.query_positions[:, start:stop]
        return self._replace(query_positions=positions, query_segments=segments, plain=False)

    def keys(self, stop: int) -> Tokens:
        """The same queries, the first keys."""
        segments = None if self.key_segments is None else self.key_segments[:, :stop]
        return self._replace(key_positions=self.key_positions[:, :stop], key_segments=segments, plain=False)


def count_positions(real: Tensor, segments: Tensor | None = None) -> Tensor:
    """Position of every real token inside its segment, -1 for padding. real [B, T] bool -> [B, T] int64."""
    if segments is None:
        return torch.where(real, real.cumsum(-1) - 1, -1)
    # Rank inside equal segment ids: sort stably by segment, count along, take off the count at the segment's start.
    order = segments.argsort(dim=-1, stable=True)
    real_sorted, segments_sorted = real.gather(-1, order), segments.gather(-1, order)
    before = real_sorted.cumsum(-1) - real_sorted.long()
    starts = torch.ones_like(real_sorted)
    starts[:, 1:] = segments_sorted[:, 1:] != segments_sorted[:, :-1]
    rank = before - torch.where(starts, before, 0).cummax(-1).values
    positions = torch.empty_like(rank).scatter_(-1, order, rank)
    return torch.where(real, positions, -1)


def memberships(groups: Tensor, num_groups: int) -> Tensor:
    """Ids as sets: [..., k] int -> [..., K] bool."""
    one_hot = torch.zeros(*groups.shape[:-1], num_groups, dtype=torch.bool, device=groups.device)
    return one_hot.scatter_(-1, groups.long(), True)


def shares_group(query_groups: Tensor, key_groups: Tensor, num_groups: int) -> Tensor:
    """[B, R, Tq, qk], [B, R, Tk, kk] -> [B, R, Tq, Tk] bool."""
    query, key = memberships(query_groups, num_groups), memberships(key_groups, num_groups)
    return (query.float() @ key.float().transpose(-1, -2)) > 0


def near_and_reachable(tokens: Tokens, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """The part of the predicate that knows no groups: (always visible, could be visible), both [B, 1, Tq, Tk] bool."""
    query, key = tokens.query_positions[:, None, :, None], tokens.key_positions[:, None, None, :]
    reachable = (key >= 0) & (key <= query)
    if tokens.query_segments is not None and tokens.key_segments is not None:
        reachable &= tokens.query_segments[:, None, :, None] == tokens.key_segments[:, None, None, :]
    if pattern.sliding_window is not None:
        reachable &= query - key < pattern.sliding_window
    near = reachable & ((query - key <= pattern.window) | (key < pattern.num_sinks))
    return near, reachable


class FarRun(NamedTuple):
    """By query: of its document's keys, those from `first` to before `last` are seen by group alone; `near` of the
    others are always seen. All of the shape of the positions."""

    first: Tensor
    last: Tensor
    near: Tensor


def far_run(positions: Tensor, pattern: Pattern) -> FarRun:
    """The same by position, for documents whose keys stand side by side."""
    sliding = pattern.sliding_window
    slid_to = torch.zeros_like(positions) if sliding is None else (positions - sliding + 1).clamp_min(0)
    first = slid_to.clamp_min(pattern.num_sinks)
    last = torch.maximum(first, positions - pattern.window)
    return FarRun(first, last, positions - slid_to + 1 - (last - first))


def visible_mask(query_groups: Tensor, key_groups: Tensor, tokens: Tokens, pattern: Pattern) -> Tensor:
    """The predicate as a dense mask, [B, R, Tq, Tk] bool. O(n²) memory: for the oracle and for short texts."""
    near, reachable = near_and_reachable(tokens, pattern)
    return near | (reachable & shares_group(query_groups, key_groups, pattern.num_groups))


def distant_mask(query_groups: Tensor, key_groups: Tensor, tokens: Tokens, pattern: Pattern) -> Tensor:
    """The visible pairs that only a shared group makes visible, [B, R, Tq, Tk] bool: what routing decides."""
    near, reachable = near_and_reachable(tokens, pattern)
    return reachable & ~near & shares_group(query_groups, key_groups, pattern.num_groups)


def _query_chunks(tokens: Tokens, elements: int = 1 << 24) -> Iterator[tuple[int, int]]:
    queries, keys = tokens.query_positions.shape[-1], tokens.key_positions.shape[-1]
    step = max(1, elements // max(1, keys))
    for start in range(0, queries, step):
        yield start, min(start + step, queries)


def count_visible_pairs(query_groups: Tensor, key_groups: Tensor, tokens: Tokens, pattern: Pattern) -> Tensor:
    """How many pairs each router keeps, [B, R] int64, in memory linear in n."""
    total = torch.zeros(query_groups.shape[:2], dtype=torch.int64, device=query_groups.device)
    for start, stop in _query_chunks(tokens):
        mask = visible_mask(query_groups[:, :, start:stop], key_groups, tokens.queries(start, stop), pattern)
        total += mask.sum((-2, -1))
    return total


def count_causal_pairs(tokens: Tokens) -> Tensor:
    """How many pairs full causal attention has, [B] int64."""
    total = torch.zeros(tokens.query_positions.shape[0], dtype=torch.int64, device=tokens.query_positions.device)
    everything = Pattern(num_groups=1, window=0)
    for start, stop in _query_chunks(tokens):
        _, reachable = near_and_reachable(tokens.queries(start, stop), everything)
        total += reachable.sum((-3, -2, -1))
    return total


def covered_mass(attention: Tensor, visible: Tensor) -> Tensor:
    """Fraction of each query's attention that falls on visible keys.

    attention [B, H, Tq, Tk] (rows need not be normalised), visible [B, R, Tq, Tk] with R = 1 or a divisor of H.
    Returns [B, H, Tq]; a query with no attention at all gives 0.
    """
    heads, routers = attention.shape[1], visible.shape[1]
    if heads % routers:
        raise ValueError(f"`attention` has {heads} heads, which {routers} routers of `visible` do not divide")
    visible = visible.repeat_interleave(heads // routers, dim=1)
    kept = (attention * visible).sum(-1)
    return kept / attention.sum(-1).clamp_min(torch.finfo(attention.dtype).tiny)
