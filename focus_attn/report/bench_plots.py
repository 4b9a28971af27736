"""Speed-up over length, drawn from measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from focus_attn.bench.attention import PASS_NAMES, Row
from focus_attn.bench.prefill import PrefillRow
from focus_attn.report.plots import DENSE, FOCUS, STYLE, check_matplotlib
from focus_attn.targets import check_targets

COLORS = (FOCUS, "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")
SUFFIXES = (".png", ".svg")


def check_plot_file(path: Path) -> None:
    check_matplotlib()
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    check_targets(path)


def plot_attention(rows: Sequence[Row], title: str, path: Path) -> None:
    """A line for each K, pass and backend, with the two that say what to expect of it."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row.timing is not None:
            label = f"K = {row.setting.ids.num_groups}, {PASS_NAMES[row.backward]}, {row.setting.backend}"
            lines.setdefault(label, []).append(row)
    with _figure(title, path) as axes:
        for color, (label, line) in zip(COLORS * len(lines), lines.items(), strict=False):
            lengths = [row.length for row in line]
            timings = [row.timing for row in line if row.timing is not None]
            spreads = [row.speedup_spread or (0.0, 0.0) for row in line]
            axes.plot(lengths, [timing.speedup for timing in timings], marker="o", color=color, label=label)
            axes.fill_between(lengths, *zip(*spreads, strict=True), color=color, alpha=0.15, linewidth=0)
            axes.plot(lengths, [row.pairs_ratio for row in line], linestyle="--", linewidth=1, color=color)
            axes.plot(lengths, weighted_ratios(line), linestyle=":", linewidth=1.2, color=color)
        axes.plot([], [], linestyle="--", color=DENSE, label="pairs ratio: dense pairs / pairs kept")
        axes.plot(
            [],
            [],
            linestyle=":",
            color=DENSE,
            label="pairs ratio x dense TFLOP/s, best of the run / at this length:\n"
            "Focus if it ran every pair at the dense kernel's best rate",
        )
        _finish(axes, sorted({row.length for row in rows}), "speed-up over the fastest dense attention")


def weighted_ratios(line: Sequence[Row]) -> list[float]:
    """The pairs ratio times the baseline's best rate over its rate at each length, of rows with one K and pass."""
    rates = [row.tflops(row.baseline) for row in line]
    return [row.pairs_ratio * max(rates) / rate for row, rate in zip(line, rates, strict=True)]


def plot_prefill(rows: Sequence[PrefillRow], title: str, path: Path) -> None:
    with _figure(title, path) as axes:
        lengths = [row.length for row in rows]
        axes.plot(
            lengths, [row.timing.speedup for row in rows], marker="o", color=FOCUS, label="Focus, routers included"
        )
        without = [row.dense.seconds / (row.focus.seconds - row.routers.seconds) for row in rows]
        axes.plot(lengths, without, linestyle="--", linewidth=1, color=FOCUS, label="Focus less the routers' time")
        _finish(axes, lengths, "prefill speed-up over the dense model")


def _finish(axes: Any, lengths: list[int], what: str) -> None:
    axes.axhline(1.0, color=DENSE, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.set_ylabel(what)
    axes.legend(fontsize=8)


@contextmanager
def _figure(title: str, path: Path) -> Iterator[Any]:
    """Axes to draw on; the file is written afterwards."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": "focus"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.6, 5.2), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left", fontsize=8, wrap=True)
        yield axes
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
