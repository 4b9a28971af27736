"""The device plan of plain calls in two launches: a counting sort by group.

Where positions are slots and a key has one group, nothing needs sorting but small integers. `count` makes a histogram
of every block of tokens. `place` sums the histograms before its block, ranks its own tokens, and writes each to its
place; the same sums over the *other* side's histograms say how many of a group's keys lie before a query's window,
and which of a group's queries come after a key's. Everything is int32 and stays on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.cudnn import Jobs
from focus_attn.attention.device_plan import FarPlan
from focus_attn.attention.launch import Setup, ceil_div, power_of_2
from focus_attn.attention.tiles import real_address

MOST_GROUPS = 127  # a histogram row is kept in registers
COUNTS_AT_ONCE = 64
MOST_KEYS = 64  # in a tile of the near kernel
SHORT = 1 << 17  # tokens; small blocks keep more of the device busy, large ones have fewer histograms to sum


@triton.jit
def _ids(IDS, line, at, length, first, GROUPS: tl.constexpr, CHOICES: tl.constexpr, choice):
    """Group ids of slots `at`, GROUPS for those that are in none: outside, sinks, or an id the token named before."""
    inside = (at >= first) & (at < length)
    rows = IDS + (line * length + at) * CHOICES
    ids = tl.load(rows + choice, mask=inside, other=GROUPS).to(tl.int32)
    for earlier in tl.static_range(CHOICES - 1):
        again = tl.load(rows + earlier, mask=inside, other=-1).to(tl.int32)
        ids = tl.where((again == ids) & (tl.zeros_like(ids) + choice > earlier), GROUPS, ids)
    return tl.where(inside, ids, GROUPS)


@triton.jit
def _one_hot(ids, WIDTH: tl.constexpr):
    return (ids[:, None] == tl.arange(0, WIDTH)[None, :]).to(tl.int32)


@triton.jit
def _sum_counts(COUNTS, block, blocks, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """(counts of the blocks before `block`, counts of all), each [WIDTH]."""
    before, total = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    group = tl.arange(0, WIDTH)
    for start in range(0, blocks, CHUNK):
        at = start + tl.arange(0, CHUNK)
        counts = tl.load(COUNTS + at[:, None] * WIDTH + group[None, :], mask=(at < blocks)[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((at < block)[:, None], counts, 0), 0)
    return before, total


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_sinks", "blocks"])
def _count_kernel(
    QUERY_IDS, KEY_IDS, COUNTS, num_queries, num_keys, num_sinks, blocks,
    GROUPS: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BY_TABLE: tl.constexpr,
):  # fmt: skip
    """Program (block, side, line): side 0 is the keys', side 1 + c that of the queries' choice c."""
    block, side, line = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    QUERY_IDS, KEY_IDS = real_address(QUERY_IDS, BY_TABLE), real_address(KEY_IDS, BY_TABLE)
    at = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.full([BLOCK], GROUPS, tl.int32)
    if side == 0:
        ids = _ids(KEY_IDS, line, at, num_keys, num_sinks, GROUPS, 1, 0)
    else:
        ids = _ids(QUERY_IDS, line, at, num_queries, 0, GROUPS, CHOICES, side - 1)
    counts = tl.sum(_one_hot(ids, WIDTH), 0)
    # Slots beyond the end fell into the group of those that are in none; they are no tokens.
    length = tl.where(side == 0, num_keys, num_queries)
    beyond = tl.minimum(tl.maximum(block * BLOCK + BLOCK - length, 0), BLOCK)
    group = tl.arange(0, WIDTH)
    counts -= tl.where(group == GROUPS, beyond, 0)
    tl.store(COUNTS + ((line * (CHOICES + 1) + side) * blocks + block) * WIDTH + group, counts)


@triton.jit(
    do_not_specialize=[
        *("num_queries", "num_keys", "num_sinks", "blocks", "window"),
        *("query_unit", "key_unit", "lse_unit", "small_ids_line"),
    ]
)
def _place_kernel(
    QUERY_IDS, KEY_IDS, COUNTS, QUERY_SLOTS, RANGES, STARTS, KEY_SLOTS, KEY_STARTS, SEEN_BY,
    PLACES, SMALL_IDS, LENGTHS, OFFSETS,
    num_queries, num_keys, num_sinks, blocks, window, query_unit, key_unit, lse_unit, small_ids_line,
    GROUPS: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    SQUARE: tl.constexpr, BACKWARD: tl.constexpr, BY_TABLE: tl.constexpr,
):  # fmt: skip
    """Program (block, side, line). Sides: the queries' choices, then the keys, once for each choice in the backward.

    SQUARE: only the keys' side; PLACES is the inverse order, SMALL_IDS are the ids in 32 bits, LENGTHS and OFFSETS are
    the groups as cuDNN wants them.
    """
    block, side, line = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    QUERY_IDS, KEY_IDS = real_address(QUERY_IDS, BY_TABLE), real_address(KEY_IDS, BY_TABLE)
    if SQUARE:
        side += CHOICES
    is_query = side < CHOICES
    choice = side % CHOICES
    group, i = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    at = block * BLOCK + i
    # Mine and the other side's ids, lengths, histograms; keys of the same place stand at `at + shift`.
    ids, length, mine, other = tl.full([BLOCK], GROUPS, tl.int32), num_keys, 0, choice + 1
    shift = num_queries - num_keys + window + 1
    if is_query:
        ids = _ids(QUERY_IDS, line, at, num_queries, 0, GROUPS, CHOICES, choice)
        length, mine, other, shift = num_queries, choice + 1, 0, num_keys - num_queries - window
    else:
        ids = _ids(KEY_IDS, line, at, num_keys, num_sinks, GROUPS, 1, 0)
    counts = COUNTS + line * (CHOICES + 1) * blocks * WIDTH
    before, total = _sum_counts(counts + mine * blocks * WIDTH, block, blocks, WIDTH, CHUNK)
    starts = tl.cumsum(total, 0) - total
    hot = _one_hot(ids, WIDTH)
    rank = tl.cumsum(hot, 0) - hot
    place = tl.sum(hot * (rank + (starts + before)[None, :]), 1)
    live = at < length
    if SQUARE:
        tl.store(KEY_SLOTS + line * num_keys + place, at, mask=live)
        tl.store(PLACES + line * num_keys + at, place, mask=live)
        tl.store(SMALL_IDS + line * small_ids_line + at, ids, mask=live)
        if block == 0:
            job = line * GROUPS + group
            held, jobs = group < GROUPS, tl.num_programs(2) * GROUPS
            start = (line * num_keys + starts).to(tl.int64)
            tl.store(LENGTHS + job, total, mask=held)
            tl.store(OFFSETS + job, start * query_unit, mask=held)
            tl.store(OFFSETS + jobs + 1 + job, start * key_unit, mask=held)
            tl.store(OFFSETS + 2 * (jobs + 1) + job, start * lse_unit, mask=held)
            end = (tl.num_programs(2) * num_keys).to(tl.int64)
            tl.store(OFFSETS + jobs, end * query_unit)
            tl.store(OFFSETS + jobs + 1 + jobs, end * key_unit)
            tl.store(OFFSETS + 2 * (jobs + 1) + jobs, end * lse_unit)
        return

    # How many of the other side's tokens of my group stand before at + shift.
    edge = tl.maximum(block * BLOCK + shift, 0)
    edge_block = edge // BLOCK
    other_before, other_total = _sum_counts(counts + other * blocks * WIDTH, edge_block, blocks, WIDTH, CHUNK)
    begun, passed = edge_block * BLOCK + i, block * BLOCK + shift + i
    begun = tl.where(begun < edge, begun, -1)  # outside is in no group
    if is_query:
        begun_ids = _ids(KEY_IDS, line, begun, num_keys, num_sinks, GROUPS, 1, 0)
        passed_ids = _ids(KEY_IDS, line, passed, num_keys, num_sinks, GROUPS, 1, 0)
    else:
        begun_ids = _ids(QUERY_IDS, line, begun, num_queries, 0, GROUPS, CHOICES, choice)
        passed_ids = _ids(QUERY_IDS, line, passed, num_queries, 0, GROUPS, CHOICES, choice)
    passed_hot = _one_hot(passed_ids, WIDTH)
    rank = tl.cumsum(passed_hot, 0) - passed_hot + (other_before + tl.sum(_one_hot(begun_ids, WIDTH), 0))[None, :]
    other_starts = tl.cumsum(other_total, 0) - other_total
    low = tl.sum(hot * other_starts[None, :], 1)
    high = tl.sum(hot * (other_starts + other_total)[None, :], 1)
    middle = low + tl.sum(hot * rank, 1)
    nothing = ids == GROUPS
    if is_query:
        row = (line * CHOICES + choice) * num_queries
        tl.store(QUERY_SLOTS + row + place, at, mask=live)
        tl.store(RANGES + 2 * row + place, tl.where(nothing, num_keys, low), mask=live)
        tl.store(RANGES + 2 * row + num_queries + place, tl.where(nothing, num_keys, middle), mask=live)
        if block == 0:
            tl.store(STARTS + (line * CHOICES + choice) * (GROUPS + 1) + group, starts, mask=group <= GROUPS)
    else:
        row = (line * CHOICES + choice) * num_keys
        if choice == 0:
            tl.store(KEY_SLOTS + line * num_keys + place, at, mask=live)
            if block == 0:
                tl.store(KEY_STARTS + line * (GROUPS + 1) + group, starts, mask=group <= GROUPS)
        if BACKWARD:
            tl.store(SEEN_BY + 2 * row + place, tl.where(nothing, num_queries, middle), mask=live)
            tl.store(SEEN_BY + 2 * row + num_keys + place, tl.where(nothing, num_queries, high), mask=live)


def serves(call: AttentionCall) -> bool:
    """Whether this planner can plan the call; `device_plan.py` plans any."""
    pattern = call.pattern
    return (
        call.tokens.plain
        and call.key_groups.shape[-1] == 1
        and pattern.sliding_window is None
        and pattern.num_groups <= MOST_GROUPS
    )


class CountedPlan(NamedTuple):
    """A far plan, and what it is made from."""

    far: FarPlan
    seen_by: Tensor | None  # [B, R, query_k, 2, Tk] int32: for a backward, the ranges from the keys' side
    counts: Tensor  # the histograms it is made from


def room_for_far(call: AttentionCall, backward: bool = False) -> CountedPlan:
    """A plan that is still to be made."""
    batch, routers, num_queries, choices = call.query_groups.shape
    num_keys, groups = call.k.shape[2], call.pattern.num_groups

    def room(*shape: int) -> Tensor:
        return torch.empty(batch, routers, *shape, dtype=torch.int32, device=call.q.device)

    key_slots = room(num_keys)
    far = FarPlan(
        query_slots=room(choices, num_queries),
        ranges=room(choices, 2, num_queries),
        group_starts=room(choices, groups + 1),
        key_slots=key_slots,
        key_starts=room(groups + 1),
        key_entries=key_slots,
    )
    seen_by = room(choices, 2, num_keys) if backward else None
    return CountedPlan(far, seen_by, _room_for_counts(call, *_sizes(call)))


def plan_far(call: AttentionCall, setup: Setup, plan: CountedPlan) -> None:
    """Fills `plan`."""
    batch, routers, num_queries, choices = call.query_groups.shape
    far, seen_by, counts = plan
    backward, slots = seen_by is not None, far.key_slots
    query_ids, key_ids = call.query_groups, call.key_groups
    sizes, blocks = _sizes(call)
    _count(call, setup, sizes, blocks, query_ids, key_ids, counts, call.pattern.num_sinks)
    setup.launch(
        ("place", backward), _place_kernel, (blocks, choices + (choices if backward else 1), batch * routers),
        (
            query_ids, key_ids, counts,
            far.query_slots, far.ranges, far.group_starts, slots, far.key_starts, slots if seen_by is None else seen_by,
            slots, slots, slots, slots,
            num_queries, call.k.shape[2], call.pattern.num_sinks, blocks, call.pattern.window, 0, 0, 0, 0,
        ),
        lambda: {**sizes, "CHUNK": COUNTS_AT_ONCE, "SQUARE": False, "BACKWARD": backward},
    )  # fmt: skip


class SquarePlan(NamedTuple):
    """Tokens sorted by their one group, for keys and queries alike. R = 1."""

    slots: Tensor  # [B, 1, T] int32: which token stands at each place
    places: Tensor  # [B, 1, T] int32: where each token stands
    ids: Tensor  # [B, T and some more] int32
    jobs: Jobs  # the groups of all rows one after the other
    counts: Tensor  # the histograms it is made from


def room_for_square(call: AttentionCall) -> SquarePlan:
    """A plan that is still to be made."""
    batch, num_keys, groups, device = call.k.shape[0], call.k.shape[2], call.pattern.num_groups, call.q.device
    slots = torch.empty(batch, 1, num_keys, dtype=torch.int32, device=device)
    places = torch.empty(batch, 1, num_keys, dtype=torch.int32, device=device)
    # The near kernel reads whole tiles of ids, and one tile ahead.
    ids = torch.empty(batch, MOST_KEYS * (num_keys // MOST_KEYS + 3), dtype=torch.int32, device=device)
    lengths = torch.empty(batch * groups, dtype=torch.int32, device=device)
    offsets = torch.empty(3, batch * groups + 1, dtype=torch.int64, device=device)
    return SquarePlan(slots, places, ids, Jobs(lengths, lengths, offsets), _room_for_counts(call, *_sizes(call)))


def plan_square(call: AttentionCall, setup: Setup, plan: SquarePlan, heads: int, kv_heads: int) -> None:
    """Fills `plan`. heads, kv_heads: of the sorted copies that the groups' offsets are for."""
    batch, num_keys, ids, width = call.k.shape[0], call.k.shape[2], call.key_groups, call.q.shape[-1]
    slots, places, small_ids, (lengths, _, offsets), counts = plan
    sizes, blocks = _sizes(call)
    _count(call, setup, sizes, blocks, ids, ids, counts, num_sinks=0)
    setup.launch(
        "place square", _place_kernel, (blocks, 1, batch),
        (
            ids, ids, counts, slots, slots, slots, slots, slots, slots, places, small_ids, lengths, offsets,
            num_keys, num_keys, 0, blocks, call.pattern.window, heads * width, kv_heads * width, heads,
            small_ids.stride(0),
        ),
        lambda: {**sizes, "CHUNK": COUNTS_AT_ONCE, "SQUARE": True, "BACKWARD": False},
    )  # fmt: skip


