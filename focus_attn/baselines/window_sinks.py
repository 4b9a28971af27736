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

from focus_attn.baselines.window import NearOrFirst
from focus_attn.router import Routing


@dataclass(frozen=True)
class WindowSinks(NearOrFirst):
    num_sinks: int = 4

    name: ClassVar[str] = "window_sinks"

    @property
    def first(self) -> int:
        return self.num_sinks


def window_and_sinks(layer_idx: int, routing: Routing) -> Routing:
    """Every query looks into group 0 and every key belongs to group 1."""
    if routing.query_scores.shape[-1] < 2:
        raise ValueError("the window-and-sinks baseline needs `num_groups` of at least 2")
    return routing._replace(
        query_groups=torch.zeros_like(routing.query_groups), key_groups=torch.ones_like(routing.key_groups)
    )
