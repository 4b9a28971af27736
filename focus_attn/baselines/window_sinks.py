"""The window and the sinks: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).

A query sees the `window` keys before it, itself, and the first `num_sinks` tokens, on which pretrained models rest the
attention they have no use for. Cost: the pairs kept; nothing is selected. Deviation: tokens keep their true rotary
positions, where StreamingLLM counts positions inside its cache to go on past the trained length.

`window_and_sinks` is the same of a FocusModel, with its own window and sinks: `model.override_routing(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from focus_attn.baselines.budget import largest_within
from focus_attn.baselines.call import LayerCall, Shape
from focus_attn.baselines.grouped import near_or_first_attention
from focus_attn.baselines.masked import SparseMethod
from focus_attn.baselines.seam import Kind
from focus_attn.baselines.window import near_or_first_pairs
from focus_attn.router import Routing


@dataclass(frozen=True)
class WindowSinks(SparseMethod):
    window: int = 128
    num_sinks: int = 4

    name: ClassVar[str] = "window_sinks"
    kind: ClassVar[Kind] = "skips"

    @classmethod
    def within(cls, budget: float, shape: Shape, num_sinks: int = 4) -> WindowSinks:
        return largest_within(budget, shape, lambda width: cls(width, num_sinks), 0, shape.length - 1)

    def run(self, call: LayerCall) -> tuple[Tensor, float]:
        return near_or_first_attention(call, self.window, self.num_sinks)

    def expected_pairs(self, shape: Shape) -> float:
        return near_or_first_pairs(shape.length, self.window, self.num_sinks)


def window_and_sinks(layer_idx: int, routing: Routing) -> Routing:
    """Every query looks into group 0 and every key belongs to group 1."""
    if routing.query_scores.shape[-1] < 2:
        raise ValueError("the window-and-sinks baseline needs `num_groups` of at least 2")
    return routing._replace(
        query_groups=torch.zeros_like(routing.query_groups), key_groups=torch.ones_like(routing.key_groups)
    )
