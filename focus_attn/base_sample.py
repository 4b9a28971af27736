"""A few numbers of every weight of a model: enough to tell it from others of the same shape, whose routers would mean
nothing to it. Names say little: a model may be copied, renamed, or trained further under the name it had."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

SAMPLED = 8  # numbers of a weight
ROUNDING = 5e-3  # more than two roundings to half precision

Sample = dict[str, list[float]]


def sample_of(weights: Iterable[tuple[str, Tensor]]) -> Sample:
    """Of those that are at hand: no shard, nothing quantised, nothing offloaded. peft's names for what it wraps are
    those of the model itself."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): _first(x)
        for name, x in weights
        if type(x.data) is Tensor and not x.is_meta and x.is_floating_point() and x.element_size() > 1
    }


def sample_of_files(folder: Path) -> Sample:
    """Of a model that transformers has saved there."""
    sample: Sample = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                part = file.get_slice(name)
                shape = part.get_shape()
                some = file.get_tensor(name) if not shape else part[:1] if len(shape) > 1 else part[:SAMPLED]
                sample[name] = _first(some)
    return sample


def is_same(one: Sample, other: Sample) -> bool:
    """As far as both know it, whatever precision each was read in."""
    return all(
        math.isclose(a, b, rel_tol=ROUNDING, abs_tol=1e-6)
        for name in one.keys() & other.keys()
        for a, b in zip(one[name], other[name], strict=False)
    )


def _first(weight: Tensor) -> list[float]:
    numbers: list[float] = weight.detach().flatten()[:SAMPLED].float().tolist()
    return numbers
