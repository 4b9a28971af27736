"""Where the tokens of a training batch stand: several documents may share a row, and none looks into another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.router import value_checks
from focus_attn.visibility import count_positions


class Packing(NamedTuple):
    """Positions inside each token's own document. Padding is a document of its own that nothing counts."""

    positions: Tensor  # [B, T]
    real: Tensor  # [B, T] bool, False = padding
    position_ids: Tensor | None  # [B, T] what the model is given; None: one document a row, no padding

    @property
    def may_be_padded(self) -> bool:
        """Known without a look at values."""
        return self.position_ids is not None

    def past_window(self, window: int) -> Tensor:
        """[B, T] bool: the tokens that are predicted from a position where the router has a say."""
        return self.real & (self.positions > window)


def check_shape(name: str, given: Tensor, input_ids: Tensor) -> None:
    """ValueError unless something is said of each token."""
    if given.shape != input_ids.shape:
        raise ValueError(
            f"`{name}` must have the shape of `input_ids`, {list(input_ids.shape)}; they have {list(given.shape)}"
        )


def read_packing(input_ids: Tensor, segments: Tensor | None, position_ids: Tensor | None) -> Packing:
    """`segments` [B, T]: a number for each document, its tokens side by side, negative = padding. Without them, a
    document starts wherever `position_ids` do not go on by one."""
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(f"`input_ids` must be [batch, tokens] ids, got {list(input_ids.shape)}")
    for name, given in (("segments", segments), ("position_ids", position_ids)):
        if given is not None:
            check_shape(name, given, input_ids)
    everything = torch.ones_like(input_ids, dtype=torch.bool)
    if segments is None and position_ids is None:
        return Packing(count_positions(everything), everything, None)
    starts, real = torch.ones_like(everything), everything
    if segments is not None:
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        real = segments >= 0
    if position_ids is not None:
        restarts = position_ids.diff(dim=-1) != 1
        if segments is None:
            starts[:, 1:] = restarts
        elif value_checks(restarts) and not torch.equal(restarts, starts[:, 1:]):
            raise ValueError(
                "`position_ids` must restart where `segments` change and nowhere else: the model tells documents apart "
                "by them. Leave them out to have them counted"
            )
    positions = count_positions(everything, starts.long().cumsum(-1))
    return Packing(positions, real, positions if position_ids is None else position_ids)
