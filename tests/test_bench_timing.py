"""The clock, the turns, the deadline, and the length where two lines cross."""

import time

import pytest
import torch

from focus_attn.bench import Timing, crossover, describe_crossover, dtype, timing
from focus_attn.bench.timing import Contender, Contest, clock, dense_and_focus, race, races


def noted(calls: list[str], name: str) -> Contender:
    return Contender(name, lambda: calls.append(name), lambda: calls.append(f"prepare {name}"))


def test_contenders_run_in_turns_and_prepare_before_every_run():
    calls: list[str] = []
    measured = race([noted(calls, "a"), noted(calls, "b")], repeats=2)
    assert calls == ["prepare a", "a", "prepare b", "b"] * 3  # one round to warm up
    assert [len(one.times) for one in measured.values()] == [2, 2]


def test_preparing_is_not_timed():
    slow = Contender("slow", lambda: None, lambda: time.sleep(0.3))
    assert race([slow], repeats=1)["slow"].seconds < 0.2
    assert clock(lambda: time.sleep(0.02)) >= 0.02


def test_what_is_expected_to_take_long_is_not_warmed_up():
    calls: list[str] = []
    measured = race([noted(calls, "a"), noted(calls, "b")], repeats=1, expected={"a": 100.0})
    assert calls.count("a") == 1 and calls.count("b") == 2
    assert not measured["a"].warmed_up and measured["b"].warmed_up


def test_a_contender_that_fails_is_out_and_says_why():
    def fail() -> None:
        raise RuntimeError("no kernel\n  for this. " + 1000 * "A long story. ")

    measured = race([Contender("broken", fail), Contender("fine", lambda: None)], repeats=2)
    assert measured["broken"].failed.startswith("no kernel for this. A long") and len(measured["broken"].failed) == 200
    assert not measured["broken"].times
    assert len(measured["fine"].times) == 2
    with pytest.raises(RuntimeError, match="broken failed at 8 tokens: no kernel"):
        list(races([Contest(8, [Contender("broken", fail)])]))


def test_a_mistake_of_the_user_is_no_failed_contender():
    def refuse() -> None:
        raise ValueError("`window` must be at least 0")

    with pytest.raises(ValueError, match="window"):
        race([Contender("refused", refuse)])


def test_one_slow_round_ends_it_and_quick_ones_still_show_their_spread():
    slow, quick = Contender("slow", lambda: time.sleep(0.3)), Contender("quick", lambda: None)
    measured = race([slow, quick], repeats=5, deadline=time.perf_counter(), expected={"slow": 100.0})
    assert len(measured["slow"].times) == 1
    assert len(measured["quick"].times) == 3


def test_lengths_stop_when_time_is_up():
    def contests() -> list[Contest]:
        return [Contest(length, [noted([], "dense"), noted([], "focus")]) for length in (1, 2)]

    assert [length for length, _ in races(contests(), repeats=2)] == [1, 2]
    ((length, measured),) = races(contests(), repeats=2, seconds=1e-9)
    assert dense_and_focus(length, measured).length == 1


def test_crossover_is_not_claimed_where_the_longest_length_is_slower():
    timings = [Timing(1000, 2.0, 1.0, 3), Timing(2000, 2.0, 4.0, 3)]
    assert crossover(timings) is None
    assert "at the longest length, 2,000" in describe_crossover(timings)


def test_a_cuda_call_is_timed_from_idle_to_idle(monkeypatch):
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def elapsed_time(self, end: object) -> float:
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("idle"))
    assert clock(lambda: log.append("call"), "cuda") == 0.25
    assert log == ["idle", "record", "call", "record", "idle"]


def test_memory_is_the_peak_of_the_call_above_what_was_there(monkeypatch):
    allocated = {"now": 100, "peak": 900}

    def call() -> float:
        allocated["peak"] = 340
        return 1.0

    monkeypatch.setattr(timing, "clock", lambda run, device: run())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: allocated.update(peak=allocated["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated["peak"])
    assert race([Contender("a", call)], repeats=1, device="cuda")["a"].peak_bytes == 240


@pytest.mark.parametrize(
    ("half", "full", "expected", "sizes"),
    [
        ({64: 40.0}, {64: 1.0}, torch.float32, {64}),  # emulated: a large product would take a minute
        ({64: 2.0, 1024: 1.0}, {64: 1.0, 1024: 2.0}, torch.bfloat16, {64, 1024}),
        ({64: 1.0, 1024: 1.0}, {64: 1.0, 1024: 1.2}, torch.float32, {64, 1024}),
    ],
)
def test_bf16_is_taken_where_it_is_clearly_faster(half, full, expected, sizes, monkeypatch):
    asked = set()

    def seconds(dtype, device, size):
        asked.add(size)
        return (half if dtype == torch.bfloat16 else full)[size]

    monkeypatch.setattr(dtype, "_seconds_a_product", seconds)
    dtype._fastest.cache_clear()
    assert dtype.fastest_dtype() == expected
    assert asked == sizes
    dtype._fastest.cache_clear()
