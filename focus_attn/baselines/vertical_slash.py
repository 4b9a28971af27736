"""The vertical-slash pattern, in the manner of MInference (Jiang et al. 2024, arXiv 2407.02490).

For every head the attention of the last `last_queries` queries is computed in full. The keys (verticals) and the
distances (slashes) that gather most of it are kept for all queries: as many of the one as of the other, up to `keep`
of the causal pairs.

**It looks at later queries**: which keys an early token sees is decided by the end of the sequence. That is sound for
the prefill of a prompt, whose early outputs nobody reads; as a perplexity of every position it is not one of a
language model, and `causal` is False. It cannot decode.

Cost: the scores of the last queries, the pairs kept (overlaps counted once). Deviations: the pattern is used in every
head, where MInference also has two others and chooses for each head offline; single keys and distances instead of
blocks of 64; the number of both follows from `keep` rather than from an offline search. The distance 0 is always kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from focus_attn.baselines.call import LayerCall, Shape
from focus_attn.baselines.masked import MaskMethod, Visible, chunk_scores, positions, softmax_with_sinks
from focus_attn.baselines.seam import Kind


@dataclass(frozen=True)
class VerticalSlash(MaskMethod):
    keep: float = 0.2
    last_queries: int = 64

    name: ClassVar[str] = "vertical_slash"
    kind: ClassVar[Kind] = "skips"
    causal: ClassVar[bool] = False

    @classmethod
    def within(cls, budget: float, shape: Shape, last_queries: int = 64) -> VerticalSlash:
        keep = budget - cls(1.0, last_queries).selection(shape) / shape.dense_multiply_adds
        if keep * shape.causal_pairs < shape.length:
            raise ValueError(
                f"vertical_slash cannot go as low as {budget:.1%} of the dense multiply-adds at {shape.length:,} "
                f"tokens: the scores of its last {last_queries} queries leave too little. Raise `budget` or lower "
                "`last_queries`"
            )
        return cls(keep, last_queries)

    def visible(self, call: LayerCall) -> Visible:
        vertical, slash = self._lines(call)

        def on_a_line(start: int, stop: int) -> Tensor:
            query, key = positions(start, stop, call.q.device)
            distance = (query - key).clamp_min(0)[0, 0]
            return vertical[:, :, None, :stop] | slash[:, :, distance]

        return on_a_line

    @torch.no_grad()
    def _lines(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Which keys and which distances are kept, each [B, H, T] bool."""
        length = call.shape.length
        start = max(0, length - self.last_queries)
        query, key = positions(start, length, call.q.device)
        scores = chunk_scores(call, start, length).masked_fill(key > query, -torch.inf)
        attention = softmax_with_sinks(call, scores)  # [B, H, C, T]
        by_key = attention.sum(2)
        distance = (query - key).clamp_min(0)[0, 0].flatten().expand(*attention.shape[:2], -1)
        by_distance = torch.zeros_like(by_key).scatter_add_(-1, distance, attention.flatten(2))
        by_distance[..., 0] = torch.inf
        key_rank, distance_rank = (x.argsort(-1, descending=True).argsort(-1) for x in (by_key, by_distance))
        # The largest number of lines of either kind within the pairs allowed, by bisection, in all heads at once.
        allowed = self.keep * call.shape.causal_pairs
        fits = torch.zeros(*attention.shape[:2], 1, dtype=torch.int64, device=attention.device)
        over = torch.full_like(fits, length + 1)
        for _ in range(length.bit_length() + 1):
            middle = (fits + over) // 2
            good = _pairs_on_lines(key_rank < middle, distance_rank < middle)[..., None] <= allowed
            fits, over = torch.where(good, middle, fits), torch.where(good, over, middle)
        return key_rank < fits, distance_rank < fits.clamp_min(1)

    def selection(self, shape: Shape) -> float:
        queries = min(self.last_queries, shape.length)
        pairs = queries * (2 * shape.length - queries + 1) // 2
        return pairs * shape.head_dim * shape.heads

    def expected_pairs(self, shape: Shape) -> float:
        return self.keep * shape.causal_pairs


def _pairs_on_lines(vertical: Tensor, slash: Tensor) -> Tensor:
    """Causal pairs (i, j) with vertical[j] or slash[i - j]. [..., T] bool -> [...] int64."""
    length = vertical.shape[-1]
    room = torch.arange(length, 0, -1, device=vertical.device)  # pairs on a vertical j, and on a slash of distance j
    # A slash of distance o has the keys 0 ... T - 1 - o: those of them that are verticals are counted already.
    verticals_below = vertical.cumsum(-1).flip(-1)
    return (vertical * room).sum(-1) + (slash * (room - verticals_below)).sum(-1)
