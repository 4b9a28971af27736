"""Copies of q, k and v in the order of a plan: kernels that read runs of rows are faster than kernels that gather.

A *line* is one order of the tokens: one a router. With one router all heads stand side by side in a line, [T, heads,
D]; with a router for each KV head, every KV head has a line of its own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.launch import Setup, ceil_div, power_of_2
from focus_attn.attention.tiles import real_address

SMALL_COPIES = 170  # a share of the device's memory that is never too much: one in so many
BLOCK = 64


class Copy(NamedTuple):
    """Rows of `x` [B, heads, T, D], from a head on, to go into `to` [B, lines, N, heads a line, D]."""

    x: Tensor
    to: Tensor
    first_head: int
    slots: Tensor  # [B, lines, N] int32, N at stride 1


def heads_at_once(call: AttentionCall, copies: int) -> int:
    """KV heads whose sorted copies (so many tensors like q) are small beside the output, as a divisor of them all."""
    kv_heads = call.k.shape[1]
    whole = call.q.numel() * call.q.element_size()
    little = small(call.q.device)
    if copies * whole <= little:
        return kv_heads
    # More heads at once are a few percent faster. Beside an output of gigabytes a quarter of it has to do.
    room = little if whole < 2 * little else whole // 4
    fits = room * kv_heads // (copies * whole)
    return max(step for step in range(1, kv_heads + 1) if kv_heads % step == 0 and (step == 1 or step <= fits))


def small(device: torch.device) -> int:
    """Bytes that copies may always take. 0 where it is not known."""
    return memory(device) // SMALL_COPIES


@functools.cache
def memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def room_for(call: AttentionCall, kv_heads: int, like: str, length: int | None = None) -> list[Tensor]:
    """Room for copies of so many KV heads, each like q, k or v: [B, lines, T or `length`, heads a line, D]."""
    batch, routers, device = call.q.shape[0], call.query_groups.shape[1], call.q.device
    lines, a_line = (1, kv_heads) if routers == 1 else (kv_heads, 1)
    per_kv_head = call.q.shape[1] // call.k.shape[1]
    sizes = {"q": (call.q, per_kv_head * a_line), "k": (call.k, a_line), "v": (call.v, a_line)}
    return [
        torch.empty(batch, lines, length or x.shape[2], heads, x.shape[3], dtype=x.dtype, device=device)
        for x, heads in (sizes[name] for name in like)
    ]


def strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, head, token) strides of a copy [B, lines, N, heads a line, D]: heads go across lines, or along one."""
    return x.stride(0), x.stride(1) if x.shape[1] > 1 else x.stride(3), x.stride(2)


