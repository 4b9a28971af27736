"""BigBird (Zaheer et al. 2020, arXiv 2007.14062), causal: window, global and random blocks.

Tokens stand in blocks of `block_size`. A query block sees itself and the `window_blocks` before it, the first
`global_blocks`, and `random_blocks` of the others before it, drawn anew for every layer and head.

Cost: the pairs kept; nothing is selected. Deviations: the published model is an encoder, so what lies ahead of a query
is masked, and a global block is seen by all without seeing all; under a budget the blocks that are not global are
shared out evenly between window and random ones, as in the paper's settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from focus_attn.baselines.budget import largest_within
from focus_attn.baselines.call import LayerCall, Shape
from focus_attn.baselines.masked import MaskMethod, Visible, positions
from focus_attn.baselines.seam import Kind


@dataclass(frozen=True)
class BigBird(MaskMethod):
    block_size: int = 32
    global_blocks: int = 1
    window_blocks: int = 3
    random_blocks: int = 3
    seed: int = 0

    name: ClassVar[str] = "bigbird"
    kind: ClassVar[Kind] = "skips"

    @classmethod
    def within(
        cls, budget: float, shape: Shape, block_size: int = 32, global_blocks: int = 1, seed: int = 0
    ) -> BigBird:
        def make(blocks: int) -> BigBird:
            return cls(block_size, global_blocks, blocks - blocks // 2, blocks // 2, seed)

        return largest_within(budget, shape, make, 0, 2 * shape.length // block_size)

    def visible(self, call: LayerCall) -> Visible:
        blocks = self._blocks(call)  # [H, n, n]

        def seen(start: int, stop: int) -> Tensor:
            query, key = (x.flatten() // self.block_size for x in positions(start, stop, call.q.device))
            return blocks[:, query][:, :, key][None]

        return seen

    def _blocks(self, call: LayerCall) -> Tensor:
        """Which block sees which, [H, n, n]. Drawn on the CPU, so that every device sees the same."""
        number = -(-call.shape.length // self.block_size)
        numbers = torch.arange(number, device=call.q.device)
        query, key = numbers[:, None], numbers[None, :]
        fixed = (query - key <= self.window_blocks) | (key < self.global_blocks)
        others = (key <= query) & ~fixed
        generator = torch.Generator().manual_seed(self.seed * 100_003 + call.layer_idx)
        lots = torch.rand(call.shape.heads, number, number, generator=generator).to(call.q.device)
        lots = lots.masked_fill(~others, -1.0)
        drawn = lots.argsort(dim=-1, descending=True)[..., : self.random_blocks]
        return fixed | (torch.zeros_like(lots, dtype=torch.bool).scatter_(-1, drawn, True) & others)

    def expected_pairs(self, shape: Shape) -> float:
        pairs, size = 0, self.block_size
        for start in range(0, shape.length, size):
            queries, before = min(size, shape.length - start), start // size
            seen = min(before, self.global_blocks + self.window_blocks + self.random_blocks)
            pairs += queries * (queries + 1) // 2 + queries * seen * size
        return pairs
