"""Centroids moved after the optimiser's step, not by it: towards the mean of what is assigned to them, or by k-means.

Two published ways to keep groups even, here to be compared with. Both take a centroid for a point among the projected
hidden states, so the biases are set with it: the nearest centre m of a point z is the largest of z . m - m . m / 2.
Forwards are only looked at, and those of one optimiser step are enough: a checkpoint has nothing to keep of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from focus_attn.router import Router, Routing, normalise
from focus_attn.training.balance import routed_layers
from focus_attn.training.distributed import copy_routers_from_main, gather_from_ranks, sum_over_ranks
from focus_attn.training.start_layer import MOST_TOKENS, kmeans
from focus_attn.visibility import memberships

if TYPE_CHECKING:
    from focus_attn.model import FocusModel


class SeenForward(NamedTuple):
    """The tokens of one forward as the routers of one layer have them. N = B * T."""

    vectors: Tensor  # [sides, R, N, w] projected
    members: Tensor  # [sides, R, N, K] bool: the groups that a token is in; padding is in none


class SeenTokens:
    """What the forwards of an optimiser step show of the routers, by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, list[SeenForward]] = {}

    @contextmanager
    def collecting(self, model: FocusModel, segments: Tensor | None = None) -> Iterator[None]:
        """Inside, forwards are kept. The backward pass belongs outside: checkpointing runs them a second time there.
        segments: [B, T] as `training_step` has them, negative = padding."""
        real = None if segments is None else (segments >= 0).flatten()

        def watch(layer_idx: int, router: Router) -> Any:
            def keep(_: Any, args: tuple[Any, ...], routing: Routing) -> None:
                self.layers.setdefault(layer_idx, []).append(_seen(router, args[0], routing, real))

            return router.register_forward_hook(keep)

        hooks = [watch(layer_idx, router) for layer_idx, router in routed_layers(model)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@torch.no_grad()
def _seen(router: Router, hidden: Tensor, routing: Routing, real: Tensor | None) -> SeenForward:
    with torch.autocast(device_type=hidden.device.type, enabled=False):
        vectors = torch.einsum("btd,srdw->srbtw", normalise(hidden), router.projection).flatten(2, 3)
    sides = (routing.query_groups, routing.key_groups)[-router.num_sides :]  # a shared router: where tokens belong
    members = torch.stack([memberships(ids, router.config.num_groups) for ids in sides])  # [sides, B, R, T, K]
    members = members.transpose(1, 2).flatten(2, 3)
    return SeenForward(vectors, members if real is None else members & real[:, None])


@torch.no_grad()
def follow_means(model: FocusModel, seen: SeenTokens, rate: float) -> None:
    """Each centroid becomes `rate` of the mean of the vectors assigned to it and the rest of itself: their exponential
    moving average over the steps. A group that nobody is in stays."""
    for layer_idx, router in routed_layers(model):
        totals = torch.zeros((), device=router.centroids.device)
        for vectors, members in seen.layers[layer_idx]:
            counted = torch.nn.functional.pad(vectors, (0, 1), value=1.0)  # the last coordinate counts
            totals = totals + members.float().transpose(-1, -2) @ counted
        totals = sum_over_ranks(totals)  # [sides, R, K, w + 1]
        sums, counts = totals[..., :-1], totals[..., -1:]
        moved = torch.lerp(router.centroids, sums / counts.clamp_min(1), rate)
        _place(router, torch.where(counts > 0, moved, router.centroids))


@torch.no_grad()
def recluster(model: FocusModel, seen: SeenTokens, seed: int) -> None:
    """Fit the centroids anew, by k-means of the vectors. Both sides are clustered together and get the same centres, as
    at the start: numbers that k-means gives to each side by itself would have nothing to do with each other."""
    generator = torch.Generator().manual_seed(seed)
    for layer_idx, router in routed_layers(model):
        vectors = _of_all_ranks([one.vectors for one in seen.layers[layer_idx]])
        real = _of_all_ranks([one.members.any(-1, keepdim=True) for one in seen.layers[layer_idx]])[-1, 0, :, 0]
        tokens = real.nonzero()[:, 0]
        tokens = tokens[torch.randperm(len(tokens), generator=generator)[:MOST_TOKENS].to(tokens.device)]
        by_router = vectors[:, :, tokens].transpose(0, 1).flatten(1, 2)  # [R, sides * n, w]
        centres = torch.stack([kmeans(points, router.config.num_groups, generator) for points in by_router])
        _place(router, centres.expand_as(router.centroids))
    copy_routers_from_main(model)  # sums on a GPU differ in their last digit from run to run


def _of_all_ranks(forwards: list[Tensor]) -> Tensor:
    """[sides, R, N, w] of each forward -> [sides, R, all tokens, w], in the order of the data whatever the number of
    processes: batches are dealt to them in turn."""
    everyone = gather_from_ranks(torch.stack(forwards))  # [ranks, forwards, sides, R, N, w]
    return everyone.permute(2, 3, 1, 0, 4, 5).flatten(2, 4)


def _place(router: Router, centres: Tensor) -> None:
    """Centres [sides, R, K, w] as a router whose highest score is the nearest one."""
    offset = -centres.square().sum(-1) / 2
    router.centroids.copy_(centres)
    router.bias.copy_(offset - offset.mean(-1, keepdim=True))
