"""What a method is given for one layer, and what it says it cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """The sizes of one layer's attention, of one sequence."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def causal_pairs(self) -> int:
        """Of one head."""
        return self.length * (self.length + 1) // 2

    @property
    def pair_cost(self) -> int:
        """Multiply-adds of one pair in one head: its score and its share of the output."""
        return self.head_dim + self.value_dim

    @property
    def dense_multiply_adds(self) -> int:
        """Full causal attention, all heads."""
        return self.causal_pairs * self.heads * self.pair_cost


@dataclass(frozen=True)
class LayerCall:
    """One layer's attention over whole sequences: no padding, no packing, no cache; token t stands at index t."""

    layer_idx: int
    q: Tensor  # [B, H, T, D], rotary positions and norms applied
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, Dv]
    scale: float
    hidden: Tensor  # [B, T, d], the input of the attention module
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [H], the learned sinks of gpt_oss
    counted: bool = True  # False: under a clock, where counting pairs must not be timed; the Cost means nothing then

    @property
    def shape(self) -> Shape:
        _, heads, length, head_dim = self.q.shape
        return Shape(length, heads, self.k.shape[1], head_dim, self.v.shape[-1])

    @cached_property
    def keys(self) -> Tensor:
        """[B, H, T, D]: each query head's own copy."""
        return self._spread(self.k)

    @cached_property
    def values(self) -> Tensor:
        """[B, H, T, Dv]."""
        return self._spread(self.v)

    def _spread(self, x: Tensor) -> Tensor:
        with torch.enable_grad():  # kept for all uses, so the first one must not cut it off the graph
            return x.repeat_interleave(self.q.shape[1] // x.shape[1], dim=1)


@dataclass(frozen=True)
class Cost:
    """Of one layer call, all rows and heads.

    Counted are the multiply-adds of matrix products: selection, scores, values. Softmax, sorting, comparing, table
    look-ups and memory traffic are not: they need no multiply-adds, though they take time.
    """

    multiply_adds: float
    pairs_kept: float  # share of the causal pairs attended, averaged over rows and heads