# Slots may be a part of a plan that begins anywhere: nothing is to be read off where they begin at the first launch.
@triton.jit(
    do_not_specialize=[
        *("first_a", "first_b", "first_c", "tokens_a", "tokens_b", "tokens_c"),
        *("SLOTS_A", "SLOTS_B", "SLOTS_C"),
    ]
)
def _sort_kernel(
    A, B, C, TO_A, TO_B, TO_C, SLOTS_A, SLOTS_B, SLOTS_C,
    a_batch, a_head, a_token, b_batch, b_head, b_token, c_batch, c_head, c_token,
    slots_a_batch, slots_a_line, slots_b_batch, slots_b_line, slots_c_batch, slots_c_line,
    first_a, first_b, first_c, tokens_a, tokens_b, tokens_c,
    LINES: tl.constexpr, HEADS_A: tl.constexpr, HEADS_B: tl.constexpr, HEADS_C: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BY_TABLE: tl.constexpr,
):  # fmt: skip
    """Program (block of places, head of A, B or C, row)."""
    A, B, C = real_address(A, BY_TABLE), real_address(B, BY_TABLE), real_address(C, BY_TABLE)
    head = tl.program_id(1)
    if head < LINES * HEADS_A:
        _sort(
            A, TO_A, SLOTS_A, head, a_batch, a_head, a_token, slots_a_batch, slots_a_line, first_a, tokens_a,
            LINES, HEADS_A, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    elif head < LINES * (HEADS_A + HEADS_B):
        _sort(
            B, TO_B, SLOTS_B, head - LINES * HEADS_A, b_batch, b_head, b_token, slots_b_batch, slots_b_line,
            first_b, tokens_b, LINES, HEADS_B, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    else:
        _sort(
            C, TO_C, SLOTS_C, head - LINES * (HEADS_A + HEADS_B), c_batch, c_head, c_token, slots_c_batch, slots_c_line,
            first_c, tokens_c, LINES, HEADS_C, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _sort(
    X, TO, SLOTS, head, x_batch, x_head, x_token, slots_batch, slots_line, first, tokens,
    LINES: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch, line = tl.program_id(2).to(tl.int64), (head // HEADS).to(tl.int64)
    at, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside = at < tokens
    slot = tl.load(SLOTS + batch * slots_batch + line * slots_line + at, mask=inside, other=0).to(tl.int64)
    held = inside[:, None] & (d < D)[None, :]
    rows = X + batch * x_batch + (first + head).to(tl.int64) * x_head + slot[:, None] * x_token + d[None, :]
    place = ((batch * LINES + line) * tokens + at) * HEADS + head % HEADS
    tl.store(TO + place[:, None] * D + d[None, :], tl.load(rows, mask=held, other=0.0), mask=held)


class _Layout(NamedTuple):
    """What launches of one set of copies have in common."""

    contiguous: bool
    grid: tuple[int, int, int]
    strides: tuple[int, ...]
    tokens: tuple[int, ...]
    constants: dict[str, int]


def sort_rows(setup: Setup, name: str, *copies: Copy) -> None:
    """Up to three copies of one width and dtype in one launch. name: which copies, among those of a call."""
    layout: _Layout = setup.once(("sort", name), lambda: _layout(copies))
    if not layout.contiguous:
        copies = tuple(copy._replace(x=copy.x.contiguous()) for copy in copies)
    rows, to, first, slots = zip(*copies, *copies[:1] * (3 - len(copies)), strict=True)
    arguments = (*rows, *to, *slots, *layout.strides, *first, *layout.tokens)
    setup.launch(("sort", name), _sort_kernel, layout.grid, arguments, lambda: layout.constants)


def sort_rows_alike(setup: Setup, names: tuple[str, str], one: Copy, other: Copy) -> None:
    """Two copies, in one launch where they have one width."""
    if one.to.shape[-1] == other.to.shape[-1]:
        sort_rows(setup, ", ".join(names), one, other)
    else:
        sort_rows(setup, names[0], one)
        sort_rows(setup, names[1], other)


def _layout(copies: tuple[Copy, ...]) -> _Layout:
    contiguous = all(copy.x.stride(-1) == 1 for copy in copies)
    all_three = [*copies, *copies[:1] * (3 - len(copies))]
    rows = [copy.x if contiguous else copy.x.contiguous() for copy in all_three]
    heads = [copy.to.shape[3] for copy in copies] + [0] * (3 - len(copies))
    batch, lines, _, _, width = copies[0].to.shape
    longest = max(copy.to.shape[2] for copy in copies)
    return _Layout(
        contiguous,
        grid=(ceil_div(longest, BLOCK), lines * sum(heads), batch),
        strides=(
            *(stride for x in rows for stride in x.stride()[:3]),
            *(stride for copy in all_three for stride in copy.slots.stride()[:2]),
        ),
        tokens=tuple(copy.to.shape[2] for copy in all_three),
        constants={
            "LINES": lines,
            "HEADS_A": heads[0],
            "HEADS_B": max(1, heads[1]),
            "HEADS_C": max(1, heads[2]),
            "D": width,
            "BLOCK_D": power_of_2(width),
            "BLOCK_N": BLOCK,
        },
    )
