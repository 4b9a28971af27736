"""Routing Transformer (Roy, Saffar, Vaswani and Grangier 2020, arXiv 2003.05997): attention inside clusters of k-means.

Every head has `num_clusters` centroids on the unit sphere. A query and a key, normalised, belong to the `top_clusters`
nearest; a query sees the keys that share a cluster with it, and a local window. The centroids follow the queries and
keys assigned to them by exponential moving averages over training text (`fit`), half the weight from either side.

Cost: a score of every query and every key with every centroid of its head, the pairs kept. Deviations: (1) the paper
balances clusters by letting each take its `w` nearest tokens of the whole sequence, which depends on later tokens;
here each token takes its nearest clusters, which is causal, and clusters have the sizes they have. (2) The paper gives
half of the heads to the window and half to the clusters, and ties keys to queries; a pretrained model has neither, so
every head has both and the two sides have the same centroids. (3) Sinks are an option, off as in the paper.

Sizes are known only after the fit: under a budget, the window is then as wide as what the clusters leave allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from focus_attn.baselines.budget import cannot_reach, largest_knob
from focus_attn.baselines.call import LayerCall, Shape
from focus_attn.baselines.fit import measured_share, watch_layers
from focus_attn.baselines.grouped import grouped_attention
from focus_attn.baselines.masked import SparseMethod
from focus_attn.baselines.seam import Kind
from focus_attn.baselines.window import near_or_first_pairs
from focus_attn.router import top_groups

TOKENS_AN_UPDATE = 1024
CLUSTERS_PART = 0.75  # of a budget
BLOCKS_TO_MEASURE = 2  # of those fitted to, for the window that meets a budget


@dataclass
class RoutingTransformer(SparseMethod):
    num_clusters: int = 8
    top_clusters: int = 1
    window: int = 128
    num_sinks: int = 0
    decay: float = 0.9
    seed: int = 0
    budget: float | None = None
    centroids: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by layer, [H, clusters, D] fp32

    name: ClassVar[str] = "routing_transformer"
    kind: ClassVar[Kind] = "skips"

    @classmethod
    def within(
        cls, budget: float, shape: Shape, num_clusters: int | None = None, **options: int | float
    ) -> RoutingTransformer:
        """The fewest clusters that, evenly filled, leave a part of the budget to the window; the fit settles how wide
        that is."""
        numbers = range(1, shape.length // 2 + 1) if num_clusters is None else [num_clusters]
        methods = [cls(number, window=0, budget=budget, **options) for number in numbers]  # type: ignore[arg-type]
        costs = [method.expected_multiply_adds(shape) / shape.dense_multiply_adds for method in methods]
        for allowed in (budget * CLUSTERS_PART, budget):
            for method, cost in zip(methods, costs, strict=True):
                if cost <= allowed:
                    return method
        raise ValueError(cannot_reach(methods[costs.index(min(costs))], budget, shape.length, min(costs)))

    def run(self, call: LayerCall) -> tuple[Tensor, float]:
        centroids = self.centroids.get(call.layer_idx)
        if centroids is None:
            raise ValueError("routing_transformer has no centroids yet: call `fit(model, blocks)` on training text")
        query, key = (nearest(x, centroids, self.top_clusters) for x in (call.q, call.keys))
        return grouped_attention(call, query, key, self.num_clusters, self.window, self.num_sinks)

    def selection(self, shape: Shape) -> float:
        return 2 * shape.heads * shape.length * self.num_clusters * shape.head_dim

    def expected_pairs(self, shape: Shape) -> float:
        """With clusters of equal sizes that queries and keys fill independently."""
        near = near_or_first_pairs(shape.length, self.window, self.num_sinks)
        apart = 1.0
        for taken in range(self.top_clusters):
            apart *= max(0, self.num_clusters - self.top_clusters - taken) / (self.num_clusters - taken)
        return near + (shape.causal_pairs - near) * (1 - apart)

    def fit(self, model: nn.Module, blocks: Tensor) -> None:
        """Learn the centroids of every layer. Under a budget, the window is then as wide as it allows; where the
        clusters alone take more, which happens when some grow large, the fit is made again with half as many again."""
        self.centroids.clear()
        watch_layers(model, blocks, self._learn)
        if self.budget is None:
            return
        length = blocks.shape[1]

        def share(window: int) -> float:
            self.window = window
            return measured_share(model, blocks[:BLOCKS_TO_MEASURE], self)

        window = largest_knob(self.budget, share, 0, length - 1)
        if window is not None:
            self.window = window
        elif self.num_clusters * 3 > length:
            raise ValueError(cannot_reach(self, self.budget, length, share(0)))
        else:
            self.num_clusters = -(-self.num_clusters * 3 // 2)
            self.fit(model, blocks)

    def _learn(self, call: LayerCall) -> None:
        tokens = torch.stack((normalise(call.q), normalise(call.keys)))  # [2, B, H, T, D]
        tokens = tokens.transpose(1, 2).flatten(2, 3)  # [2, H, B T, D]
        centroids = self.centroids.get(call.layer_idx)
        if centroids is None:
            generator = torch.Generator().manual_seed(self.seed * 100_003 + call.layer_idx)
            both = tokens.transpose(0, 1).flatten(1, 2)
            first = torch.randperm(both.shape[1], generator=generator)[: self.num_clusters].to(both.device)
            centroids = both[:, first]
        for part in tokens.split(TOKENS_AN_UPDATE, dim=2):
            assigned = (part @ centroids.transpose(-1, -2)).argmax(-1)  # [2, H, n]
            one_hot = nn.functional.one_hot(assigned, self.num_clusters).to(part.dtype)
            sums = one_hot.transpose(-1, -2) @ part  # [2, H, clusters, D]
            means = sums / one_hot.sum(2)[..., None].clamp_min(1)
            filled = (one_hot.sum(2) > 0).to(part.dtype)[..., None]  # a side without members pulls nowhere
            pull = (1 - self.decay) / 2 * filled
            centroids = normalise(centroids * (1 - pull.sum(0)) + (pull * means).sum(0))
        self.centroids[call.layer_idx] = centroids


def normalise(x: Tensor) -> Tensor:
    return nn.functional.normalize(x.float(), dim=-1)


def nearest(tokens: Tensor, centroids: Tensor, count: int) -> Tensor:
    """The clusters each token belongs to, [B, H, T, count] int64. tokens [B, H, T, D]."""
    return top_groups(normalise(tokens) @ centroids.transpose(-1, -2), count)
