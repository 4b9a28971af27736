"""Performer (Choromanski et al. 2020, arXiv 2009.14794): FAVOR+, softmax as a product of positive random features.

exp(q . k) is the mean of phi(q) phi(k) with phi(x) = exp(w . x - |x|^2 / 2) over Gaussian w; `features` of them, drawn
orthogonally, are used. The sums over earlier keys are then carried along the sequence: chunk by chunk, with plain
causal products inside a chunk. Computed in fp64 relative to running maxima: a pretrained model's features span more
than fp32 can hold.

Cost: the features of queries and keys, the product of each query with the carried sums, their update for each key, the
products inside chunks. No pair is skipped, so `pairs_kept` is 1. Deviations: features are drawn once for each layer and
not redrawn (a model fine-tuned under them meets the same ones when it is measured); none in what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from focus_attn.baselines.budget import largest_within
from focus_attn.baselines.call import Cost, LayerCall, Shape
from focus_attn.baselines.seam import Kind

MOST_FEATURES = 1 << 16
LARGEST_EXPONENT = 700.0  # of what fp64 holds: met by features that only later keys of the chunk have much of


@dataclass(frozen=True)
class Performer:
    features: int = 256
    chunk: int = 64
    seed: int = 0

    name: ClassVar[str] = "performer"
    kind: ClassVar[Kind] = "skips"
    causal: ClassVar[bool] = True

    @classmethod
    def within(cls, budget: float, shape: Shape, chunk: int = 64, seed: int = 0) -> Performer:
        return largest_within(budget, shape, lambda features: cls(features, chunk, seed), 1, MOST_FEATURES)

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        if call.softcap is not None or call.sink_logits is not None:
            raise ValueError("performer approximates plain softmax: this model caps its scores or has learned sinks")
        directions = gaussian_directions(self.features, call.q.shape[-1], self.seed * 100_003 + call.layer_idx)
        query, key = (log_features(x, directions.to(x.device), call.scale) for x in (call.q, call.keys))
        out = causal_product(query, key, call.values.double(), self.chunk).to(call.v.dtype)
        return out, Cost(call.q.shape[0] * self.expected_multiply_adds(call.shape), 1.0)

    def expected_multiply_adds(self, shape: Shape) -> float:
        whole, rest = divmod(shape.length, self.chunk)
        inside = (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) // 2  # pairs of one head
        carried = shape.length * self.features * (shape.head_dim + shape.value_dim + 1)  # the 1: the denominator
        return (shape.heads + shape.kv_heads) * carried + shape.heads * inside * (self.features + shape.value_dim)


def gaussian_directions(features: int, width: int, seed: int) -> Tensor:
    """[features, width] fp64 with Gaussian rows, orthogonal inside every block of `width`."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-features // width)
    gaussian = torch.randn(2, blocks, width, width, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian[0])
    # A factorisation fixes the signs of its columns; given back at random, all rotations are equally likely.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    return (q.transpose(-1, -2) * gaussian[1].norm(dim=-1, keepdim=True)).flatten(0, 1)[:features]


def log_features(x: Tensor, directions: Tensor, scale: float) -> Tensor:
    """log phi, [B, H, T, features] fp64. `scale` is shared out between queries and keys."""
    x = x.double() * scale**0.5
    return x @ directions.T - x.square().sum(-1, keepdim=True) / 2


def causal_product(query: Tensor, key: Tensor, values: Tensor, chunk: int) -> Tensor:
    """sum_j<=i (phi_i . phi_j) v_j / sum_j<=i (phi_i . phi_j) of log features [B, H, T, m], values [B, H, T, Dv]."""
    values = torch.cat((values, torch.ones_like(values[..., :1])), dim=-1)  # the last column gathers the denominator
    highest = torch.full_like(key[:, :, :1], -torch.inf)  # [B, H, 1, m]: of each feature, over the keys so far
    carried = values.new_zeros(*key.shape[:2], key.shape[-1], values.shape[-1])  # relative to exp(highest)
    outs = []
    for log_q, log_k, v in zip(*(x.split(chunk, dim=2) for x in (query, key, values)), strict=True):
        so_far = torch.maximum(highest, log_k.cummax(2).values)  # [B, H, c, m]
        raised = so_far[:, :, -1:]
        carried = carried * (highest - raised).exp().transpose(-1, -2)
        phi_k = (log_k - raised).exp()
        # Any factor of a query cancels in the quotient: the one taken makes its largest term so far 1.
        phi_q = (log_q + raised - (log_q + so_far).amax(-1, keepdim=True)).clamp_max(LARGEST_EXPONENT).exp()
        inside = (phi_q @ phi_k.transpose(-1, -2)).tril()
        sums = phi_q @ carried + inside @ v
        outs.append(sums[..., :-1] / sums[..., -1:])
        carried = carried + phi_k.transpose(-1, -2) @ v
        highest = raised
    return torch.cat(outs, dim=2)
