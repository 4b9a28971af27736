"""Keeping the groups alive and of like size: a target, a cap, and a bias that moves against the load.

The target and the cap are terms of the loss. The bias moves after the optimiser's step, never inside a forward:
checkpointing runs a forward twice, and a step may be made of several forwards on several machines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from focus_attn.router import Router, sinkhorn, tempered

if TYPE_CHECKING:
    from focus_attn.model import FocusModel


def routed_layers(model: FocusModel) -> list[tuple[int, Router]]:
    """(layer index, router) of the layers that the active adapter routes, in order: the rows of `loads`."""
    layers = ((layer.spec.layer_idx, layer.router) for layer in model.focus_layers())
    return sorted(((index, router) for index, router in layers if router is not None), key=lambda pair: pair[0])


def group_members(key: Tensor, real: Tensor) -> Tensor:
    """How many tokens belong to each group, [R, K]. key [B, R, T, K]: straight-through assignments, so that this counts
    what is served."""
    return (key * real[:, None, :, None]).sum((0, 2))


def largest_shares(loads: Tensor) -> tuple[Tensor, Tensor]:
    """Share of the keys in a router's largest group, mean and worst over the routers that have any; nothing is read
    from the device. loads [layers, R, K]: dense heads, and layers with fewer routers, have none."""
    members = loads.sum(-1)
    largest = loads.amax(-1) / members.clamp_min(1)
    return largest.sum() / (members > 0).sum().clamp_min(1), largest.amax()


def sinkhorn_divergence(
    scores: Tensor, real: Tensor, temperature: float, iterations: int, may_be_padded: bool = True
) -> Tensor:
    """KL from the balanced assignment of the batch to the router's own, mean over tokens and routers; 0 when balanced.

    The balanced one is Sinkhorn's, over all tokens of the batch together, and is a target: no gradient goes through it.
    scores [B, R, T, K].
    """
    logits = tempered(scores, temperature)
    tokens = logits.detach().transpose(0, 1).flatten(1, 2)[None]  # [1, R, B * T, K]
    target = sinkhorn(tokens, iterations, real.flatten()[None] if may_be_padded else None)
    target = target[0].unflatten(1, (scores.shape[0], -1)).transpose(0, 1)
    divergence = (target.exp() * (target - logits.log_softmax(-1))).sum(-1) * real[:, None]
    return divergence.sum() / (real.sum().clamp_min(1) * scores.shape[1])


def overfull(members: Tensor, largest_group: float) -> Tensor:
    """How far the key groups stand above the cap, relative to it, squared: a group just above it is hardly pushed, and
    what the model has to say is not drowned. Half the sum over groups, mean over routers. members [R, K]."""
    share = members / members.detach().sum(-1, keepdim=True).clamp_min(1)
    return (share / largest_group - 1).clamp_min(0).square().sum(-1).mean() / 2


@torch.no_grad()
def nudge_bias(model: FocusModel, loads: Tensor, rate: float) -> None:
    """Move each key group's bias against its load: down by `rate` at twice the fair share or more, up by `rate` when
    the group is empty, in proportion between. loads [layers, R, K] as `StepResult` has them, summed over what
    made up one optimiser step."""
    layers = routed_layers(model)
    if loads.dim() != 3 or len(loads) != len(layers):
        raise ValueError(
            f"`loads` must be [layers, routers, groups] for the {len(layers)} routed layers, got {list(loads.shape)}"
        )
    over = loads.shape[-1] * loads / loads.sum(-1, keepdim=True).clamp_min(1) - 1
    move = rate * over.clamp_max(1.0)
    move = move - move.mean(-1, keepdim=True)  # a shift of all groups alike would say nothing
    biases = [router.bias[-1] for _, router in layers]
    moves = [one[: len(bias)].to(bias) for one, bias in zip(move, biases, strict=True)]
    torch._foreach_sub_(biases, moves)  # as optimisers do: one launch for all layers
