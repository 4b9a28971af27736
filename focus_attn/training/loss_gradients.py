"""How much the loss minds an error of a layer's attention, to second order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from focus_attn.progress import Progress
from focus_attn.training.token_losses import Head, next_token_loss

if TYPE_CHECKING:
    from focus_attn.model import FocusModel

MOST_BLOCKS, MOST_TOKENS = 10, 2048  # to go back through: 18K gradients say enough of a few hundred directions


def loss_gradients(model: FocusModel, token_blocks: Tensor, progress: Progress | None = None) -> dict[int, Tensor]:
    """By routed layer a factor S [H * Dv, n] of the covariance of the loss's gradients at its attention's output: an
    error e of that output costs about |e S|^2 / 2 nats a token, in the units of the loss.

    The empirical Fisher matrix, from one backward a block through the frozen model, whose parameters get no gradients.
    """
    window, device = model.focus_config.window, next(model.parameters()).device
    covariance: dict[int, Tensor] = {}

    def add(layer_idx: int, gradient: Tensor) -> None:
        rows = gradient[0, :, window:].transpose(0, 1).flatten(1).float()  # a token's heads side by side
        total = covariance.setdefault(layer_idx, rows.new_zeros(rows.shape[1], rows.shape[1]))
        total.addmm_(rows.T, rows)

    def listen(layer_idx: int, out: Tensor) -> None:
        out.register_hook(partial(add, layer_idx))

    blocks = token_blocks[:MOST_BLOCKS, : max(MOST_TOKENS, 4 * window)].to(device)
    predictions = blocks.shape[1] - 1 - window
    with torch.enable_grad(), grad_from_embeddings(model.base_model) as seen, model.observe_attention(_nothing, listen):
        for done, block in enumerate(blocks, start=1):
            answer = model.base_model.get_decoder()(input_ids=block[None], use_cache=False)  # type: ignore[operator]
            head = Head(model.base_model, answer)
            loss = next_token_loss(head, answer.last_hidden_state[0, window:-1], block[window + 1 :])
            torch.autograd.grad(loss * predictions, seen)
            seen.clear()
            if progress:
                progress("asking what the loss minds", done, len(blocks))
    return {layer: _factor(total / (len(blocks) * predictions)) for layer, total in covariance.items()}


def _nothing(inputs: object) -> None:
    pass


def _factor(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt()


@contextmanager
def grad_from_embeddings(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, every forward has a graph from its embeddings on; they are put into the list."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    handle = embeddings.register_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()
