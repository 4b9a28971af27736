"""Sliding window attention: Longformer (Beltagy, Peters and Cohan 2020, arXiv 2004.05150).

A query sees the `window` keys before it and itself, and, where asked for, the first `num_global` tokens. In a causal
model a global token cannot look ahead, so that what is left of Longformer's global attention is to be seen by all.

Cost: the pairs kept; nothing is selected. Deviations: one window for all layers and heads (the paper widens it from
layer to layer and dilates some heads), the model's own projections for the global tokens too.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from focus_attn.baselines.budget import largest_within
from focus_attn.baselines.call import LayerCall, Shape
from focus_attn.baselines.grouped import near_or_first_attention
from focus_attn.baselines.masked import SparseMethod
from focus_attn.baselines.seam import Kind


@dataclass(frozen=True)
class NearOrFirst(SparseMethod):
    """The window, and as many of the first tokens as `first` says."""

    window: int = 128

    name: ClassVar[str]
    kind: ClassVar[Kind] = "skips"

    @property
    @abstractmethod
    def first(self) -> int: ...

    @classmethod
    def within(cls, budget: float, shape: Shape, **first: int) -> Self:
        return largest_within(budget, shape, lambda width: cls(width, **first), 0, shape.length - 1)

    def run(self, call: LayerCall) -> tuple[Tensor, float]:
        return near_or_first_attention(call, self.window, self.first)

    def expected_pairs(self, shape: Shape) -> float:
        return near_or_first_pairs(shape.length, self.window, self.first)


@dataclass(frozen=True)
class Window(NearOrFirst):
    num_global: int = 0

    name: ClassVar[str] = "window"

    @property
    def first(self) -> int:
        return self.num_global


def near_or_first_pairs(length: int, window: int, first: int) -> int:
    """Causal pairs with i - j <= window or j < first."""
    hidden = max(0, length - 1 - window - first)  # keys that the last query misses; the one before misses one fewer
    return length * (length + 1) // 2 - hidden * (hidden + 1) // 2
