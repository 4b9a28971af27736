"""Loki (Singhania et al. 2024, arXiv 2406.02542): top keys by scores in the leading principal components of the keys.

Keys lie near a space of few dimensions. `fit` finds the principal axes of every KV head's keys on training text;
queries and keys are put onto the first `components` of them, every key is scored by these coordinates, and the `keys`
best are attended to exactly.

Cost: these coordinates of queries and keys, `components` multiply-adds for every causal pair, the pairs kept. Every key
is scored for every query, so the cost stays quadratic. Deviations: none in what is computed (the paper turns queries
and keys onto all axes, which changes no score and costs more); axes are fitted to keys after the rotary embedding, one
of the paper's two forms. The first `num_sinks` keys can be put among the best, which the paper does not do: few
components lose the one key that many heads rest on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from focus_attn.baselines.budget import largest_within
from focus_attn.baselines.call import LayerCall, Shape
from focus_attn.baselines.fit import watch_layers
from focus_attn.baselines.masked import MaskMethod, Visible, causal_mask, first_keys_pairs, top_keys
from focus_attn.baselines.seam import Kind


@dataclass
class Loki(MaskMethod):
    keys: int = 128
    components: int = 16
    num_sinks: int = 0
    axes: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by layer, [Hkv, D, D] fp32, leading ones first

    name: ClassVar[str] = "loki"
    kind: ClassVar[Kind] = "selects"

    @classmethod
    def within(cls, budget: float, shape: Shape, components: int | None = None, num_sinks: int = 0) -> Loki:
        """`components` is a quarter of the head by default, as in the paper."""
        width = components or max(1, shape.head_dim // 4)
        return largest_within(budget, shape, lambda keys: cls(keys, width, num_sinks), 1, shape.length)

    def fit(self, model: nn.Module, blocks: Tensor) -> None:
        """Principal axes of the keys of every layer."""
        sums: dict[int, Tensor] = {}  # by layer, [Hkv, D + 1, D + 1]: second moments, first moments, number

        def add(call: LayerCall) -> None:
            keys = call.k.double().transpose(0, 1).flatten(1, 2)  # [Hkv, B T, D]
            keys = nn.functional.pad(keys, (0, 1), value=1.0)
            sums[call.layer_idx] = sums.get(call.layer_idx, 0.0) + keys.transpose(-1, -2) @ keys

        watch_layers(model, blocks, add)
        for layer_idx, total in sums.items():
            moments = total / total[:, -1:, -1:]
            mean = moments[:, :-1, -1:]
            covariance = moments[:, :-1, :-1] - mean @ mean.transpose(-1, -2)
            self.axes[layer_idx] = torch.linalg.eigh(covariance).eigenvectors.flip(-1).float()

    def visible(self, call: LayerCall) -> Visible:
        axes = self.axes.get(call.layer_idx)
        if axes is None:
            raise ValueError("loki has no principal axes yet: call `fit(model, blocks)` on training text")
        leading = axes[:, :, : self.components].repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=0)
        query, key = call.q.float() @ leading, call.keys.float() @ leading  # [B, H, T, components]

        def best(start: int, stop: int) -> Tensor:
            scores = query[:, :, start:stop] @ key[:, :, :stop].transpose(-1, -2)
            scores[..., : self.num_sinks] = torch.inf
            return top_keys(scores.masked_fill(~causal_mask(start, stop, scores.device), -torch.inf), self.keys)

        return best

    def selection(self, shape: Shape) -> float:
        rotation = (shape.heads + shape.kv_heads) * shape.length * shape.head_dim * self.components
        return rotation + shape.heads * shape.causal_pairs * self.components

    def expected_pairs(self, shape: Shape) -> float:
        return first_keys_pairs(shape.length, self.keys)
