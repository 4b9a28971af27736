"""The plan as tensors: the same ranges as `plan.py`, made on the device without asking it for a single value.

A place is one int64 that sorts by (group, segment, position); padding sorts last. Sorting places lays tokens out, and
a binary search of "my place minus the window" among the sorted keys is the end of a query's range. No shape depends on
the ids, so nothing waits for the device and the whole can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.visibility import Pattern, Tokens

GROUP = 1 << 52  # room for 2**20 segments of 2**32 positions in each of up to 2**10 groups
SEGMENT = 1 << 32
NOWHERE = 1 << 62


@dataclass(frozen=True)
class NearPlan:
    """Queries and keys of each row on a line; entry i of the line meets keys lo:hi and, as sinks, sink_lo:sink_hi."""

    query_slots: Tensor  # [B, Tq] int32, padding last
    key_slots: Tensor  # [B, Tk] int32
    ranges: Tensor  # [B, 4, Tq] int32: lo, hi, sink_lo, sink_hi


@dataclass(frozen=True)
class FarPlan:
    """Visits: query_k rounds, each with every query once, sorted by the group it visits in that round."""

    query_slots: Tensor  # [B, R, query_k, Tq] int32
    ranges: Tensor  # [B, R, query_k, 2, Tq] int32: lo, hi among the sorted keys
    group_starts: Tensor  # [B, R, query_k, K + 1] int32: where each group's visits begin
    key_slots: Tensor  # [B, R, Tk * key_k] int32: the keys' ids, each an entry, sorted by group
    key_starts: Tensor  # [B, R, K + 1] int32: where each group's entries begin
    key_entries: Tensor  # [B, R, Tk * key_k]: slot * key_k + which of the key's ids


def places(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(queries [B, Tq], keys [B, Tk]) as places in group 0."""
    query, key = tokens.query_positions, tokens.key_positions
    if tokens.query_segments is not None and tokens.key_segments is not None:
        # Any integers may name segments: their rank is what fits in the bits.
        ids, order = torch.cat([tokens.query_segments, tokens.key_segments], -1).sort(-1)
        rank = torch.zeros_like(ids)
        rank[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(-1)
        rank = torch.empty_like(rank).scatter_(-1, order, rank)
        query_start, key_start = (SEGMENT * rank).split([query.shape[-1], key.shape[-1]], -1)
        return torch.where(query >= 0, query + query_start, NOWHERE), torch.where(key >= 0, key + key_start, NOWHERE)
    return torch.where(query >= 0, query, NOWHERE), torch.where(key >= 0, key, NOWHERE)


def _floor(place: Tensor, pattern: Pattern) -> Tensor:
    """The first place that may be seen from `place`: its segment's start, or the sliding window's edge."""
    start = place // SEGMENT * SEGMENT
    if pattern.sliding_window is None:
        return start
    return torch.maximum(start, place - pattern.sliding_window + 1)


def plan_near(query: Tensor, key: Tensor, pattern: Pattern) -> NearPlan:
    query, query_slots = query.sort(-1)
    key, key_slots = key.sort(-1)
    floor = _floor(query, pattern)
    lo = torch.searchsorted(key, torch.maximum(floor, query - pattern.window))
    hi = torch.searchsorted(key, query, right=True)
    sink_lo = sink_hi = torch.zeros_like(lo)
    if pattern.num_sinks:
        sink_lo = torch.searchsorted(key, floor)
        sink_hi = torch.minimum(torch.searchsorted(key, query // SEGMENT * SEGMENT + pattern.num_sinks), lo)
    ranges = torch.stack([lo, torch.maximum(lo, hi), sink_lo, torch.maximum(sink_lo, sink_hi)], 1)
    # Padding stands last and sees nothing; at the far end, so that ranges never move back.
    ranges = torch.where((query < NOWHERE)[:, None], ranges, key.shape[-1])
    return NearPlan(query_slots.int(), key_slots.int(), ranges.int())


def plan_far(call: AttentionCall, query: Tensor, key: Tensor) -> FarPlan:
    pattern, groups = call.pattern, call.pattern.num_groups
    batch, routers, num_queries, query_k = call.query_groups.shape
    key_k = call.key_groups.shape[-1]

    in_group = key[:, None, :, None] + GROUP * call.key_groups
    hidden = _repeats(call.key_groups) | (key[:, None, :, None] >= NOWHERE)
    if pattern.num_sinks:  # sinks are near to everyone
        hidden |= (call.tokens.key_positions < pattern.num_sinks)[:, None, :, None]
    sorted_keys, order = torch.where(hidden, NOWHERE, in_group).flatten(2).sort(-1)
    key_slots = (order // key_k).int()

    visit = query[:, None, :, None] + GROUP * call.query_groups
    absent = _repeats(call.query_groups) | (query[:, None, :, None] >= NOWHERE)
    visits, query_slots = torch.where(absent, NOWHERE, visit).transpose(2, 3).contiguous().sort(-1)
    bounds = torch.stack([_floor(visits, pattern), visits - pattern.window], 3).flatten(2)
    ranges = torch.searchsorted(sorted_keys, bounds).view(batch, routers, query_k, 2, num_queries)
    lo, hi = ranges.unbind(3)
    ranges = torch.stack([lo, torch.maximum(lo, hi)], 3)
    ranges = torch.where((visits < NOWHERE)[:, :, :, None], ranges, sorted_keys.shape[-1])
    edges = torch.arange(groups + 1, device=query.device) * GROUP
    starts = torch.searchsorted(visits, edges.expand(batch, routers, query_k, -1).contiguous())
    key_starts = torch.searchsorted(sorted_keys, edges.expand(batch, routers, -1).contiguous())
    return FarPlan(query_slots.int(), ranges.int(), starts.int(), key_slots, key_starts.int(), order)


def seen_by(ranges: Tensor, num_keys: int) -> Tensor:
    """The same ranges from the keys' side: key j is met by entries first:last of the line.

    ranges [..., 2, Tq] (lo, hi) -> [..., 2, num_keys] (first, last), int32.
    """
    lo, hi = (x.contiguous() for x in ranges.unbind(-2))
    keys = torch.arange(num_keys, dtype=ranges.dtype, device=ranges.device).expand(*lo.shape[:-1], -1).contiguous()
    return torch.stack([torch.searchsorted(x, keys, right=True) for x in (hi, lo)], -2).int()


def _repeats(ids: Tensor) -> Tensor:
    """Where an id stood already in its row: ids are sets. [..., k] -> [..., k] bool."""
    k = ids.shape[-1]
    if k == 1:
        return torch.zeros_like(ids, dtype=torch.bool)
    earlier = torch.ones(k, k, dtype=torch.bool, device=ids.device).tril(-1)
    return ((ids[..., :, None] == ids[..., None, :]) & earlier).any(-1)
