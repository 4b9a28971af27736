"""Launching the kernels of the multiplicative gate."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from focus_attn.attention.launch import (
    Tile,
    brought_into_step,
    ceil_div,
    fitting,
    in_step,
    lies_in_rows,
    power_of_2,
    shared_memory,
)
from focus_attn.attention.multiplicative_kernels import forward_kernel, key_grad_kernel, query_grad_kernel
from focus_attn.kernel_use import launching_on
from focus_attn.visibility import EVERYTHING, Pattern, Tokens

WIDEST_HEAD = 256
MOST_GROUPS = 128  # an assignment lies in one tile


class Inputs(NamedTuple):
    """q [B, H, Tq, D], k and v [B, Hkv, Tk, ...], a [B, R, Tq, K] with lambda in it, b [B, R, Tk, K]; a and b fp32.

    As kernels are given them, a and b have 0 beyond the groups.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor  # [B, R, Tq, K], as b, summed over the heads of a router
    b: Tensor


class _Launch:
    """What the three kernels are given alike."""

    def __init__(self, inputs: Inputs, tokens: Tokens, pattern: Pattern, scale: float, softcap: float | None) -> None:
        q, k, v = (x if lies_in_rows(x) else x.contiguous() for x in inputs[:3])
        self.batch, self.heads, self.queries, width = q.shape
        self.kv_heads, self.keys, self.routers = k.shape[1], k.shape[2], inputs.a.shape[1]
        self.columns = columns_for(inputs.a.shape[-1])
        a, b = (pad(x, (0, self.columns - x.shape[-1])).contiguous() for x in (inputs.a, inputs.b))
        self.device, self.tile = q.device, tile_for(q, k, v, self.columns)
        at = [self.of_each_text(x) for x in (tokens.query_positions, tokens.key_positions)]
        given = [self.of_each_text(x) for x in (tokens.query_segments, tokens.key_segments) if x is not None]
        segments = len(given) == 2
        self.tensors = q, k, v, a, b, *at, *(given if segments else at)
        self.strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
        sliding = EVERYTHING if pattern.sliding_window is None else pattern.sliding_window
        lengths = self.queries, self.keys, self.heads, self.routers
        cap = 1.0 if softcap is None else softcap
        self.numbers = *lengths, pattern.window, pattern.num_sinks, sliding, scale, cap
        self.constants: dict[str, Any] = {
            "PLAIN": tokens.plain,
            "SEGMENTS": segments,
            "SOFTCAP": softcap is not None,
            "PRECISION": "ieee" if q.element_size() == 4 else "tf32",
            "GATES": "ieee" if torch.version.hip else "tf32x3",  # fp32 all but the last digits
            "G": self.heads // self.kv_heads,
            "C": self.columns,
            "D": width,
            "DV": v.shape[-1],
            "BLOCK_D": max(16, power_of_2(width)),
            "BLOCK_DV": max(16, power_of_2(v.shape[-1])),
            "num_warps": self.tile.warps,
            "num_stages": self.tile.stages,
        }

    def of_each_text(self, numbers: Tensor) -> Tensor:
        return numbers.int().expand(self.batch, -1).contiguous()

    def room(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(self.batch, *shape, dtype=dtype, device=self.device)

    def over_queries(self, kernel: Any, *given: Any) -> None:
        grid = ceil_div(self.queries, self.tile.rows), self.heads, self.batch
        kernel[grid](*self.tensors, *given, BLOCK_M=self.tile.rows, BLOCK_N=self.tile.keys, **self.constants)

    def over_keys(self, kernel: Any, *given: Any) -> None:
        grid = ceil_div(self.keys, self.tile.rows), self.kv_heads, self.batch
        kernel[grid](*self.tensors, *given, BLOCK_N=self.tile.rows, BLOCK_M=self.tile.keys, **self.constants)


def columns_for(groups: int) -> int:
    return max(16, power_of_2(groups))


def tile_for(q: Tensor, k: Tensor, v: Tensor, columns: int) -> Tile:
    """Rows that a program keeps its sums for, and how many of the other side it walks over at a time."""
    width = max(q.shape[-1], v.shape[-1])
    return _fitting_tile(width, q.element_size(), columns, in_step(q, k, v), q.device)


def _fitting_tile(width: int, item: int, columns: int, steady: bool, device: torch.device) -> Tile:
    """As large as ptxas 12.8 finds registers for on Hopper, in all three kernels; beyond widths of 64 and in fp32 some
    spill. With two pipeline stages it runs the forward's warpgroup products one after the other.

    No tile of 64 rows has eight warps: there it gets products of the gates wrong (an address in shared memory begins
    with a register that holds something else; ptxas 12.9 and 13.0 do not). Tiles of 32 rows have no warpgroup products.
    """
    if item == 4 or not steady or width > 128:
        tile = Tile(32, 16, 8, 1)
    elif columns > 32:
        tile = Tile(32, 32, 8, 1)
    else:
        tile = Tile(64, 32, 4, 1)
    return fitting(tile, partial(bytes_of, width=width, item=item, columns=columns), shared_memory(device))


def bytes_of(tile: Tile, width: int, item: int, columns: int) -> int:
    """Of shared memory at most, as compiled: rows of both sides with their gates, which fp32 products split in two,
    and room to change the layout of scores."""
    row = 2 * power_of_2(width) * item + 8 * columns
    return (tile.rows + tile.stages * tile.keys) * row + 16 * tile.rows * tile.keys


def has_room(width: int, item: int, groups: int, device: torch.device) -> bool:
    """Whether there are kernels for heads of this width and so many groups. item: bytes of an element."""
    if width > WIDEST_HEAD or groups > MOST_GROUPS:
        return False
    columns, room = columns_for(groups), shared_memory(device)
    tile = _fitting_tile(width, item, columns, True, device)
    return bytes_of(tile, width, item, columns) <= room


def serves(q: Tensor, k: Tensor, v: Tensor, groups: int) -> bool:
    return (
        q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and q.numel() > 0
        and has_room(max(q.shape[-1], v.shape[-1]), q.element_size(), groups, q.device)
    )


def forward(
    inputs: Inputs, tokens: Tokens, pattern: Pattern, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """-> out [B, H, Tq, Dv] in the dtype of v, logsumexp [B, H, Tq], -inf where a query sees nothing."""
    launch = _Launch(inputs, tokens, pattern, scale, softcap)
    out = launch.room(launch.heads, launch.queries, inputs.v.shape[-1], dtype=inputs.v.dtype)
    lse = launch.room(launch.heads, launch.queries)
    with launching_on(inputs.q.device):
        launch.over_queries(forward_kernel, out, lse, *launch.strides, *launch.numbers)
    return out, lse


def backward(
    inputs: Inputs, tokens: Tokens, pattern: Pattern, scale: float, softcap: float | None,
    grad: Tensor, lse: Tensor, delta: Tensor,
) -> Gradients:  # fmt: skip
    """grad [B, H, Tq, Dv] of the output; lse and delta = grad . output [B, H, Tq], of all that is in the softmax."""
    launch = _Launch(inputs, tokens, pattern, scale, softcap)
    dtype, groups, width, values = inputs.q.dtype, inputs.a.shape[-1], inputs.q.shape[-1], inputs.v.shape[-1]
    grad = brought_into_step(grad.to(dtype))
    dq, dk, dv = (
        launch.room(heads, length, n, dtype=dtype)
        for heads, length, n in (
            (launch.heads, launch.queries, width),
            (launch.kv_heads, launch.keys, width),
            (launch.kv_heads, launch.keys, values),
        )
    )
    da = launch.room(launch.heads, launch.queries, launch.columns)
    db = launch.room(launch.kv_heads, launch.keys, launch.columns)
    more = grad, lse.contiguous(), delta.contiguous()
    given = *launch.strides, *grad.stride()[:3], *launch.numbers
    with launching_on(inputs.q.device):
        launch.over_keys(key_grad_kernel, *more, dk, dv, db, *given)
        launch.over_queries(query_grad_kernel, *more, dq, da, *given)
    of_routers = (x[..., :groups].unflatten(1, (launch.routers, -1)).sum(2) for x in (da, db))
    return Gradients(dq, dk, dv, *of_routers)
