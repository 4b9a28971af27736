"""The window and the sinks alone: what is visible when no pair shares a group."""

from __future__ import annotations

import torch

from focus_attn.router import Routing


def window_and_sinks(layer_idx: int, routing: Routing) -> Routing:
    """Every query looks into group 0 and every key belongs to group 1."""
    if routing.query_scores.shape[-1] < 2:
        raise ValueError("the window-and-sinks baseline needs `num_groups` of at least 2")
    return routing._replace(
        query_groups=torch.zeros_like(routing.query_groups), key_groups=torch.ones_like(routing.key_groups)
    )
