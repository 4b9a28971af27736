"""Random groups: what the sparsity of Focus is worth without the learning.

`RandomPairs` is the method of the common seam: ids drawn uniformly, one query and one key group of `num_groups` for
each token and KV head, the window and the sinks as in Focus. Cost: the pairs kept; nothing is selected.

`RandomGroups` deals out a FocusModel's own ids, so that groups keep their learned sizes: `model.override_routing(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from focus_attn.baselines.budget import largest_within
from focus_attn.baselines.call import LayerCall, Shape
from focus_attn.baselines.grouped import grouped_attention
from focus_attn.baselines.masked import SparseMethod
from focus_attn.baselines.seam import Kind
from focus_attn.baselines.window import near_or_first_pairs
from focus_attn.router import Routing


@dataclass(frozen=True)
class RandomPairs(SparseMethod):
    num_groups: int = 8
    window: int = 128
    num_sinks: int = 4
    seed: int = 0

    name: ClassVar[str] = "random_groups"
    kind: ClassVar[Kind] = "skips"

    @classmethod
    def within(cls, budget: float, shape: Shape, num_groups: int = 8, num_sinks: int = 4, seed: int = 0) -> RandomPairs:
        def make(window: int) -> RandomPairs:
            return cls(num_groups, window, num_sinks, seed)

        return largest_within(budget, shape, make, 0, shape.length - 1)

    def run(self, call: LayerCall) -> tuple[Tensor, float]:
        shape = call.shape
        generator = torch.Generator().manual_seed(self.seed * 100_003 + call.layer_idx)
        ids = torch.randint(self.num_groups, (2, 1, shape.kv_heads, shape.length, 1), generator=generator)
        query, key = ids.to(call.q.device).expand(-1, call.q.shape[0], -1, -1, -1)
        return grouped_attention(call, query, key, self.num_groups, self.window, self.num_sinks)

    def expected_pairs(self, shape: Shape) -> float:
        near = near_or_first_pairs(shape.length, self.window, self.num_sinks)
        return near + (shape.causal_pairs - near) / self.num_groups


class RandomGroups:
    """The router's own ids, dealt out to the tokens at random: every group keeps its size, none its meaning.

    Sizes are those of the whole sequence, so this is for measuring prefill, not for decoding.
    """

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, layer_idx: int, routing: Routing) -> Routing:
        return routing._replace(
            query_groups=self._deal(routing.query_groups), key_groups=self._deal(routing.key_groups)
        )

    def _deal(self, groups: Tensor) -> Tensor:
        order = torch.rand(groups.shape[:3], generator=self.generator).argsort(-1)[..., None]
        return groups.gather(2, order.to(groups.device).expand_as(groups))
