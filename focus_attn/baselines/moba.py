"""MoBA, mixture of block attention (Lu et al. 2025, arXiv 2502.13189).

Keys stand in blocks of `block_size`. A query scores every block before its own by the block's mean key, takes the
`top_blocks` best, and attends to those and, causally, to its own block.

Cost: the mean keys (one multiply-add a number), a score for every query and earlier block, the pairs kept. Deviations:
none in what is computed; blocks are finer than the paper's (512 and more), which favours it at the lengths used here,
and still finer ones favour it more (recipes/compare/settings.yaml asks how much).
The blocks that hold the first `num_sinks` keys can be put among the best, which the paper does not do: it trains the
model with the method, and a pretrained one rests on keys that a block's mean hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from focus_attn.baselines.budget import largest_within
from focus_attn.baselines.call import LayerCall, Shape
from focus_attn.baselines.masked import MaskMethod, Visible, first_keys_pairs, positions, top_keys
from focus_attn.baselines.seam import Kind


@dataclass(frozen=True)
class MoBA(MaskMethod):
    block_size: int = 32
    top_blocks: int = 8
    num_sinks: int = 0

    name: ClassVar[str] = "moba"
    kind: ClassVar[Kind] = "skips"

    @classmethod
    def within(cls, budget: float, shape: Shape, block_size: int = 32, num_sinks: int = 0) -> MoBA:
        most = -(-shape.length // block_size)
        return largest_within(budget, shape, lambda blocks: cls(block_size, blocks, num_sinks), 0, most)

    def visible(self, call: LayerCall) -> Visible:
        size, length = self.block_size, call.shape.length
        padded = nn.functional.pad(call.keys.float(), (0, 0, 0, -length % size))
        means = padded.unflatten(2, (-1, size)).mean(3)  # [B, H, n, D]; the last is short, and never scored

        def chosen_or_own(start: int, stop: int) -> Tensor:
            own, block = (x // size for x in positions(start, stop, call.q.device))
            count = -(-stop // size)
            earlier = torch.arange(count, device=call.q.device) < own  # [1, 1, C, n]
            scores = call.q[:, :, start:stop].float() @ means[:, :, :count].transpose(-1, -2)
            scores[..., : -(-self.num_sinks // size)] = torch.inf
            chosen = top_keys(scores.masked_fill(~earlier, -torch.inf), self.top_blocks) & earlier
            return chosen.repeat_interleave(size, dim=-1)[..., :stop] | (block == own)

        return chosen_or_own

    def selection(self, shape: Shape) -> float:
        means = shape.kv_heads * shape.length * shape.head_dim
        return means + _earlier_blocks(shape.length, self.block_size) * shape.head_dim * shape.heads

    def expected_pairs(self, shape: Shape) -> float:
        size = self.block_size
        whole, rest = divmod(shape.length, size)
        own = whole * size * (size + 1) // 2 + rest * (rest + 1) // 2
        # A query of block n takes min(n, top_blocks) others.
        others = size * (first_keys_pairs(whole, self.top_blocks + 1) - whole) + rest * min(whole, self.top_blocks)
        return own + others * size


def _earlier_blocks(length: int, size: int) -> int:
    """Sum over the queries of the number of blocks before their own."""
    whole, rest = divmod(length, size)
    return size * whole * (whole - 1) // 2 + rest * whole
