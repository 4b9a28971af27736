"""Paired bootstrap: how sure a difference between two models is that were measured on the same items.

Items (blocks of text, questions) are drawn with replacement and both models are scored on the same draw, so that what
makes an item hard for both does not widen the interval. Items that stand behind one prefix share its luck: they are
drawn together, so that an interval says what other prefixes would have given too. Intervals are percentile intervals.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 1000
LEVEL = 0.95
FEWEST_TOGETHER = 8  # bundles of items: draws of fewer say less than draws of the items do

Values = Sequence[float] | Tensor  # one for each item
Labels = Sequence[Hashable]  # likewise; items with the same one are drawn together


@dataclass(frozen=True)
class Interval:
    """An estimate and where it lies with the given confidence."""

    estimate: float
    low: float
    high: float
    n: int  # items
    resamples: int = RESAMPLES
    level: float = LEVEL
    drawn_together: int | None = None  # bundles of items that were drawn from; None: items were

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.estimate:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean_interval(
    values: Values,
    weights: Values | None = None,
    *,
    together: Labels | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The mean of one model's scores over items.

    Args:
        together: a label for each item; those with the same one, such as the prefix they stand behind, are drawn
            together, unless there are too few labels for that (`FEWEST_TOGETHER`).
    """
    (column,), heft = _columns([values], weights)
    bundles = _bundles(together, len(heft))
    drawn = _means([column], heft, bundles, resamples, seed)[0]
    return _interval(column @ heft / heft.sum(), drawn, len(heft), bundles)


def paired_difference(
    base: Values,
    other: Values,
    weights: Values | None = None,
    *,
    together: Labels | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """mean(other) - mean(base) over the same items. 0 in the interval: no difference can be told."""
    columns, heft = _columns([base, other], weights)
    bundles = _bundles(together, len(heft))
    first, second = (column @ heft / heft.sum() for column in columns)
    drawn = _means(columns, heft, bundles, resamples, seed)
    return _interval(second - first, drawn[1] - drawn[0], len(heft), bundles)


def paired_ratio(base: Values, other: Values, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """mean(other) / mean(base) over the same items, for scores that are never negative and not all 0."""
    columns, heft = _columns([base, other], None)
    first, second = (column.mean() for column in columns)
    if first <= 0 or any(bool((column < 0).any()) for column in columns):
        raise ValueError("a ratio of scores needs a base above 0 and no score below it")
    drawn = _means(columns, heft, None, resamples, seed)
    kept = drawn[:, drawn[0] > 0]  # a draw of nothing but zeros has no ratio
    return _interval(second / first, kept[1] / kept[0], len(heft))


def perplexity_ratio(
    base_losses: Values,
    other_losses: Values,
    tokens: Values | None = None,
    *,
    together: Labels | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """other's perplexity over base's, from the mean loss of each block. 1 in the interval: no difference can be told.

    Args:
        base_losses: mean -log p of a block's predictions, one for each block.
        tokens: predictions in each block, where they are not all the same.
    """
    return _exponential(
        paired_difference(base_losses, other_losses, tokens, together=together, resamples=resamples, seed=seed)
    )


def perplexity_interval(
    losses: Values,
    tokens: Values | None = None,
    *,
    together: Labels | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """One model's perplexity, from the mean loss of each block."""
    return _exponential(mean_interval(losses, tokens, together=together, resamples=resamples, seed=seed))


def standard_error(values: Values) -> float:
    """Of the mean of independent items; infinite for fewer than two."""
    column = torch.as_tensor(values, dtype=torch.float64)
    return column.std().item() / math.sqrt(len(column)) if len(column) > 1 else math.inf


def errors_above(values: Values, chance: float) -> float:
    """By how many standard errors the mean lies above `chance`. Below two, a task is at its floor for this model."""
    column = torch.as_tensor(values, dtype=torch.float64)
    above, error = column.mean().item() - chance, standard_error(column)
    if error == 0:
        return math.inf if above > 0 else 0.0
    return above / error


def _columns(columns: Sequence[Values], weights: Values | None) -> tuple[list[Tensor], Tensor]:
    tensors = [torch.as_tensor(column, dtype=torch.float64).cpu() for column in columns]
    heft = torch.ones_like(tensors[0]) if weights is None else torch.as_tensor(weights, dtype=torch.float64).cpu()
    lengths = [tuple(x.shape) for x in (*tensors, heft)]
    if len(set(lengths)) > 1 or tensors[0].dim() != 1 or not len(heft):
        raise ValueError(f"paired scores are one number for each of the same items (at least one), got {lengths}")
    if not all(bool(torch.isfinite(x).all()) for x in (*tensors, heft)) or not bool((heft > 0).all()):
        raise ValueError("scores must be finite and weights positive: a NaN or an infinity would hide in a mean")
    return tensors, heft


def _bundles(together: Labels | None, items: int) -> Tensor | None:
    """The number of each item's bundle, or None where items are to be drawn one by one."""
    if together is None:
        return None
    if len(together) != items:
        raise ValueError(f"`together` is a label for each of the {items} items, got {len(together)}")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(together))}
    if len(numbers) < FEWEST_TOGETHER:
        return None
    return torch.tensor([numbers[label] for label in together])


def _means(columns: Sequence[Tensor], heft: Tensor, bundles: Tensor | None, resamples: int, seed: int) -> Tensor:
    """Weighted means of resampled items, the same items for every column, [columns, resamples]."""
    if resamples < 2:
        raise ValueError(f"`resamples` must be at least 2, got {resamples}")
    generator = torch.Generator().manual_seed(seed)
    products = torch.stack([*(column * heft for column in columns), heft], dim=1)  # [n, columns + 1]
    if bundles is not None:
        products = products.new_zeros(int(bundles.max()) + 1, products.shape[1]).index_add_(0, bundles, products)
    n = len(products)
    sums = torch.stack([products[torch.randint(n, (n,), generator=generator)].sum(0) for _ in range(resamples)])
    return (sums[:, :-1] / sums[:, -1:]).T


def _interval(estimate: Tensor, drawn: Tensor, n: int, bundles: Tensor | None = None) -> Interval:
    outside = (1 - LEVEL) / 2
    low, high = torch.quantile(drawn, torch.tensor([outside, 1 - outside], dtype=drawn.dtype)).tolist()
    count = None if bundles is None else int(bundles.max()) + 1
    return Interval(estimate.item(), low, high, n, len(drawn), drawn_together=count)


def _exponential(of: Interval) -> Interval:
    return replace(of, estimate=math.exp(of.estimate), low=math.exp(of.low), high=math.exp(of.high))
