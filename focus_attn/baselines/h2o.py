"""H2O, heavy hitters (Zhang et al. 2023, arXiv 2306.14048): keep the recent keys and those most attended to so far.

Each head keeps the last `recent` keys, and of the older ones the `heavy` that have gathered the most attention; a key
once dropped never comes back. What a token sees depends on earlier queries alone, so this is causal.

Taken literally the kept set changes after every token, and a prefill is a loop over tokens. Here it changes after every
`chunk` queries: inside a chunk nothing is dropped, so a query sees up to `chunk - 1` keys more than the budget, which
are counted. `chunk=1` is the published rule, and what the tests compare with a literal loop.

Cost: the pairs kept. Only kept keys are scored; yet the method stands among the per-query selectors, for it needs the
attention weights of each step before the next, which no fused kernel gives. Deviation: the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from focus_attn.baselines.budget import largest_within
from focus_attn.baselines.call import Cost, LayerCall, Shape
from focus_attn.baselines.masked import chunk_scores, pairs_cost, positions, softmax_with_sinks, top_keys
from focus_attn.baselines.seam import Kind


@dataclass(frozen=True)
class H2O:
    heavy: int = 64
    recent: int = 64
    chunk: int = 64

    name: ClassVar[str] = "h2o"
    kind: ClassVar[Kind] = "selects"
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.recent < 1 or self.heavy < 0 or self.chunk < 1:
            raise ValueError(
                f"h2o keeps a query's own key at least: `recent` and `chunk` from 1, `heavy` from 0, {self}"
            )

    @classmethod
    def within(cls, budget: float, shape: Shape, chunk: int = 64) -> H2O:
        """Half of the keys heavy, half recent, as in the paper."""

        def make(keys: int) -> H2O:
            return cls(keys // 2, keys - keys // 2, chunk)

        return largest_within(budget, shape, make, 1, shape.length)

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        length, device = call.shape.length, call.q.device
        gathered = torch.zeros(*call.q.shape[:3], device=device)  # attention that each key has had, fp32
        heavy = torch.zeros(*call.q.shape[:3], dtype=torch.bool, device=device)
        outs, kept = [], torch.zeros((), dtype=torch.int64, device=device)
        for start in range(0, length, self.chunk):
            stop = min(start + self.chunk, length)
            query, key = positions(start, stop, device)
            held = heavy[:, :, None, :stop] | (key > start - self.recent)
            mask = held & (key <= query)
            if call.counted:
                kept += mask.sum()
            weights = softmax_with_sinks(call, chunk_scores(call, start, stop).masked_fill(~mask, -torch.inf))
            outs.append(weights.to(call.v.dtype) @ call.values[:, :, :stop])
            gathered[:, :, :stop] += weights.detach().sum(2)
            candidates = (held & (key <= stop - self.recent))[:, :, 0]
            best = top_keys(gathered[:, :, :stop].masked_fill(~candidates, -torch.inf), self.heavy)
            heavy[:, :, :stop] = best & candidates
        return torch.cat(outs, dim=2), pairs_cost(call, float(kept), 0.0)

    def expected_multiply_adds(self, shape: Shape) -> float:
        pairs = 0
        for start in range(0, shape.length, self.chunk):
            queries = min(self.chunk, shape.length - start)
            first = min(start, self.heavy + self.recent - 1)  # keys before the chunk that its queries see
            pairs += queries * first + queries * (queries + 1) // 2
        return pairs * shape.heads * shape.pair_cost
