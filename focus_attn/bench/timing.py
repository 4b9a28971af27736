"""Timings of several ways to do one thing, in turns, and the length at which two of them change places."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

WORTH_WARMING_UP = 2.0  # seconds: what a first run pays extra is lost in anything longer
WARM_UPS = {"cuda": 3, "cpu": 1}  # a kind of call is recorded at its third time (attention/recorded.py)
QUICK, FEWEST_QUICK_RUNS = 0.2, 3  # what takes less than this share of the slowest runs at least so often
LONGEST_REASON = 200  # characters: compilers tell long stories


class Contender(NamedTuple):
    """One way to do it. `prepare` goes before each run, which happens inside `context`; neither is timed."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    context: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class Measured:
    """The timed runs of one contender."""

    times: list[float] = field(default_factory=list)  # seconds
    peak_bytes: int | None = None  # device memory above what was allocated before the run; None on the CPU
    warmed_up: bool = False
    failed: str | None = None  # why there are no times, or no more of them

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)


def race(
    contenders: Sequence[Contender],
    repeats: int = 3,
    deadline: float = math.inf,
    device: torch.device | str = "cpu",
    expected: Mapping[str, float] | None = None,
) -> dict[str, Measured]:
    """Time contenders in turns, so that a slow spell of the machine strikes all of them.

    Each runs uncounted before, unless it is expected (seconds) to take so long that a first run's extra cost is lost in
    it. No round begins that would end after `deadline` (perf_counter), but one always does. A contender that
    fails, out of memory or for want of a kernel, is out and says why.
    """
    measured = {contender.name: Measured() for contender in contenders}
    warm = [one for one in contenders if (expected or {}).get(one.name, 0.0) < WORTH_WARMING_UP]
    for contender in warm:
        one = measured[contender.name]
        for _ in range(WARM_UPS.get(torch.device(device).type, 1)):
            if one.failed is None:
                _timed_run(contender, one, device)
        one.times.clear()
        one.warmed_up = True
    for _ in range(repeats):
        start = time.perf_counter()
        for contender in contenders:
            if measured[contender.name].failed is None:
                _timed_run(contender, measured[contender.name], device)
        now = time.perf_counter()
        if now + (now - start) > deadline:
            break
    _repeat_quick_ones(contenders, measured, min(repeats, FEWEST_QUICK_RUNS), device)
    return measured


def _repeat_quick_ones(
    contenders: Sequence[Contender], measured: dict[str, Measured], runs: int, device: torch.device | str
) -> None:
    """Where a slow contender ended the rounds early, the quick ones still show their spread: they cost little."""
    slowest = max((one.seconds for one in measured.values() if one.times), default=0.0)
    for contender in contenders:
        one = measured[contender.name]
        while one.failed is None and len(one.times) < runs and one.seconds < QUICK * slowest:
            _timed_run(contender, one, device)


def _timed_run(contender: Contender, into: Measured, device: torch.device | str) -> None:
    on_gpu = torch.device(device).type == "cuda"
    contender.prepare()
    before = 0
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    try:
        with contender.context():
            into.times.append(clock(contender.run, device))
    except (RuntimeError, NotImplementedError) as error:  # out of memory is a RuntimeError too
        into.failed = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        return
    if on_gpu:
        into.peak_bytes = max(into.peak_bytes or 0, torch.cuda.max_memory_allocated(device) - before)


def clock(run: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """Seconds of one call, from an idle device to an idle device: the host's part of an eager call counts."""
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1000


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
    """What is to be raced at one length."""

    length: int
    contenders: Sequence[Contender]


def races(
    contests: Iterable[Contest], repeats: int = 3, seconds: float = math.inf, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Measured]]]:
    """One race a length. Lengths go up; the first that is not expected to fit into `seconds` ends it, and long runs are
    repeated less often as time runs out."""
    deadline = time.perf_counter() + seconds
    last_length, last = 0, dict[str, float]()
    for length, contenders in contests:
        # Between linear and quadratic.
        expected = {name: one * (length / last_length) ** 1.5 for name, one in last.items()}
        if last and time.perf_counter() + sum(expected.values()) > deadline:
            return
        measured = race(contenders, repeats, deadline, device, expected)
        for name, one in measured.items():
            if one.failed is not None:
                raise RuntimeError(f"{name} failed at {length:,} tokens: {one.failed}")
        last_length, last = length, {name: one.seconds for name, one in measured.items()}
        yield length, measured


def dense_and_focus(length: int, measured: Mapping[str, Measured]) -> Timing:
    """The contenders of these two names, of which there may be others."""
    return Timing(length, measured["dense"].seconds, measured["focus"].seconds, len(measured["focus"].times))


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
        where = "every length up to" if all(timing.speedup <= 1 for timing in timings) else "the longest length,"
        return f"Focus was slower at {where} {timings[-1].length:,}: the crossover lies beyond"
    if len(timings) == 1:
        return f"Focus was faster at {timings[0].length:,}, the only length that was measured"
    if at == timings[0].length:
        return f"Focus was faster at every length from {timings[0].length:,} on"
    return f"Focus is faster from about {at:,.0f} tokens on"
