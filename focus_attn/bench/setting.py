"""One way to call `focus_attention`, at any length, forward or with its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focus_attn.attention import focus_attention
from focus_attn.attention.call import AttentionCall, make_call
from focus_attn.attention.plan import count_pairs
from focus_attn.bench.groups import Draw, Ids
from focus_attn.visibility import Pattern, Tokens

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# What a call may carry beside sizes and ids: nothing of it here.
NO_EXTRAS: Any = dict.fromkeys(
    "scale softcap sliding_window sink_logits key_padding_mask query_positions key_positions query_segments "
    "key_segments query_gate key_gate".split()
)


class Inputs(NamedTuple):
    q: Tensor  # [1, H, T, D]
    k: Tensor  # [1, Hkv, T, D]
    v: Tensor  # [1, Hkv, T, D]
    grad: Tensor | None  # of the output, [1, H, T, D]; None: forward only


class Groups(NamedTuple):
    query: Tensor  # [1, R, T, query_k]
    key: Tensor  # [1, R, T, key_k], the same object where ids are shared


@dataclass(frozen=True)
class Shape:
    """Batch 1."""

    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    def draw(self, length: int, backward: bool, generator: torch.Generator) -> Inputs:
        """Standard normal numbers: scores of unit variance, so that every visible key weighs something."""

        def normal(heads: int, needs_grad: bool) -> Tensor:
            sizes = (1, heads, length, self.width)
            drawn = torch.randn(sizes, generator=generator, device=self.device, dtype=self.dtype)
            return drawn.requires_grad_(needs_grad)

        q, k, v = (normal(heads, backward) for heads in (self.heads, self.kv_heads, self.kv_heads))
        return Inputs(q, k, v, normal(self.heads, False) if backward else None)

    def flops(self, pairs: float, backward: bool) -> float:
        """Two products of 2 D operations a pair and head forward; the backward has five, two and a half times that."""
        return 4 * self.width * self.heads * pairs * (3.5 if backward else 1.0)


@dataclass(frozen=True)
class Setting:
    """A pattern of visible pairs: its sizes, how ids are drawn, what computes it."""

    shape: Shape
    ids: Ids
    window: int
    num_sinks: int
    draw: Draw
    backend: str = "auto"

    @property
    def pattern(self) -> Pattern:
        return Pattern(self.ids.num_groups, self.window, self.num_sinks)

    def draw_groups(self, length: int, generator: torch.Generator) -> Groups:
        return Groups(*self.draw(length, generator))

    def attend(self, groups: Groups, backend: str | None = None) -> Attend:
        """The call, as a function of q, k and v."""
        options = {"num_groups": self.ids.num_groups, "window": self.window, "num_sinks": self.num_sinks}

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return focus_attention(q, k, v, *groups, backend=backend or self.backend, **options)  # type: ignore

        return run

    def count_pairs(self, groups: Groups) -> float:
        """Visible pairs of one head, averaged over the routers."""
        at = torch.arange(groups.query.shape[2], device=groups.query.device)[None]
        return count_pairs(*groups, Tokens(at, at), self.pattern).double().mean().item()

    def example_call(self, length: int) -> AttentionCall:
        """A call of this length to ask backends about: shapes without memory behind them."""

        def empty(heads: int) -> Tensor:
            like = torch.empty(1, 1, 1, 1, dtype=self.shape.dtype, device=self.shape.device)
            return like.expand(1, heads, length, self.shape.width)

        def zeros(k: int) -> Tensor:
            like = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=self.shape.device)
            return like.expand(1, self.ids.routers, length, k)

        query_groups = zeros(self.ids.query_k)
        return make_call(
            empty(self.shape.heads),
            empty(self.shape.kv_heads),
            empty(self.shape.kv_heads),
            query_groups,
            query_groups if self.ids.shared else zeros(self.ids.key_k),
            num_groups=self.ids.num_groups,
            window=self.window,
            num_sinks=self.num_sinks,
            **NO_EXTRAS,
        )


def causal_pairs(length: int) -> float:
    return length * (length + 1) / 2


def run_pass(attend: Attend, inputs: Inputs) -> object:
    """A forward, or a forward and its backward to q, k and v."""
    q, k, v, grad = inputs
    out = attend(q, k, v)
    return out if grad is None else torch.autograd.grad(out, (q, k, v), grad)
