"""SparQ (Ribar et al. 2023, arXiv 2312.04985): top keys by the largest components of the query.

Every key is scored with the `components` entries of the query that are largest in magnitude, at the temperature that
makes up for the rest. The `keys` best, among them always the last `local_keys`, are attended to exactly; the weight
that the approximation gives to the others goes to the mean value of all tokens so far (`reallocate`).

Cost: `components` multiply-adds for every causal pair, the pairs kept, the mean value's part. Every key is scored for
every query, so the cost stays quadratic. Deviations: components are chosen for each query head, where the paper sums
over the heads that share keys; the first `num_sinks` keys can be put among the best, which the paper does not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from focus_attn.baselines.budget import largest_within
from focus_attn.baselines.call import Cost, LayerCall, Shape
from focus_attn.baselines.masked import (
    attend_chunk,
    causal_mask,
    first_keys_pairs,
    pairs_cost,
    positions,
    products,
    query_chunks,
    top_keys,
)
from focus_attn.baselines.seam import Kind


@dataclass(frozen=True)
class SparQ:
    keys: int = 128
    components: int = 8
    local_keys: int | None = None  # None: a quarter of `keys`
    reallocate: bool = True
    num_sinks: int = 0

    name: ClassVar[str] = "sparq"
    kind: ClassVar[Kind] = "selects"
    causal: ClassVar[bool] = True

    @classmethod
    def within(
        cls,
        budget: float,
        shape: Shape,
        components: int | None = None,
        local_keys: int | None = None,
        reallocate: bool = True,
        num_sinks: int = 0,
    ) -> SparQ:
        """`components` is an eighth of the head by default."""
        width = components or max(1, shape.head_dim // 8)

        def make(keys: int) -> SparQ:
            return cls(keys, width, local_keys, reallocate, num_sinks)

        return largest_within(budget, shape, make, 1, shape.length)

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        width = call.q.shape[-1]
        magnitude = call.q.abs()
        large = top_keys(magnitude, min(self.components, width))
        query = call.q * large  # the products with zeros are not counted, for they need not be made
        covered = (magnitude * large).float().sum(-1) / magnitude.float().sum(-1).clamp_min(1e-20)
        sharpness = call.scale / covered.sqrt()[..., None]  # [B, H, T, 1]
        counts = torch.arange(1, call.shape.length + 1, device=call.q.device)[:, None]
        mean_values = call.values.float().cumsum(2) / counts  # [B, H, T, Dv]
        local = min(self.keys, self.keys // 4 if self.local_keys is None else self.local_keys)

        outs, kept = [], torch.zeros((), dtype=torch.int64, device=call.q.device)
        for start, stop in query_chunks(call):
            causal = causal_mask(start, stop, call.q.device)
            scores = products(query[:, :, start:stop], call.keys[:, :, :stop]) * sharpness[:, :, start:stop]
            scores = scores.masked_fill(~causal, -torch.inf)
            position, key = positions(start, stop, call.q.device)
            always = ((position - key < local) | (key < self.num_sinks)) & causal
            mask = top_keys(scores.masked_fill(always, torch.inf), self.keys) & causal
            if call.counted:
                kept += mask.sum()
            out = attend_chunk(call, start, stop, mask)
            if self.reallocate:
                selected = (scores.softmax(-1) * mask).sum(-1, keepdim=True)
                out = torch.lerp(mean_values[:, :, start:stop], out.float(), selected).to(out.dtype)
            outs.append(out)
        return torch.cat(outs, dim=2), pairs_cost(call, float(kept), self.selection(call.shape))

    def selection(self, shape: Shape) -> float:
        mean_values = 2 * shape.length * shape.value_dim if self.reallocate else 0
        return shape.heads * (shape.causal_pairs * self.components + mean_values)

    def expected_multiply_adds(self, shape: Shape) -> float:
        pairs = first_keys_pairs(shape.length, self.keys)
        return self.selection(shape) + pairs * shape.heads * shape.pair_cost
