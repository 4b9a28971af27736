"""The mean of adapters that one start led to.

Trainings that begin with the same routers keep their groups in step: group 3 of a layer stays group 3, whatever the
objective was. Their mean is then a router too, often a better one than its parts, at the cost of one. Routers of
different starts number their groups differently, and the mean of those is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.adapters import Adapter

# Of their size: trainings of one start end 0.1 to 0.4 apart, independent directions are sqrt(2).
UNRELATED = 1.0


class AdapterMean(NamedTuple):
    adapter: Adapter
    apart: float  # the farthest two, as a share of their size


def mean_of_adapters(adapters: Sequence[Adapter], weights: Sequence[float] | None = None) -> AdapterMean:
    """Every tensor's. weights: how much each counts, whatever their sum is."""
    if len(adapters) < 2:
        raise ValueError(f"a mean takes two adapters or more, got {len(adapters)}")
    weights = [1.0] * len(adapters) if weights is None else list(weights)
    if len(weights) != len(adapters):
        plural = "" if len(weights) == 1 else "s"
        raise ValueError(f"{len(weights)} weight{plural} for {len(adapters)} adapters: give one for each")
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights are numbers above 0, got {', '.join(f'{weight:g}' for weight in weights)}")
    first = adapters[0]
    for other in adapters[1:]:
        _check_alike(first, other)
    apart = max(distance(a, b) for i, a in enumerate(adapters) for b in adapters[:i])
    if apart >= UNRELATED:
        raise ValueError(
            f"these routers are {apart:.2f} of their size apart, so they come from different starts and number their "
            f"groups differently: average trainings that began with the same routers (the same seed and `start`)"
        )
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)

    def mean(name: str) -> Tensor:
        stacked = torch.stack([adapter.tensors[name] for adapter in adapters])
        return torch.tensordot(shares, stacked.double(), 1).to(stacked)

    tensors = {name: mean(name) for name in first.tensors}
    return AdapterMean(Adapter(first.config, first.base, tensors), apart)


def distance(a: Adapter, b: Adapter) -> float:
    """Of projections and centroids, which say what group is which, as a share of their size. Biases may move."""
    apart = size = 0.0
    for name, tensor in a.tensors.items():
        if not name.endswith(".bias"):
            other = b.tensors[name]
            apart += float((tensor - other).double().square().sum())
            size += _size(tensor) * _size(other)
    return math.sqrt(apart / size) if size else 0.0


def _size(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _check_alike(a: Adapter, b: Adapter) -> None:
    described = [{**adapter.config.to_dict(), **vars(adapter.base)} for adapter in (a, b)]
    differ = [
        f"`{field}` {value!r} and {described[1].get(field)!r}"
        for field, value in described[0].items()
        if field not in ("name", "backend") and value != described[1].get(field)
    ]
    if differ:
        raise ValueError(f"only adapters of one model and one config have a mean, but these have {', '.join(differ)}")
    if {name: tensor.shape for name, tensor in a.tensors.items()} != {
        name: tensor.shape for name, tensor in b.tensors.items()
    }:
        raise ValueError("only adapters of one model have a mean, but the routers of these differ in number or shape")
