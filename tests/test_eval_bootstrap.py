"""The paired bootstrap against what statistics says it must do."""

import math

import pytest
import torch

from focus_attn.evaluation.bootstrap import (
    Interval,
    errors_above,
    mean_interval,
    paired_difference,
    paired_ratio,
    perplexity_interval,
    perplexity_ratio,
    standard_error,
)


def normal(n, seed, mean=0.0, std=1.0):
    return mean + std * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_interval_of_a_mean_is_as_wide_as_its_standard_error_says():
    values = normal(400, seed=1)
    interval = mean_interval(values)
    assert interval.estimate == pytest.approx(values.mean().item())
    assert interval.low < interval.estimate < interval.high
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * standard_error(values), rel=0.1)
    assert (interval.n, interval.resamples, interval.level) == (400, 1000, 0.95)


def test_ninety_five_percent_means_that():
    hits = sum(mean_interval(normal(50, seed), resamples=200).contains(0) for seed in range(200))
    assert 0.90 <= hits / 200 <= 0.98


def test_pairing_takes_out_what_items_have_in_common():
    base = normal(100, seed=2, std=5)
    other = base + normal(100, seed=3, mean=0.1, std=0.1)
    paired, alone = paired_difference(base, other), mean_interval(other)
    assert paired.estimate == pytest.approx((other - base).mean().item())
    assert paired.low > 0  # a difference of a fiftieth of the spread is seen
    assert paired.high - paired.low < (alone.high - alone.low) / 20


def test_equal_scores_give_an_interval_without_width():
    losses = normal(10, seed=4, mean=3)
    ratio = perplexity_ratio(losses, losses)
    assert (ratio.estimate, ratio.low, ratio.high) == (1, 1, 1)


def test_a_ratio_of_perplexities_weighs_blocks_by_their_tokens():
    base, other, tokens = [1.0, 3.0], [1.5, 3.0], [30, 10]
    expected = math.exp((1.5 * 30 + 3 * 10) / 40) / math.exp((1 * 30 + 3 * 10) / 40)
    ratio = perplexity_ratio(base, other, tokens)
    assert ratio.estimate == pytest.approx(expected)
    assert ratio.low == pytest.approx(1) and ratio.high == pytest.approx(math.exp(0.5))  # one block alone, each way
    assert perplexity_interval(base, tokens).estimate == pytest.approx(math.exp(1.5))


def test_a_ratio_of_scores():
    base, other = [1.0] * 40 + [0.0] * 10, [1.0] * 36 + [0.0] * 14
    ratio = paired_ratio(base, other)
    assert ratio.estimate == pytest.approx(0.9) and 0.75 < ratio.low < 0.9 < ratio.high <= 1
    with pytest.raises(ValueError, match="above 0"):
        paired_ratio([0.0, 0.0], [1.0, 0.0])


def test_same_seed_same_interval():
    values = normal(30, seed=5)
    assert mean_interval(values, seed=7) == mean_interval(values, seed=7) != mean_interval(values, seed=8)


def test_floor():
    right = [1.0] * 55 + [0.0] * 45
    assert errors_above(right, 0.25) > 5 and errors_above(right, 0.5) < 2
    assert errors_above([1.0] * 9, 0.25) == math.inf and errors_above([0.0] * 9, 0.25) == 0


@pytest.mark.parametrize("base, other, weights", [([1], [1, 2], None), ([], [], None), ([1, 2], [1, 2], [1])])
def test_unpaired_scores_are_refused(base, other, weights):
    with pytest.raises(ValueError, match="same items"):
        paired_difference(base, other, weights)


def test_nan_and_too_few_resamples_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        mean_interval([1.0, math.nan])
    with pytest.raises(ValueError, match="`resamples`"):
        mean_interval([1.0, 2.0], resamples=1)


def behind_prefixes(seed, prefixes=16, items=25):
    """Differences of items that share the luck of their prefix, and which one each has."""
    make = torch.Generator().manual_seed(seed)
    luck = torch.randn(prefixes, 1, generator=make, dtype=torch.float64)
    values = luck + torch.randn(prefixes, items, generator=make, dtype=torch.float64)
    return values.flatten(), [f"prefix {number // items}" for number in range(prefixes * items)]


def test_what_stands_behind_one_prefix_is_drawn_together():
    together, alone = 0, 0
    for seed in range(200):
        values, prefixes = behind_prefixes(seed)
        interval = mean_interval(values, together=prefixes, resamples=200)
        together += interval.contains(0)
        alone += mean_interval(values, resamples=200).contains(0)
        assert (interval.n, interval.drawn_together) == (400, 16)
    assert 0.87 <= together / 200 <= 0.98 and alone / 200 < 0.5  # one by one they pretend to know the prefixes


def test_of_few_prefixes_the_wider_interval_counts():
    values, prefixes = behind_prefixes(0, prefixes=4)
    zeros, luck = torch.zeros_like(values), paired_difference(torch.zeros_like(values), values, together=prefixes)
    alone = paired_difference(zeros, values)
    assert luck.drawn_together == 4 and luck.high - luck.low > alone.high - alone.low
    alike = values.view(4, 25) - values.view(4, 25).mean(1, keepdim=True)  # no luck: every prefix has the same mean
    assert paired_difference(zeros, alike.flatten(), together=prefixes) == paired_difference(zeros, alike.flatten())
    assert mean_interval(values, together=["one"] * 100) == mean_interval(values)


def test_labels_are_for_items():
    values, prefixes = behind_prefixes(0, prefixes=7)
    with pytest.raises(ValueError, match="a label for each of the 175 items"):
        perplexity_ratio(values, values, together=prefixes[1:])


def test_items_that_share_their_luck_are_not_so_many():
    luck = normal(16, seed=3).repeat_interleave(60)
    labels = [number // 60 for number in range(960)]
    assert standard_error(luck, labels) == pytest.approx(standard_error(luck[::60]), rel=0.01)
    independent = normal(960, seed=4)
    assert standard_error(independent) <= standard_error(independent, labels) < 2 * standard_error(independent)
    assert errors_above(luck + 0.2, 0.0) > 2 > errors_above(luck + 0.2, 0.0, labels)


def test_means_of_the_same_scores_that_differ_by_rounding_are_equal():
    rounded = (0.1 + 0.2 + 0.3) / 3 - (0.3 + 0.2 + 0.1) / 3
    assert rounded != 0.0
    for high in (rounded, -rounded):
        assert Interval(-0.02, -0.04, high, 100).contains(0.0)
    assert not Interval(-0.02, -0.04, -1e-4, 100).contains(0.0)
