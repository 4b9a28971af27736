"""Paired bootstrap: how sure a difference between two models is that were measured on the same items.

Items (blocks of text, questions) are drawn with replacement and both models are scored on the same draw, so that what
makes an item hard for both does not widen the interval. Items that stand behind one prefix share its luck, and blocks
of one document its author: they are drawn together, so that an interval says what other prefixes and documents would
have given too. Intervals are percentile intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 1000
LEVEL = 0.95
FEWEST_ITEMS = 6  # of fewer, all lie on one side by chance alone more often than an interval is wrong
ROUNDING = 1e-12  # two means of the same scores, added up in floating point, can differ by less than this
FEWEST_TOGETHER = 8  # bundles of items: from fewer they are drawn too, and the wider interval counts

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
        return self.low - ROUNDING <= value <= self.high + ROUNDING

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
            together. Where the labels are fewer than `FEWEST_TOGETHER`, items are drawn as well, and of the two
            intervals the wider one is given.
    """
    columns, heft = _columns([values], weights)
    return _interval(lambda means: means[0], columns, heft, together, resamples, seed)


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
    return _interval(lambda means: means[1] - means[0], columns, heft, together, resamples, seed)


def paired_ratio(base: Values, other: Values, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """mean(other) / mean(base) over the same items, for scores that are never negative and not all 0."""
    columns, heft = _columns([base, other], None)
    if columns[0].mean() <= 0 or any(bool((column < 0).any()) for column in columns):
        raise ValueError("a ratio of scores needs a base above 0 and no score below it")

    def ratio(means: Tensor) -> Tensor:
        kept = means[:, means[0] > 0]  # a draw of nothing but zeros has no ratio
        return kept[1] / kept[0]

    return _interval(ratio, columns, heft, None, resamples, seed)


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


def standard_error(values: Values, together: Labels | None = None) -> float:
    """Of the mean of independent items; infinite for fewer than two. Of items that share their luck, `together`, the
    sums over each label's are what is independent; the greater error counts."""
    column = torch.as_tensor(values, dtype=torch.float64)
    if len(column) < 2:
        return math.inf
    alone = column.std().item() / math.sqrt(len(column))
    bundled = _bundled((column - column.mean())[:, None], together)
    if bundled is None:
        return alone
    count = len(bundled)
    return max(alone, math.sqrt(bundled.square().sum().item() * count / (count - 1)) / len(column))


def errors_above(values: Values, chance: float, together: Labels | None = None) -> float:
    """By how many standard errors the mean lies above `chance`. Below two, a task is at its floor for this model."""
    column = torch.as_tensor(values, dtype=torch.float64)
    above, error = column.mean().item() - chance, standard_error(column, together)
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


def _interval(
    figure: Callable[[Tensor], Tensor],
    columns: Sequence[Tensor],
    heft: Tensor,
    together: Labels | None,
    resamples: int,
    seed: int,
) -> Interval:
    """figure: of weighted means [columns, draws], one for each draw (or fewer, where it has none)."""
    if resamples < 2:
        raise ValueError(f"`resamples` must be at least 2, got {resamples}")
    products = torch.stack([*(column * heft for column in columns), heft], dim=1)  # [n, columns + 1]
    (estimate,) = figure(_means(products.sum(0, keepdim=True)))

    def drawn_from(sums: Tensor, count: int | None) -> Interval:
        generator, n = torch.Generator().manual_seed(seed), len(sums)
        drawn = torch.stack([sums[torch.randint(n, (n,), generator=generator)].sum(0) for _ in range(resamples)])
        values, outside = figure(_means(drawn)), (1 - LEVEL) / 2
        low, high = torch.quantile(values, torch.tensor([outside, 1 - outside], dtype=values.dtype)).tolist()
        return Interval(estimate.item(), low, high, len(heft), len(values), drawn_together=count)

    bundled = _bundled(products, together)
    if bundled is None:
        return drawn_from(products, None)
    found = drawn_from(bundled, len(bundled))
    if len(bundled) < FEWEST_TOGETHER:
        found = max(found, drawn_from(products, None), key=lambda one: one.high - one.low)
    return found


def _means(sums: Tensor) -> Tensor:
    """Sums [draws, columns + 1], the last of them that of the weights, as means [columns, draws]."""
    return (sums[:, :-1] / sums[:, -1:]).T


def _bundled(products: Tensor, together: Labels | None) -> Tensor | None:
    """Sums over the items of each label, or None where that leaves nothing to draw from."""
    if together is None:
        return None
    if len(together) != len(products):
        raise ValueError(f"`together` is a label for each of the {len(products)} items, got {len(together)}")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(together))}
    if len(numbers) < 2:
        return None
    index = torch.tensor([numbers[label] for label in together])
    return products.new_zeros(len(numbers), products.shape[1]).index_add_(0, index, products)


def _exponential(of: Interval) -> Interval:
    return replace(of, estimate=math.exp(of.estimate), low=math.exp(of.low), high=math.exp(of.high))
