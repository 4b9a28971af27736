"""The routers of a few layers of like shape, fitted together by Adam to the coverage objective.

Layers are independent; together they make products that are large enough for a GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.router import Router
from focus_attn.training.objectives import FarAttention, coverage_loss, covered, crowding, far_pairs_kept
from focus_attn.training.observe import Observation

# From assignments that hardly tell groups apart to ones that are nearly hard. Begun at 1, `focus demo` closes 69 % of
# its gap instead of 73, at the same pairs (one seed).
START_TEMPERATURE, END_TEMPERATURE = 2.0, 0.2
# Hard ids keep somewhat more pairs than the soft assignments that the objective counts.
HARD_OVERSHOOT = 1.03
CROWDING_WEIGHT = 0.3  # enough to even the groups out; three times as much costs attention

Lesson = tuple[Tensor, FarAttention]  # normalised hidden states [L, T, d], the attention of L * R routers to cover


class LayerFit(NamedTuple):
    """One layer, measured with hard ids on the blocks it was fitted to, positions past the window.

    Attention counts by what it adds to the layer's output: times the length of the key's value.
    """

    layer_idx: int
    covered: float  # share of the attention that is kept
    covered_nearby: float  # the same with the window and the sinks alone
    far_pairs_kept: float
    largest_group: float  # share of the keys of a block in it, mean over the layer's routers
    lost: float | None = None  # after an output fit: what the output still loses, of what nearness alone loses


class ObservedLayer(NamedTuple):
    layer_idx: int
    router: Router
    seen: list[Observation]

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Layers that agree in it can be fitted together."""
        inputs = self.seen[0].inputs
        return (self.router.num_routers, self.router.hidden_size, inputs.q.shape[1], inputs.sliding_window)


class LayersTrainer:
    """Fits the routers of layers of one shape, from where they are."""

    def __init__(
        self, layers: list[ObservedLayer], steps: int, learning_rate: float, seed: int, largest_group: float = 1.0
    ) -> None:
        self.layers, self.steps, self.learning_rate, self.largest_group = layers, steps, learning_rate, largest_group
        self.config = layers[0].router.config
        generator = torch.Generator().manual_seed(seed * 100_003 + layers[0].layer_idx)
        self.order = torch.randperm(len(layers[0].seen), generator=generator).tolist()
        routers = [layer.router for layer in layers]
        self.projection, self.centroids = (
            torch.stack([getattr(router, name).detach() for router in routers]).requires_grad_()
            for name in ("projection", "centroids")
        )
        self.bias = torch.stack([router.served_bias for router in routers])
        self.optimizer = torch.optim.Adam([self.projection, self.centroids], lr=learning_rate, betas=(0.9, 0.99))

    def run(self, far_budgets: list[float]) -> list[LayerFit]:
        """Train, keeping at most this share of each layer's far pairs, and measure."""
        # Made only now: for all layers at once they would take several times the memory of what was seen.
        lessons = [self._lesson(block) for block in range(len(self.layers[0].seen))]
        routers = self.layers[0].router.num_routers
        budgets = torch.tensor(far_budgets, device=self.bias.device).repeat_interleave(routers) / HARD_OVERSHOOT
        with torch.enable_grad():
            for step in range(self.steps):
                hidden, attention = lessons[self.order[step % len(lessons)]]
                self._step(step / self.steps, hidden, attention, budgets)
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                layer.router.projection.copy_(self.projection[index])
                layer.router.centroids.copy_(self.centroids[index])
            return self._measure(lessons)

    def measure(self) -> list[LayerFit]:
        """The routers as they are."""
        with torch.no_grad():
            return self._measure([self._lesson(block) for block in range(len(self.layers[0].seen))])

    def _lesson(self, block: int) -> Lesson:
        seen = [layer.seen[block] for layer in self.layers]
        parts = [one.attention(layer.router) for one, layer in zip(seen, self.layers, strict=True)]
        attention = parts[0]._replace(
            far=torch.cat([part.far for part in parts]), near=torch.cat([part.near for part in parts])
        )
        return torch.stack([one.hidden for one in seen]), attention

    def _step(self, progress: float, hidden: Tensor, attention: FarAttention, budgets: Tensor) -> None:
        temperature = START_TEMPERATURE * (END_TEMPERATURE / START_TEMPERATURE) ** progress
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * max(0.05, 0.5 * (1 + math.cos(math.pi * progress)))
        query, key = (
            (k * (side / temperature).softmax(1)).clamp_max(1.0)  # [L * R, K, T]
            for k, side in self._sides(hidden)
        )
        loss = coverage_loss(attention, query[..., attention.positions], key, budgets)
        loss = loss + CROWDING_WEIGHT * crowding(key, self.largest_group)
        self.optimizer.zero_grad()
        loss.sum().backward()
        self.optimizer.step()

    def _measure(self, lessons: list[Lesson]) -> list[LayerFit]:
        """By layer; what comes from the device comes at once."""
        measured = []
        for hidden, attention in lessons:
            query, key = (
                torch.zeros_like(side).scatter_(1, side.topk(k, dim=1).indices, 1.0) for k, side in self._sides(hidden)
            )
            query = query[..., attention.positions]
            kept = covered(attention, query, key).clamp(0, 1).mean((1, 2))
            largest = key.mean(-1).amax(1) / self.config.key_top_k
            pairs = far_pairs_kept(attention, query, key)
            measured.append(torch.stack([kept, attention.near.mean((1, 2)), pairs, largest]))
        by_router = torch.stack(measured).mean(0).unflatten(1, (len(self.layers), -1))  # [4, L, R]
        means = by_router.mean(-1)
        for index, layer in enumerate(self.layers):  # dense heads have no groups that could be large
            means[-1, index] = by_router[-1, index, layer.router.choosing].mean()
        by_layer = means.T.tolist()
        return [LayerFit(layer.layer_idx, *values) for layer, values in zip(self.layers, by_layer, strict=True)]

    def _sides(self, normalised: Tensor) -> list[tuple[int, Tensor]]:
        """(query_top_k, query scores), (key_top_k, key scores), [L * R, K, T]."""
        scores = scores_by_side(self.projection, self.centroids, self.bias, normalised)
        return [(self.config.query_top_k, scores[0]), (self.config.key_top_k, scores[-1])]


def scores_by_side(projection: Tensor, centroids: Tensor, bias: Tensor, normalised: Tensor) -> Tensor:
    """`Router.scores` of L layers laid out for a fit, [sides, L * R, K, T]: softmax over groups is fast where tokens
    are last. normalised: [L, T, d]."""
    layers, sides, routers, width, dim = projection.shape
    weight = projection.permute(0, 3, 1, 2, 4).reshape(layers, width, -1)
    z = (normalised @ weight.to(normalised.dtype)).float()
    z = z.unflatten(-1, (sides, routers, dim)).permute(2, 0, 3, 4, 1)  # [S, L, R, w, T]
    scores = centroids.transpose(0, 1) @ z + bias.transpose(0, 1)[..., None]
    return scores.flatten(1, 2)
