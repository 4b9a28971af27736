"""Routing Transformer (Roy, Saffar, Vaswani and Grangier 2020, arXiv 2003.05997): attention inside clusters of k-means.

Every head has `num_clusters` centroids on the unit sphere. A query and a key, centred and normalised, belong to the
`top_clusters` nearest; a query sees the keys that share a cluster with it, and a local window. The centroids follow the
queries and keys assigned to them by exponential moving averages over training text (`fit`), half the weight from either
side.

Cost: a score of every query and every key with every centroid of its head, the pairs kept. Deviations: (1) the paper
balances clusters by letting each take its `w` nearest tokens of the whole sequence, which depends on later tokens;
here each token takes its nearest clusters, which is causal, and clusters have the sizes they have. (2) The paper gives
half of the heads to the window and half to the clusters, and ties keys to queries; a pretrained model has neither, so
every head has both and the two sides have the same centroids. Its queries lie far from its keys, and no cluster would
have members of both: each side is centred on its mean over training text. (3) Sinks are an option, off as in the paper.
(4) Where the model is fine-tuned under it, the centroids stay as they were fitted.

Sizes are known only after the fit: under a budget, the window is then as wide as what the clusters leave allows.
"""

from __future__ import annotations

import dataclasses
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

TOKENS_AN_UPDATE = 256
USUAL_WINDOW, WINDOW_PART = 128, 0.75  # under a budget the window is that wide at least, unless it takes more than this
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
    centres: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by layer, [2, 1, H, 1, D] fp32: q and k
    centroids: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by layer, [H, clusters, D] fp32

    name: ClassVar[str] = "routing_transformer"
    kind: ClassVar[Kind] = "skips"

    @classmethod
    def within(
        cls, budget: float, shape: Shape, num_clusters: int | None = None, **options: int | float
    ) -> RoutingTransformer:
        """The fewest clusters that, evenly filled, leave room for the least window; the fit settles how wide it is."""
        numbers = range(1, shape.length // 2 + 1) if num_clusters is None else [num_clusters]
        methods = [cls(number, window=0, budget=budget, **options) for number in numbers]  # type: ignore[arg-type]
        for window in (methods[0]._least_window(shape.length), 0):
            methods = [dataclasses.replace(method, window=window) for method in methods]
            costs = [method.expected_multiply_adds(shape) / shape.dense_multiply_adds for method in methods]
            for method, cost in zip(methods, costs, strict=True):
                if cost <= budget:
                    return method
        raise ValueError(cannot_reach(methods[costs.index(min(costs))], budget, shape.length, min(costs)))

    def run(self, call: LayerCall) -> tuple[Tensor, float]:
        centroids = self.centroids.get(call.layer_idx)
        if centroids is None:
            raise ValueError("routing_transformer has no centroids yet: call `fit(model, blocks)` on training text")
        near = self.directions(call) @ centroids.transpose(-1, -2)
        query, key = top_groups(near, self.top_clusters).unbind()
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
        """Learn the centroids of every layer. Under a budget, the window is then as wide as it allows; where clusters
        and the least window take more, which happens when some grow large, half as many clusters are added."""
        self._learn_clusters(model, blocks)
        if self.budget is None:
            return
        length = blocks.shape[1]
        least = self._least_window(length)

        def share(window: int) -> float:
            self.window = window
            return measured_share(model, blocks[:BLOCKS_TO_MEASURE], self)

        while (window := largest_knob(self.budget, share, least, length - 1)) is None:
            if self.num_clusters * 3 <= length:
                self.num_clusters = -(-self.num_clusters * 3 // 2)
                self._learn_clusters(model, blocks)
            elif least:
                least = 0
            else:
                raise ValueError(cannot_reach(self, self.budget, length, share(0)))
        self.window = window

    def _least_window(self, length: int) -> int:
        assert self.budget is not None
        near = near_or_first_pairs(length, USUAL_WINDOW, self.num_sinks) / (length * (length + 1) / 2)
        return USUAL_WINDOW if near <= WINDOW_PART * self.budget else 0

    def _learn_clusters(self, model: nn.Module, blocks: Tensor) -> None:
        self.centres.clear()
        self.centroids.clear()
        watch_layers(model, blocks, self._centre)
        self.centres = {layer_idx: total / len(blocks) for layer_idx, total in self.centres.items()}
        watch_layers(model, blocks, self._learn)

    def directions(self, call: LayerCall) -> Tensor:
        """Queries and keys as the centroids see them, [2, B, H, T, D] fp32 of length 1."""
        return nn.functional.normalize(_sides(call) - self.centres[call.layer_idx], dim=-1)

    def _centre(self, call: LayerCall) -> None:
        means = _sides(call).mean((1, 3), keepdim=True)
        self.centres[call.layer_idx] = self.centres.get(call.layer_idx, 0.0) + means

    def _learn(self, call: LayerCall) -> None:
        tokens = self.directions(call).transpose(1, 2).flatten(2, 3)  # [2, H, B T, D]
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
            centroids = nn.functional.normalize(centroids * (1 - pull.sum(0)) + (pull * means).sum(0), dim=-1)
        self.centroids[call.layer_idx] = centroids


def _sides(call: LayerCall) -> Tensor:
    """Queries and each query head's keys, [2, B, H, T, D] fp32."""
    return torch.stack((call.q, call.keys)).float()
