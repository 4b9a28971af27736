"""One layer's routers, fitted by Adam to the coverage objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.layer import AttentionInputs
from focus_attn.router import Router, normalise
from focus_attn.training.objectives import FarAttention, coverage_loss, covered, far_attention, far_pairs_kept

START_TEMPERATURE, END_TEMPERATURE = 1.0, 0.2
# Hard ids keep somewhat more pairs than the soft assignments that the objective counts.
HARD_OVERSHOOT = 1.03

Lesson = tuple[Tensor, FarAttention]  # normalised hidden states [T, d], the attention to cover


class LayerFit(NamedTuple):
    """One layer, measured with hard ids on the blocks it was fitted to, positions past the window.

    Attention counts by what it adds to the layer's output: times the length of the key's value.
    """

    layer_idx: int
    covered: float  # share of the attention that is kept
    covered_nearby: float  # the same with the window and the sinks alone
    far_pairs_kept: float


@dataclass(frozen=True)
class Observation:
    """One layer and one block: what the fit keeps of it."""

    inputs: AttentionInputs  # q: the sampled queries alone; v: its lengths alone
    positions: Tensor  # [n] of the sampled queries

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.inputs.hidden, self.inputs.q, self.inputs.k, self.inputs.v) if x is not None)


class LayerTrainer:
    """Fits one layer's router."""

    def __init__(
        self, layer_idx: int, router: Router, seen: list[Observation], steps: int, learning_rate: float, seed: int
    ) -> None:
        self.layer_idx, self.router, self.seen = layer_idx, router, seen
        self.steps, self.learning_rate = steps, learning_rate
        generator = torch.Generator().manual_seed(seed * 100_003 + layer_idx)
        router.reset_parameters(generator)  # ours: the fit must not depend on what ran before it
        self.order = torch.randperm(len(seen), generator=generator).tolist()
        parameters = [router.projection, router.centroids]
        self.optimizer = torch.optim.Adam(parameters, lr=learning_rate, betas=(0.9, 0.99))

    def run(self, far_budget: float) -> LayerFit:
        """Train, keeping at most `far_budget` of the far pairs, and measure."""
        # Made only now: for all layers at once they would take several times the memory of what was seen.
        lessons = [self._lesson(observation) for observation in self.seen]
        with torch.enable_grad():
            for step in range(self.steps):
                hidden, attention = lessons[self.order[step % len(lessons)]]
                self._step(step / self.steps, hidden, attention, far_budget / HARD_OVERSHOOT)
        return self._measure(lessons)

    def _lesson(self, seen: Observation) -> Lesson:
        config = self.router.config
        assert seen.inputs.hidden is not None
        attention = far_attention(seen.inputs, seen.positions, self.router.num_routers, config.window, config.num_sinks)
        hidden = seen.inputs.hidden[0]
        return normalise(hidden).to(hidden.dtype), attention  # the fit's products then run at the model's speed

    def _step(self, progress: float, hidden: Tensor, attention: FarAttention, far_budget: float) -> None:
        temperature = START_TEMPERATURE * (END_TEMPERATURE / START_TEMPERATURE) ** progress
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * max(0.05, 0.5 * (1 + math.cos(math.pi * progress)))
        query, key = (
            (k * (side / temperature).softmax(1)).clamp_max(1.0)  # [R, K, T]
            for k, side in self._sides(hidden)
        )
        loss = coverage_loss(attention, query[..., attention.positions], key, far_budget)
        self.optimizer.zero_grad()
        loss.sum().backward()
        self.optimizer.step()

    @torch.no_grad()
    def _measure(self, lessons: list[Lesson]) -> LayerFit:
        self.optimizer.zero_grad()
        kept, nearby, pairs = [], [], []
        for hidden, attention in lessons:
            query, key = (
                torch.zeros_like(side).scatter_(1, side.topk(k, dim=1).indices, 1.0) for k, side in self._sides(hidden)
            )
            query = query[..., attention.positions]
            kept.append(covered(attention, query, key).clamp(0, 1).mean())
            nearby.append(attention.near.mean())
            pairs.append(far_pairs_kept(attention, query, key).mean())
        covered_all, covered_nearby, kept_pairs = (torch.stack(x).mean().item() for x in (kept, nearby, pairs))
        return LayerFit(self.layer_idx, covered_all, covered_nearby, kept_pairs)

    def _sides(self, normalised: Tensor) -> list[tuple[int, Tensor]]:
        """(query_top_k, query scores), (key_top_k, key scores): `Router.scores` laid out for the fit, [R, K, T], for
        softmax over groups is fast where tokens are last."""
        router = self.router
        weight = router.projection.permute(2, 0, 1, 3).flatten(1)
        z = (normalised @ weight.to(normalised.dtype)).float()
        z = z.unflatten(-1, (router.num_sides, router.num_routers, -1)).permute(1, 2, 3, 0)
        scores = router.centroids @ z + router.bias[..., None]
        return [(router.config.query_top_k, scores[0]), (router.config.key_top_k, scores[-1])]