def _sizes(call: AttentionCall) -> tuple[dict[str, int], int]:
    """The constants that both kernels share, and blocks of tokens."""
    longest, width = max(call.q.shape[2], call.k.shape[2]), power_of_2(call.pattern.num_groups + 1)
    block = 256 if longest <= SHORT else max(128, min(1024, 16384 // width))
    choices = call.query_groups.shape[-1]
    sizes = {"GROUPS": call.pattern.num_groups, "CHOICES": choices, "WIDTH": width, "BLOCK": block}
    return sizes, ceil_div(longest, block)


def _room_for_counts(call: AttentionCall, sizes: dict[str, int], blocks: int) -> Tensor:
    lines = call.q.shape[0] * call.query_groups.shape[1]
    return torch.empty(lines, sizes["CHOICES"] + 1, blocks, sizes["WIDTH"], dtype=torch.int32, device=call.q.device)


def _count(
    call: AttentionCall, setup: Setup, sizes: dict[str, int], blocks: int,
    query_ids: Tensor, key_ids: Tensor, counts: Tensor, num_sinks: int,
) -> None:  # fmt: skip
    setup.launch(
        "count", _count_kernel, (blocks, counts.shape[1], counts.shape[0]),
        (query_ids, key_ids, counts, call.q.shape[2], call.k.shape[2], num_sinks, blocks), lambda: sizes,
    )  # fmt: skip
