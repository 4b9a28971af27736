"""Which layers need their far pairs most, and how to share a budget by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from focus_attn.baselines import window_and_sinks
from focus_attn.layer import FocusLayer
from focus_attn.progress import Progress
from focus_attn.router import Routing
from focus_attn.training.observe import check_blocks
from focus_attn.training.token_losses import Head, distillation_loss

if TYPE_CHECKING:
    from focus_attn.model import FocusModel

# What the loss of a layer's far attention costs falls by e for every tenth of the far pairs that it keeps: about what
# the coverage fit leaves uncovered at the budgets of use.
DECAY = 0.1
PREDICTIONS = 256  # of a block that are compared: the output projection is most of the work otherwise
LEAST, MOST = 0.4, 2.0  # of the mean, for any layer: below it has no groups to speak of, above too large ones


@torch.no_grad()
def layer_sensitivity(model: FocusModel, token_blocks: Tensor, progress: Progress | None = None) -> Tensor:
    """What each routed layer's far attention is worth, [routed layers]: KL from the predictions of full attention to
    those with that layer alone, but for dense heads, cut down to its window and its sinks. One forward a layer and
    block."""
    config = model.focus_config
    check_blocks(token_blocks, config)
    routed = sorted((layer for layer in model.focus_layers() if layer.router), key=lambda layer: layer.spec.layer_idx)
    device = next(model.parameters()).device
    decoder = model.base_model.get_decoder()  # type: ignore[operator]
    total = len(token_blocks) * len(routed)
    worth = torch.zeros(len(routed), device=device)
    dense = {layer.spec.layer_idx: list(layer.router.dense_heads) for layer in routed if layer.router}

    def cut_down(layer_idx: int, routing: Routing) -> Routing:
        cut = window_and_sinks(layer_idx, routing)
        for now, before in ((cut.query_groups, routing.query_groups), (cut.key_groups, routing.key_groups)):
            now[:, dense[layer_idx]] = before[:, dense[layer_idx]]
        return cut

    with _eval(model), model.override_routing(cut_down):
        for number, block in enumerate(token_blocks.to(device)):
            places = torch.linspace(config.window, len(block) - 1, PREDICTIONS, device=device).long().unique()
            with _left_alone(routed):
                answer = decoder(input_ids=block[None], use_cache=False)
            head, teacher = Head(model.base_model, answer), answer.last_hidden_state[0, places]
            for index, sparse in enumerate(routed):
                with _left_alone([layer for layer in routed if layer is not sparse]):
                    hidden = decoder(input_ids=block[None], use_cache=False).last_hidden_state[0, places]
                worth[index] += distillation_loss(head, hidden, teacher) / len(token_blocks)
                if progress:
                    progress("asking which layers look far", number * len(routed) + index + 1, total)
    return worth.cpu()


@contextmanager
def _left_alone(layers: list[FocusLayer]) -> Iterator[None]:
    """Inside, these layers attend to everything: their adapter is one that has no router for them."""
    before = [layer.active for layer in layers]
    try:
        for layer in layers:
            layer.active = ""
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer.active = active


@contextmanager
def _eval(model: FocusModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def share_budget(mean: float, sensitivity: Tensor) -> list[float]:
    """Shares of the far pairs by layer, `mean` on average, for the least sum_l worth_l exp(-share_l / DECAY)."""
    wanted = DECAY * sensitivity.double().clamp_min(1e-9).log()
    low, high = LEAST * mean, min(MOST * mean, 1.0)
    # Between the bounds each layer has its own plus a level that all share: find the level by bisection.
    below, above = low - wanted.max().item(), high - wanted.min().item()
    for _ in range(60):
        level = (below + above) / 2
        if (wanted + level).clamp(low, high).mean() > mean:
            above = level
        else:
            below = level
    return (wanted + below).clamp(low, high).tolist()
