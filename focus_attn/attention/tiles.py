"""What the kernels share: where tensors lie, which rows a tile has, and how they are loaded."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["a", "b", "c", "d", "e", "f", "g"])
def fill_table_kernel(TABLE, a: tl.int64, b: tl.int64, c: tl.int64, d: tl.int64, e: tl.int64, f: tl.int64, g: tl.int64):
    """Seven addresses, 16 bytes apart."""
    tl.store(TABLE, a)
    tl.store(TABLE + 2, b)
    tl.store(TABLE + 4, c)
    tl.store(TABLE + 6, d)
    tl.store(TABLE + 8, e)
    tl.store(TABLE + 10, f)
    tl.store(TABLE + 12, g)


@triton.jit
def real_address(X, BY_TABLE: tl.constexpr):
    """X; or where BY_TABLE, X then being an entry of a table of addresses, what that entry points to."""
    if BY_TABLE:
        X = tl.multiple_of(tl.load(X.to(tl.pointer_type(tl.int64))).to(X.dtype), 16)
    return X


@triton.jit
def below(i, bound, ALL: tl.constexpr):
    """i < bound; ALL: it is known of all of them, and then costs nothing."""
    return tl.full(i.shape, True, tl.int1) if ALL else i < bound


@triton.jit
def packed_rows(begin, end, kv_head, G: tl.constexpr, BLOCK_M: tl.constexpr, EVEN: tl.constexpr = False):
    """A tile has BLOCK_M // G queries from `begin` on, each with the G heads of the KV head: (query, real, head).
    EVEN: all of its queries lie before `end`."""
    r = tl.arange(0, BLOCK_M)
    at = begin + r // G
    return at, below(r, BLOCK_M // G * G, BLOCK_M % G == 0) & below(at, end, EVEN), kv_head * G + r % G


@triton.jit
def load_rows(X, head, slot, head_stride, token_stride, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of X at (head, slot), [BLOCK_M, BLOCK_D], 0 where not live."""
    d = tl.arange(0, BLOCK_D)
    rows = X + (head.to(tl.int64) * head_stride + slot * token_stride)[:, None] + d[None, :]
    return tl.load(rows, mask=live[:, None] & below(d, D, D == BLOCK_D)[None, :], other=0.0)


@triton.jit
def tile_of_group(
    STARTS, number, ROWS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    LAST_FIRST: tl.constexpr = True,
):  # fmt: skip
    """(its group's begin, its own, its group's end) of the tile with this number: no tile crosses into the next group.

    Groups come one after the other. LAST_FIRST: the last tiles of each, which have the longest prefixes, come first.
    """
    g = tl.arange(0, BLOCK_GROUPS)
    begins = tl.load(STARTS + g, mask=g < GROUPS, other=0)
    ends = tl.load(STARTS + g + 1, mask=g < GROUPS, other=0)
    tiles = (ends - begins + ROWS - 1) // ROWS
    upto = tl.cumsum(tiles, 0)
    mine = (upto - tiles <= number) & (number < upto)
    begin, end = tl.sum(tl.where(mine, begins, 0)), tl.sum(tl.where(mine, ends, 0))
    place = upto - 1 - number if LAST_FIRST else number - upto + tiles
    return begin, begin + (tl.sum(tl.where(mine, place, 0))) * ROWS, end
