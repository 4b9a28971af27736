"""Prefill of the whole model, cache filled, last logits out: Focus against the model's own dense attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from focus_attn.bench.timing import Contest, Timing, compare
from focus_attn.model import FocusModel


def time_prefill(
    model: FocusModel, token_ids: Tensor, lengths: Sequence[int], repeats: int = 3, seconds: float = math.inf
) -> Iterator[Timing]:
    """`token_ids` [N] is real text, repeated where it is shorter than a length: ids then come from the router."""
    device = next(model.parameters()).device
    longest = max(lengths, default=0)
    ids = token_ids.repeat(-(-longest // len(token_ids)))[None].to(device)

    def contest(length: int) -> Contest:
        @torch.no_grad()
        def focus() -> object:
            return model.base_model(input_ids=ids[:, :length], use_cache=True, logits_to_keep=1)  # type: ignore

        def dense() -> object:
            with model.disable_focus():
                return focus()

        return Contest(length, dense, focus)

    yield from compare(map(contest, lengths), repeats, seconds)
