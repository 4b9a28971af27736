"""`focus bench attention`: Focus against every dense attention that is here, in one run.

Ids are drawn anew before every timed call. Drawing is not timed; sorting, planning, reading sizes back and launching
are. A setting that fails its parity check gets no speed-up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from focus_attn.attention.backends import choose_backend
from focus_attn.bench import peers
from focus_attn.bench.flex import flex_attend, mask_bytes
from focus_attn.bench.options import AttentionOptions
from focus_attn.bench.parity import Verdict, check_against_oracle, check_rows
from focus_attn.bench.peers import FLEX
from focus_attn.bench.setting import Groups, Inputs, Setting, causal_pairs, run_pass
from focus_attn.bench.timing import Contender, Measured, Timing, race

SCOUT = 8192  # tokens: where compiling is paid for and slow peers are found before the first long length
LONG_CALL = 2.0  # seconds a call: from here on only the peers that may be the fastest are worth their time
HOPELESS = 1.25  # times the fastest
SECONDS_A_LENGTH = 20.0  # rounds stop there: a million dense tokens are timed once
FLEX_NAME = "flex (same mask)"
PASS_NAMES = {False: "forward", True: "forward + backward"}


@dataclass(frozen=True)
class Row:
    """One length, K, pass and backend."""

    length: int
    setting: Setting
    backend: str  # what `auto` stood for
    backward: bool
    peers: dict[str, Measured]  # dense ones and flex
    baseline: str | None  # the fastest dense one
    focus: Measured
    pairs: float  # visible pairs of a head
    verdicts: list[Verdict]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def parity(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def pairs_ratio(self) -> float:
        """Pairs of dense attention over pairs kept."""
        return causal_pairs(self.length) / self.pairs

    @property
    def timing(self) -> Timing | None:
        """None where there is no speed-up to report: parity failed, or one side did not run."""
        if not self.parity or self.baseline is None or not self.focus.times:
            return None
        return Timing(self.length, self.peers[self.baseline].seconds, self.focus.seconds, len(self.focus.times))

    @property
    def speedup_spread(self) -> tuple[float, float] | None:
        """The slowest Focus run against the fastest dense one, and the other way round."""
        if self.timing is None or self.baseline is None:
            return None
        dense, focus = self.peers[self.baseline].times, self.focus.times
        return min(dense) / max(focus), max(dense) / min(focus)

    def tflops(self, name: str | None = None) -> float:
        """Of a peer, or of Focus: over the pairs it has to compute, not over what it computes and masks."""
        if name is None or name == FLEX_NAME:
            pairs, measured = self.pairs, self.focus if name is None else self.peers[name]
        else:
            pairs, measured = causal_pairs(self.length), self.peers[name]
        return self.setting.shape.flops(pairs, self.backward) / measured.seconds / 1e12

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        timing, spread = self.timing, self.speedup_spread
        return {
            "length": self.length,
            "K": self.setting.ids.num_groups,
            "query_k": self.setting.ids.query_k,
            "key_k": self.setting.ids.key_k,
            "pass": PASS_NAMES[self.backward],
            "backend": self.backend,
            "baseline": self.baseline,
            "speedup": None if timing is None else round(timing.speedup, 3),
            "speedup_spread": None if spread is None else [round(x, 3) for x in spread],
            "pairs_kept": round(self.pairs),
            "pairs_kept_share": round(1 / self.pairs_ratio, 5),
            "pairs_ratio": round(self.pairs_ratio, 3),
            "focus": self._measured(self.focus, None),
            "peers": {name: self._measured(one, name) for name, one in self.peers.items() if one.times},
            "left_out": self.left_out,
            "parity": {
                "ok": self.parity,
                "checks": [verdict._asdict() | {"ok": verdict.ok} for verdict in self.verdicts],
            },
        }

    def _measured(self, one: Measured, name: str | None) -> dict[str, Any] | None:
        if not one.times or (name is None and not self.parity):
            return None
        return {
            "ms": round(1e3 * one.seconds, 4),
            "min_ms": round(1e3 * min(one.times), 4),
            "max_ms": round(1e3 * max(one.times), 4),
            "repeats": len(one.times),
            "warmed_up": one.warmed_up,
            "tflops": float(f"{self.tflops(name):.4g}"),
            "peak_MiB_above_inputs": None if one.peak_bytes is None else round(one.peak_bytes / 2**20, 1),
        }


class Sweep:
    """Runs the lengths one after the other, remembering what the last one took and what failed."""

    def __init__(self, options: AttentionOptions) -> None:
        self.options = options
        self.device = options.shape.device
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        grouped = options.shape.kv_heads != options.shape.heads
        self.dense, self.not_here = peers.dense_peers(options.peers, self.device, grouped)
        if not self.dense:
            reasons = ", ".join(f"{name}: {reason}" for name, reason in self.not_here.items())
            raise ValueError(f"--peers leaves no dense attention to compare with here ({reasons})")
        self.deadline = time.perf_counter() + options.seconds
        self.last: dict[bool, tuple[int, dict[str, float]]] = {}  # pass -> length, seconds by contender
        self.failed: dict[bool, dict[str, str]] = {False: {}, True: {}}  # pass -> why, by contender
        self.oracle: dict[tuple[Setting, bool], Verdict] = {}
        self.stopped: str | None = None  # why the rest of the lengths was not measured

    def rows(self) -> Iterator[Row]:
        """Lengths go up; the first that is not expected to fit into the time given ends it."""
        if self.options.lengths[0] > 2 * SCOUT:
            for backward in self.options.passes:
                self._measure(SCOUT, backward, repeats=1)
        for length in self.options.lengths:
            for backward in self.options.passes:
                needed = self._round_seconds(length, backward)
                if self.last and time.perf_counter() + needed > self.deadline:
                    self.stopped = (
                        f"{length:,} tokens, {PASS_NAMES[backward]}, would take about {needed:.0f} s a round: beyond "
                        f"the {self.options.seconds:.0f} s given; --seconds gives more"
                    )
                    return
                yield from self._measure(length, backward, self.options.repeats)

    def _expected(self, length: int, backward: bool) -> dict[str, float]:
        """Seconds by contender: time grows at most with the square of the length, the backward at most fourfold."""
        for known, growth in ((backward, 1.0), (False, 4.0)):
            if known in self.last:
                shorter, seconds = self.last[known]
                return {name: one * growth * (length / shorter) ** 2 for name, one in seconds.items()}
        return {}

    def _round_seconds(self, length: int, backward: bool) -> float:
        expected = self._expected(length, backward)
        left_out = self._left_out(length, expected, backward)
        return sum(one for name, one in expected.items() if name not in left_out)

    def _left_out(self, length: int, expected: dict[str, float], backward: bool) -> dict[str, str]:
        """Contenders that are not here, failed before, or take long without a chance of being the baseline."""
        reasons = self.not_here | self.failed[backward]
        seconds = {peer.name: expected[peer.name] for peer in self.dense if peer.name in expected}
        best = min(seconds, key=seconds.__getitem__, default="")
        for name, one in seconds.items():
            if one > LONG_CALL and one > HOPELESS * seconds[best]:
                reasons[name] = f"{one / seconds[best]:.1f} times the time of {best} at a shorter length"
        for setting in self.options.settings if FLEX in self.options.peers else ():
            name, shape = _flex_name(setting), self.options.shape
            needed = mask_bytes(length, setting.ids.routers, shape.heads)
            if expected.get(name, 0.0) > LONG_CALL:
                reasons[name] = f"would take about {expected[name]:.0f} s a call at {length:,} tokens"
            elif self.device.type == "cuda" and needed > torch.cuda.mem_get_info(self.device)[1] / 4:
                reasons[name] = f"its block mask would take {needed / 2**30:.0f} GiB at {length:,} tokens"
        return reasons

    def _measure(self, length: int, backward: bool, repeats: int) -> list[Row]:
        expected = self._expected(length, backward)
        left_out = self._left_out(length, expected, backward)
        inputs = self.options.shape.draw(length, backward, self.generator)
        entries = [_Entry(self, setting, inputs) for setting in self.options.settings]
        running = peers.contenders([peer for peer in self.dense if peer.name not in left_out], inputs)
        for entry in entries:
            if entry.is_right:
                running += [entry.focus()] if entry.name not in self.failed[backward] else []
                running += [entry.flex()] if FLEX in self.options.peers and entry.flex_name not in left_out else []
        running = list({contender.name: contender for contender in running}.values())  # flex once for each K
        deadline = min(self.deadline, time.perf_counter() + SECONDS_A_LENGTH)
        measured = race(running, repeats, deadline, self.device, expected)
        self.failed[backward] |= {name: one.failed for name, one in measured.items() if one.failed is not None}
        taken = {name: one.seconds for name, one in measured.items() if one.times}
        self.last[backward] = length, expected | taken
        return [entry.row(measured, left_out | self.failed[backward]) for entry in entries]

    def check(self, setting: Setting, backward: bool) -> Verdict:
        """Against the oracle, once for each setting and pass."""
        if (setting, backward) not in self.oracle:
            self.oracle[setting, backward] = check_against_oracle(setting, backward, self.generator)
        return self.oracle[setting, backward]


class _Entry:
    """One setting at one length: its ids, drawn anew for every call, and what is known of it."""

    def __init__(self, sweep: Sweep, setting: Setting, inputs: Inputs) -> None:
        self.sweep, self.setting, self.inputs = sweep, setting, inputs
        self.length, self.backward = inputs.q.shape[2], inputs.grad is not None
        self.name, self.flex_name = f"Focus {setting.backend} K={setting.ids.num_groups}", _flex_name(setting)
        self.groups = self._draw()
        self.backend = setting.backend
        if self.backend == "auto":
            self.backend = choose_backend(setting.example_call(self.length))
        self.pairs = setting.count_pairs(self.groups)
        self.verdicts = [sweep.check(setting, self.backward)]
        if self.is_right and self.name not in sweep.failed[self.backward]:
            try:
                self.verdicts.append(check_rows(setting, inputs, self.groups, sweep.generator))
            except torch.OutOfMemoryError:
                sweep.failed[self.backward][self.name] = "out of memory"

    @property
    def is_right(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts)

    def focus(self) -> Contender:
        attend = self.setting.attend(self.groups)

        def redraw() -> None:
            nonlocal attend
            attend = self.setting.attend(self._draw())

        return Contender(self.name, lambda: run_pass(attend, self.inputs), redraw)

    def flex(self) -> Contender:
        def redraw() -> None:  # in place: a compiled mask holds on to its tensors
            for old, new in zip(self.groups, self._draw(), strict=True):
                old.copy_(new)

        attend = flex_attend(self.groups, self.setting.pattern, self.setting.shape.heads)
        return Contender(self.flex_name, lambda: run_pass(attend, self.inputs), redraw)

    def _draw(self) -> Groups:
        return self.setting.draw_groups(self.length, self.sweep.generator)

    def row(self, measured: dict[str, Measured], left_out: dict[str, str]) -> Row:
        dense = {peer.name for peer in self.sweep.dense}
        names = {name: name for name in (*dense, *self.sweep.not_here)}
        names |= {self.name: "Focus", self.flex_name: FLEX_NAME}  # those of other settings are not its business
        ran = {names[name]: one for name, one in measured.items() if name in names and one.failed is None}
        focus = ran.pop("Focus", Measured())
        baseline = min((name for name in ran if name in dense), key=lambda name: ran[name].seconds, default=None)
        return Row(
            self.length,
            self.setting,
            self.backend,
            self.backward,
            ran,
            baseline,
            focus,
            self.pairs,
            self.verdicts,
            {names[name]: reason for name, reason in left_out.items() if name in names},
        )


def _flex_name(setting: Setting) -> str:
    return f"flex K={setting.ids.num_groups}"  # the same for every backend
