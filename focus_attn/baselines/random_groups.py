"""Random groups of the learned sizes: what the sparsity is worth without the learning."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_attn.router import Routing


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
