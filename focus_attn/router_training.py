"""A router's scores with gradients that keep nothing in fp32 but the scores.

By autograd a router would keep its hidden states twice in fp32, as they are and normalised. Here the backward pass gets
them in their own dtype, a quarter of that in half precision, and normalises them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from focus_attn.gradients import first_order
from focus_attn.kernel_use import is_transformed, kernels

EPS = 1e-6  # of the root mean square


def goes_by_hand(weight: Tensor) -> bool:
    """Whether there is a gradient, and nobody who wants to see it as operators."""
    return torch.is_grad_enabled() and weight.requires_grad and not is_transformed()


class TrainedScores(torch.autograd.Function):
    """`compute` with gradients. hidden [B, T, d], weight [sides, R, K, d] -> for each side scores [B, R, T, K] fp32,
    then whatever else `compute` gives (ids), which has none."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, compute: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        answers = compute()
        ctx.save_for_backward(hidden, weight)
        ctx.set_materialize_grads(False)  # or zeros would be made for the ids
        ctx.shape = answers[0].shape
        ctx.mark_non_differentiable(*answers[len(weight) :])
        return answers

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            given = [weight.new_zeros(ctx.shape) if grad is None else grad for grad in grads[: len(weight)]]
            return *_gradients(hidden, weight, given, ctx.needs_input_grad[0]), None


def _gradients(hidden: Tensor, weight: Tensor, grads: list[Tensor], to_hidden: bool) -> tuple[Tensor | None, Tensor]:
    kernel = kernels("focus_attn.router_backward", hidden.device)
    if kernel is None or not kernel.serves(hidden, weight, *grads):
        return by_operators(hidden, weight, grads, to_hidden)
    gradients: tuple[Tensor | None, Tensor] = kernel.gradients(hidden, weight, grads, to_hidden)
    return gradients


def by_operators(hidden: Tensor, weight: Tensor, grads: list[Tensor], to_hidden: bool) -> tuple[Tensor | None, Tensor]:
    """Of hidden x and of the weight W, where scores are W x / rms(x) + bias."""
    width = hidden.shape[-1]
    by_token = torch.stack([grad.transpose(1, 2) for grad in grads], 2).flatten(0, 1).flatten(1)  # [B * T, all groups]
    rows = (hidden.float() if hidden.dtype == torch.float64 else hidden).flatten(0, 1)
    squares = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32).square_()
    scale = squares.mul_(1 / width).add_(EPS).rsqrt_()  # [B * T, 1]
    normal = rows * scale  # fp32
    weight_grad = (by_token.T @ normal).view(weight.shape)
    if not to_hidden:
        return None, weight_grad
    through = (by_token * scale) @ weight.flatten(0, 2)
    along = torch.linalg.vecdot(through, normal)[:, None].div_(width)  # what only lengthens x moves no score
    into = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    torch.addcmul(through, normal, along, value=-1, out=into.view(-1, width))
    return into, weight_grad
