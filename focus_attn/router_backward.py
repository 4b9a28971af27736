"""The gradients of a router's scores as two Triton kernels.

Scores are W x / rms(x) + bias. By operators the backward pass writes hidden states and their gradients in fp32 several
times over; here both stay in registers. The first kernel goes over a few tokens' width twice, for the length of x and
what a gradient would only lengthen, then for the gradient of x. The second sums the weight's over stretches of tokens,
which are added in their order, so that results repeat bit for bit.

Products of bf16 hidden states run on tensor cores in bf16: an fp32 factor is written as a sum of bf16 parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_attn.attention.launch import brought_into_step, ceil_div, launch_variant, power_of_2, shared_memory
from focus_attn.kernel_use import launching_on, needs_operators
from focus_attn.router_training import EPS
from focus_attn.router_weight import split

WEIGHT_PARTS = 2  # 16 bits of the weight, for a gradient that is rounded to 8
PROGRAMS = 256  # of the second kernel, about
_variants: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


@triton.jit
def _gradients_of_scores(
    QUERY_GRAD, KEY_GRAD, first, row, live, tokens,
    SIDES: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """[rows, BLOCK_C] from column `first` on, of the groups of all routers, which lie as [B, R, T, K] by side."""
    column = first + tl.arange(0, BLOCK_C)
    router, group = column // K, column % K
    batch, token = (row // tokens).to(tl.int64), row % tokens
    at = ((batch[:, None] * R + (router % R)[None, :]) * tokens + token[:, None]) * K + group[None, :]
    is_query = (router < R)[None, :]
    real = live[:, None] & (column < SIDES * R * K)[None, :]
    grad = tl.load(QUERY_GRAD + at, mask=real & is_query, other=0.0)
    if SIDES == 2:
        grad += tl.load(KEY_GRAD + at, mask=real & ~is_query, other=0.0)
    return grad


@triton.jit
def _through(
    WEIGHT, QUERY_GRAD, KEY_GRAD, start, d, row, live, tokens,
    D: tl.constexpr, SIDES: tl.constexpr, R: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    IN_PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of scores times the weight, [BLOCK_T, BLOCK_D] from `start` on."""
    COLUMNS: tl.constexpr = SIDES * R * K
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for first in tl.range(0, COLUMNS, BLOCK_C):
        grad = _gradients_of_scores(QUERY_GRAD, KEY_GRAD, first, row, live, tokens, SIDES, R, K, BLOCK_C)
        line = first + tl.arange(0, BLOCK_C)
        weight = WEIGHT + line[:, None] * D + (start + d)[None, :]
        inside = (line < COLUMNS)[:, None] & (start + d < D)[None, :]
        large = tl.load(weight, mask=inside, other=0.0)
        if IN_PARTS:
            small = tl.load(weight + COLUMNS * D, mask=inside, other=0.0)
            high = grad.to(large.dtype)
            low = (grad - high.to(tl.float32)).to(large.dtype)
            total = tl.dot(high, small, total)
            total = tl.dot(low, large, total)
            total = tl.dot(high, large, total)
        else:
            total = tl.dot(grad, large, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["rows", "tokens"])
