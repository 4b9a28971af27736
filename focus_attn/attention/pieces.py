"""A branch of the plan in pieces that a kernel can run: blocks of queries against runs of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from focus_attn.attention.plan import Branch

# Queries a block. A larger one means fewer calls, and more pairs computed only to be masked at the block's edge.
NEAR_BLOCK = 128
FAR_BLOCK = 256
SINK_BLOCK = 2048


@dataclass(frozen=True)
class Piece:
    """Queries start:stop of a branch against keys first:last of it, with a bias where they differ in what they see."""

    start: int
    stop: int
    first: int
    last: int
    opens_block: bool  # whether no earlier piece had these queries
    causal: bool = False
    bias: Tensor | None = None
    sees: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def span(self) -> slice:
        return slice(self.first, self.last)


def pieces(branch: Branch, dtype: torch.dtype) -> Iterator[Piece]:
    """Blocks of a branch's queries, each as at most three pieces."""
    count = len(branch.lo)
    if branch.causal:
        yield Piece(0, count, 0, count, opens_block=True, causal=True)
        return
    block = {"near": NEAR_BLOCK, "sinks": SINK_BLOCK, "far": FAR_BLOCK}[branch.kind]
    if branch.kind == "near" and dtype.itemsize == 2:  # packing keys for half precision costs more than masked pairs
        block *= 2
    starts = list(range(0, count, block))
    firsts, lasts = torch.tensor(starts), torch.tensor([min(s + block, count) - 1 for s in starts])
    ends = [x[i].tolist() for x in (branch.lo, branch.hi) for i in (firsts.to(x.device), lasts.to(x.device))]
    edge = EdgeBias(branch, dtype)
    for start, lo_first, lo_last, hi_first, hi_last in zip(starts, *ends, strict=True):
        stop, opens_block = min(start + block, count), True
        spans = [(lo_first, hi_last)]
        alike = lo_first == lo_last and hi_first == hi_last  # every query of the block sees the same keys
        if branch.apart is None and lo_last < hi_first and (alike or hi_first - lo_last >= block):
            yield Piece(start, stop, lo_last, hi_first, opens_block)
            spans, opens_block = [(lo_first, lo_last), (hi_first, hi_last)], False
        for first, last in spans:
            if first < last:
                yield Piece(start, stop, first, last, opens_block, False, *edge(start, stop, first, last))
                opens_block = False


class EdgeBias:
    """The bias of a piece, and which of its queries see anything. Blocks of a band mostly look alike: the last answer
    is kept and given again."""

    def __init__(self, branch: Branch, dtype: torch.dtype) -> None:
        self.branch = branch
        self.lo, self.hi = branch.lo.int(), branch.hi.int()  # int32: comparing them with every key is the work
        self.open, self.shut = (torch.tensor(x, dtype=dtype, device=branch.lo.device) for x in (0.0, -math.inf))
        self.shape: tuple[int, Tensor] | None = None
        self.answer: tuple[Tensor, Tensor | None] | None = None

    def __call__(self, start: int, stop: int, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        lo, hi = self.lo[start:stop] - first, self.hi[start:stop] - first
        shape = last - first, torch.stack([lo, hi])
        if self._looks_like_last(shape) and self.answer is not None:
            return self.answer
        at = torch.arange(last - first, device=lo.device, dtype=lo.dtype)
        visible = at < hi[:, None]
        if int(lo[-1]) > 0:  # else everything from the left is visible, as in every prefix
            visible &= at >= lo[:, None]
        if self.branch.apart is not None:
            query_ids, key_ids = self.branch.apart
            visible &= query_ids[start:stop, None] != key_ids[first:last]
            sees = visible.any(-1)
        else:
            sees = hi.clamp(max=last - first) > lo.clamp(min=0)
        bias = torch.where(visible, self.open, self.shut)
        self.shape, self.answer = shape, (bias, None if sees.all() else sees)
        return self.answer

    def _looks_like_last(self, shape: tuple[int, Tensor]) -> bool:
        if self.shape is None or self.branch.apart is not None:
            return False
        return shape[0] == self.shape[0] and torch.equal(shape[1], self.shape[1])
