"""The mean of adapters that one start led to.

Trainings that begin with the same routers keep their groups in step: group 3 of a layer stays group 3, whatever the
objective was. Their mean is then a router too, often a better one than its parts, at the cost of one. Routers of
different starts number their groups differently, and the mean of those is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.adapters import Adapter, check_finite

# Trainings of one start ended 0.2 to 0.4 apart (results/train_h200/k8_dense_heads.json, k8_distill.json); where groups
# are numbered differently it is sqrt(2) or so.
UNRELATED = 1.0


class AdapterMean(NamedTuple):
    adapter: Adapter
    apart: float  # the two routers of a place that stand farthest apart


def mean_of_adapters(adapters: Sequence[Adapter], weights: Sequence[float] | None = None) -> AdapterMean:
    """Every tensor's. weights: how much each counts, whatever their sum is."""
    if len(adapters) < 2:
        raise ValueError(f"a mean takes two adapters or more, got {len(adapters)}")
    weights = [1.0] * len(adapters) if weights is None else list(weights)
    if len(weights) != len(adapters):
        plural = "" if len(weights) == 1 else "s"
        raise ValueError(f"{len(weights)} weight{plural} for {len(adapters)} adapters: give one for each")
    if not (all(weight > 0 for weight in weights) and math.isfinite(sum(weights))):
        raise ValueError(f"weights are numbers above 0, got {', '.join(f'{weight:g}' for weight in weights)}")
    first = adapters[0]
    for adapter in adapters:
        check_finite(adapter)
        _check_alike(first, adapter)
    apart = max(distance(a, b) for a, b in combinations(adapters, 2))
    if apart >= UNRELATED:
        raise ValueError(
            f"routers of these are {apart:.2f} of their size apart, so they come from different starts and number "
            f"their groups differently: average trainings that began with the same routers (seed, text and `start`)"
        )
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)

    def mean(name: str) -> Tensor:
        stacked = torch.stack([adapter.tensors[name] for adapter in adapters])
        return torch.tensordot(shares, stacked.double(), 1).to(stacked)

    return AdapterMean(Adapter(first.config, first.base, {name: mean(name) for name in first.tensors}), apart)


def distance(a: Adapter, b: Adapter) -> float:
    """Between the two routers of one place that stand farthest apart, as a share of their size.

    By their centroids, for these say which group is which; projections and biases may move."""
    farthest = 0.0
    for name, tensor in a.tensors.items():
        if name.endswith(".centroids"):  # [..., K, dim]
            mine, theirs = tensor.double(), b.tensors[name].double()
            size = (mine.norm(dim=(-2, -1)) * theirs.norm(dim=(-2, -1))).sqrt()
            apart = (mine - theirs).norm(dim=(-2, -1)) / size.clamp_min(torch.finfo(size.dtype).tiny)
            farthest = max(farthest, float(apart.max()))
    return farthest


def _check_alike(a: Adapter, b: Adapter) -> None:
    differing = [
        f"`{field}`: {value!r}, {getattr(b.base, field)!r}"
        for field, value in vars(a.base).items()
        if field != "name" and value != getattr(b.base, field)
    ]
    if differing := [*differing, *a.config.differences(b.config)]:
        raise ValueError(f"adapters of one model and one config have a mean; of these differ {'; '.join(differing)}")
    shapes = [{name: tensor.shape for name, tensor in adapter.tensors.items()} for adapter in (a, b)]
    if shapes[0] != shapes[1]:
        raise ValueError("adapters of one model have a mean; the routers of these differ in number or shape")
