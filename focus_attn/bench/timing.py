"""Timings of two ways to do one thing, and the length at which they change places."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

WORTH_WARMING_UP = 2.0  # seconds: what a first run pays extra is lost in anything longer


class Timing(NamedTuple):
    """Medians at one length."""

    length: int
    dense_seconds: float
    focus_seconds: float  # router included
    repeats: int

    @property
    def speedup(self) -> float:
        return self.dense_seconds / self.focus_seconds


class Contest(NamedTuple):
    """One length. `prepare` goes before each pair of runs and is not timed."""

    length: int
    dense: Callable[[], object]
    focus: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def compare(contests: Iterable[Contest], repeats: int = 3, seconds: float = math.inf) -> Iterator[Timing]:
    """Time dense and Focus in turns, so that a slow spell of the machine strikes both.

    Lengths go up; the first that is not expected to fit into `seconds` ends it, and long runs are repeated less often
    as time runs out. Short runs are preceded by one of each that is not counted.
    """
    deadline = time.perf_counter() + seconds
    last: Timing | None = None
    for length, dense, focus, prepare in contests:
        expected = 0.0
        if last is not None:  # between linear and quadratic
            expected = (last.dense_seconds + last.focus_seconds) * (length / last.length) ** 1.5
            if time.perf_counter() + expected > deadline:
                return
        prepare()
        if expected < WORTH_WARMING_UP:
            dense(), focus()
        times: list[tuple[float, float]] = []
        while len(times) < repeats:
            prepare()
            times.append((_seconds(dense), _seconds(focus)))
            if time.perf_counter() + sum(times[-1]) > deadline:
                break
        dense_times, focus_times = zip(*times, strict=True)
        last = Timing(length, statistics.median(dense_times), statistics.median(focus_times), len(times))
        yield last


def crossover(timings: list[Timing]) -> float | None:
    """The length from which Focus stays the faster one, interpolated between measured lengths on a logarithmic scale.

    None when it is the slower one at the longest length; the shortest length when it never is.
    """
    if not timings or timings[-1].speedup <= 1:
        return None
    slower = [index for index, timing in enumerate(timings) if timing.speedup <= 1]
    if not slower:
        return float(timings[0].length)
    before, after = timings[slower[-1]], timings[slower[-1] + 1]
    share = -math.log(before.speedup) / (math.log(after.speedup) - math.log(before.speedup))
    return before.length * (after.length / before.length) ** share


def describe_crossover(timings: list[Timing]) -> str:
    """The crossover in words, saying what was not measured."""
    if not timings:
        return "nothing was measured"
    at = crossover(timings)
    if at is None:
        return f"Focus was slower at every length up to {timings[-1].length:,}: the crossover lies beyond"
    if at == timings[0].length:
        return f"Focus was faster at every length from {timings[0].length:,} on"
    return f"Focus is faster from about {at:,.0f} tokens on"


def _seconds(run: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
