"""MagicPIG (Chen et al. 2024, arXiv 2410.16179): keys sampled by locality-sensitive hashing, with its estimator.

Queries and centred keys are hashed by the signs of `bits` random projections, in `tables` tables. A key is sampled
when it falls into the query's bucket in at least two of them, which happens with a probability u that follows from
their angle; its weight in the softmax is exp(score) / u. Sinks and a local window are always kept, with u = 1.

Cost: the projections of queries and keys, the pairs kept. No key is scored before it is sampled, but buckets are looked
up for every query: memory traffic, not multiply-adds, which the paper leaves to the CPU. Deviations: keys are centred
on their mean over training text (`fit`) and not over the prompt, whose mean would look ahead; hashes are computed for
all queries of a prefill, where the paper uses them in decoding.

How many keys are sampled is known only by measurement: under a budget, `fit` chooses `tables`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from focus_attn.baselines.budget import attention_shape, cannot_reach, largest_knob, largest_within
from focus_attn.baselines.call import Cost, LayerCall, Shape
from focus_attn.baselines.fit import measured_share, watch_layers
from focus_attn.baselines.masked import (
    causal_mask,
    chunk_scores,
    pairs_cost,
    positions,
    query_chunks,
    softmax_with_sinks,
)
from focus_attn.baselines.seam import Kind

COLLISIONS = 2  # tables in which a key must meet the query
MOST_TABLES = 255  # a byte counts collisions
BLOCKS_TO_MEASURE = 1  # of those fitted to, for the number of tables that meets a budget


@dataclass
class MagicPIG:
    bits: int = 8
    tables: int = 75
    window: int = 64
    num_sinks: int = 4
    seed: int = 0
    budget: float | None = None
    centres: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by layer, [Hkv, 1, D] fp32

    name: ClassVar[str] = "magicpig"
    kind: ClassVar[Kind] = "selects"
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 15:
            raise ValueError(f"`bits` of a hash must be from 1 to 15, got {self.bits}")
        if not COLLISIONS <= self.tables <= MOST_TABLES:
            raise ValueError(f"`tables` must be from {COLLISIONS} to {MOST_TABLES}, got {self.tables}")

    @classmethod
    def within(cls, budget: float, shape: Shape, **options: int) -> MagicPIG:
        """The most tables whose hashing alone stays within; the fit finds how many leave room for what they sample."""

        def make(tables: int) -> MagicPIG:
            return cls(tables=tables, budget=budget, **options)  # type: ignore[arg-type]

        return largest_within(budget, shape, make, COLLISIONS, MOST_TABLES)

    def fit(self, model: nn.Module, blocks: Tensor) -> None:
        """Mean keys of every layer; under a budget, the number of tables that meets it."""
        sums: dict[int, Tensor] = {}

        def add(call: LayerCall) -> None:
            sums[call.layer_idx] = sums.get(call.layer_idx, 0.0) + call.k.double().mean((0, 2))[:, None]

        watch_layers(model, blocks, add)
        self.centres = {layer_idx: (total / len(blocks)).float() for layer_idx, total in sums.items()}
        if self.budget is None:
            return

        def share(tables: int) -> float:
            self.tables = tables
            hashing = self.selection(shape) / shape.dense_multiply_adds
            return hashing if hashing > budget else measured_share(model, blocks[:BLOCKS_TO_MEASURE], self)

        budget, shape = self.budget, attention_shape(model, blocks.shape[1])
        tables = largest_knob(self.budget, share, COLLISIONS, MOST_TABLES)
        if tables is None:
            raise ValueError(cannot_reach(self, self.budget, blocks.shape[1], share(COLLISIONS)))
        self.tables = tables

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        centre = self.centres.get(call.layer_idx)
        if centre is None:
            raise ValueError("magicpig does not know the mean keys yet: call `fit(model, blocks)` on training text")
        repeats = call.q.shape[1] // call.k.shape[1]
        query, key = call.q.float(), call.k.float() - centre
        directions = self._directions(call)
        query_codes = self._codes(query, directions)
        key_codes = self._codes(key, directions).repeat_interleave(repeats, dim=2)  # [tables, B, H, T]
        # Cosines, from directions: the products with sampled keys are those of the scores, shifted by the centre's.
        query, key = nn.functional.normalize(query, dim=-1), nn.functional.normalize(key, dim=-1)
        key = key.repeat_interleave(repeats, dim=1)

        outs, kept = [], torch.zeros((), dtype=torch.int64, device=call.q.device)
        for start, stop in query_chunks(call):
            causal = causal_mask(start, stop, call.q.device)
            position, slot = positions(start, stop, call.q.device)
            static = ((position - slot <= self.window) | (slot < self.num_sinks)) & causal
            sampled = _collisions(query_codes[..., start:stop], key_codes[..., :stop]) >= COLLISIONS
            sampled = sampled & causal & ~static
            if call.counted:
                kept += sampled.sum() + static.sum() * (sampled.shape[0] * sampled.shape[1])
            scores = chunk_scores(call, start, stop).masked_fill(~(sampled | static), -torch.inf)
            cosines = (query[:, :, start:stop] @ key[:, :, :stop].transpose(-1, -2))[sampled]
            scores[sampled] -= sampling_probability(cosines, self.bits, self.tables).log().float()
            outs.append(softmax_with_sinks(call, scores).to(call.v.dtype) @ call.values[:, :, :stop])
        return torch.cat(outs, dim=2), pairs_cost(call, float(kept), self.selection(call.shape))

    def _directions(self, call: LayerCall) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + call.layer_idx)
        return torch.randn(self.tables, 1, call.q.shape[-1], self.bits, generator=generator).to(call.q.device)

    def _codes(self, x: Tensor, directions: Tensor) -> Tensor:
        """[B, H, T, D] -> the bucket in every table, [tables, B, H, T] int16."""
        powers = 2 ** torch.arange(self.bits, device=x.device)
        return torch.stack([((x @ table > 0) * powers).sum(-1).to(torch.int16) for table in directions])

    def selection(self, shape: Shape) -> float:
        return (shape.heads + shape.kv_heads) * shape.length * self.tables * self.bits * shape.head_dim

    def expected_multiply_adds(self, shape: Shape) -> float:
        """Hashing alone: what is sampled is not known before the text."""
        return self.selection(shape)


def _collisions(query_codes: Tensor, key_codes: Tensor) -> Tensor:
    """In how many tables a query and a key share a bucket, [B, H, C, stop] uint8."""
    shape = (*query_codes.shape[1:], key_codes.shape[-1])
    total = torch.zeros(shape, dtype=torch.uint8, device=query_codes.device)
    for query, key in zip(query_codes, key_codes, strict=True):
        total += query[..., :, None] == key[..., None, :]
    return total


def sampling_probability(cosines: Tensor, bits: int, tables: int) -> Tensor:
    """That two directions share a bucket in at least two of the tables, fp64."""
    one = (1 - cosines.double().clamp(-1, 1).acos() / math.pi) ** bits
    none_of_them = (1 - one) ** tables
    return (1 - none_of_them - tables * one * (1 - one) ** (tables - 1)).clamp_min(1e-12)