def _hidden_kernel(
    HIDDEN, WEIGHT, QUERY_GRAD, KEY_GRAD, INTO, SCALE, rows, tokens,
    D: tl.constexpr, SIDES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    EPS: tl.constexpr, PRECISION: tl.constexpr, IN_PARTS: tl.constexpr, TO_HIDDEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """SCALE [B * T]: one over the root mean square of each row of HIDDEN [B * T, D]. INTO: its gradient, if wanted."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = row < rows
    d = tl.arange(0, BLOCK_D)
    place = row.to(tl.int64)[:, None] * D + d[None, :]
    squares, along = tl.zeros([BLOCK_T], tl.float32), tl.zeros([BLOCK_T], tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        x = tl.load(HIDDEN + place + start, mask=live[:, None] & (start + d < D)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
        if TO_HIDDEN:
            through = _through(
                WEIGHT, QUERY_GRAD, KEY_GRAD, start, d, row, live, tokens,
                D, SIDES, R, K, PRECISION, IN_PARTS, BLOCK_T, BLOCK_C, BLOCK_D,
            )  # fmt: skip
            along += tl.sum(through * x, 1)
    scale = tl.rsqrt(squares / D + EPS)
    tl.store(SCALE + row, scale, mask=live)
    if TO_HIDDEN:
        along *= scale * scale / D  # what only lengthens x moves no score
        for start in tl.range(0, D, BLOCK_D):
            inside = live[:, None] & (start + d < D)[None, :]
            x = tl.load(HIDDEN + place + start, mask=inside, other=0.0).to(tl.float32)
            through = _through(
                WEIGHT, QUERY_GRAD, KEY_GRAD, start, d, row, live, tokens,
                D, SIDES, R, K, PRECISION, IN_PARTS, BLOCK_T, BLOCK_C, BLOCK_D,
            )  # fmt: skip
            into = (through - x * along[:, None]) * scale[:, None]
            tl.store(INTO + place + start, into.to(INTO.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "tokens", "stretch"])
def _weight_kernel(
    HIDDEN, SCALE, QUERY_GRAD, KEY_GRAD, PARTIAL, rows, tokens, stretch,
    D: tl.constexpr, SIDES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """PARTIAL [stretches, SIDES * R * K, D]: the weight's gradient by stretches of rows, multiples of BLOCK_T."""
    COLUMNS: tl.constexpr = SIDES * R * K
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    first, part = tl.program_id(1) * BLOCK_C, tl.program_id(2)
    total = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for begin in tl.range(part * stretch, min(rows, (part + 1) * stretch), BLOCK_T):
        row = begin + tl.arange(0, BLOCK_T)
        live = row < rows
        x = tl.load(
            HIDDEN + row.to(tl.int64)[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
        )
        grad = _gradients_of_scores(QUERY_GRAD, KEY_GRAD, first, row, live, tokens, SIDES, R, K, BLOCK_C)
        grad *= tl.load(SCALE + row, mask=live, other=0.0)[:, None]
        if IN_PARTS:
            for _ in tl.static_range(3):
                high = grad.to(x.dtype)
                total = tl.dot(tl.trans(high), x, total)
                grad -= high.to(tl.float32)
        else:
            total = tl.dot(tl.trans(grad), x.to(tl.float32), total, input_precision=PRECISION)
    line = first + tl.arange(0, BLOCK_C)
    at = (part.to(tl.int64) * COLUMNS + line[:, None]) * D + d[None, :]
    tl.store(PARTIAL + at, total, mask=(line < COLUMNS)[:, None] & (d < D)[None, :])


def serves(hidden: Tensor, *others: Tensor) -> bool:
    """Nobody watches PyTorch's operators, and there is something to do."""
    known = hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and hidden.numel() > 0 and not needs_operators(hidden, *others)


def stages_for(room: int, block: int, most: int) -> int:
    """Pipeline stages whose two fp32 tiles, and one more pair of them, fit into this much shared memory."""
    return max(1, min(most, room // (8 * block * block) - 1))


def gradients(hidden: Tensor, weight: Tensor, grads: list[Tensor], to_hidden: bool) -> tuple[Tensor | None, Tensor]:
    """Of hidden [B, T, d] and weight [sides, R, K, d]; grads: of each side's scores [B, R, T, K] fp32."""
    (batch, tokens, width), (sides, routers, groups, _) = hidden.shape, weight.shape
    rows, columns, device = batch * tokens, sides * routers * groups, hidden.device
    hidden, grads = brought_into_step(hidden.contiguous()), [grad.contiguous() for grad in grads]
    in_parts = hidden.dtype == torch.bfloat16
    parts = split(weight, hidden.dtype, WEIGHT_PARTS) if to_hidden else weight
    # `launch.in_step` says why rows out of step have small tiles.
    block = 32 if width % 16 else 64
    block_c = min(block, max(16, power_of_2(columns)))
    scale = torch.empty(rows, dtype=torch.float32, device=device)
    into = torch.empty_like(hidden) if to_hidden else hidden
    across = ceil_div(width, block) * ceil_div(columns, block_c)
    stretch = block * ceil_div(ceil_div(rows, block), max(1, PROGRAMS // across))
    partial = torch.empty(ceil_div(rows, stretch), columns, width, dtype=torch.float32, device=device)
    room = shared_memory(device)
    signature: tuple[Any, ...] = (width, sides, routers, groups, to_hidden, hidden.dtype, device)
    signature += tuple(x.data_ptr() % 16 == 0 for x in (hidden, parts, *grads))
    sizes = {
        "D": width, "SIDES": sides, "R": routers, "K": groups,
        "PRECISION": "tf32x3" if torch.version.cuda else "ieee", "IN_PARTS": in_parts,
        "BLOCK_T": block, "BLOCK_C": block_c, "BLOCK_D": block,
    }  # fmt: skip
    with launching_on(device):
        launch_variant(
            _variants, ("hidden", *signature), _hidden_kernel, (ceil_div(rows, block), 1, 1),
            (hidden, parts, grads[0], grads[-1], into, scale, rows, tokens),
            lambda: {**sizes, "EPS": EPS, "TO_HIDDEN": to_hidden}, 4, stages_for(room, block, 2),
        )  # fmt: skip
        launch_variant(
            _variants, ("weight", *signature), _weight_kernel,
            (ceil_div(width, block), ceil_div(columns, block_c), len(partial)),
            (hidden, scale, grads[0], grads[-1], partial, rows, tokens, stretch),
            lambda: sizes, 4, stages_for(room, block, 3),
        )  # fmt: skip
    return into if to_hidden else None, partial.sum(0).view(weight.shape)
