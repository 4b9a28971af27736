"""Quality over cost: perplexity against multiply-adds and against the measured time; and groups over a training."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from focus_attn.compare.recipe import Comparison
from focus_attn.compare.store import Cell
from focus_attn.compare.table import BLOCKS, Place, Row, make_rows, place_of, places
from focus_attn.report.plots import DENSE, FOCUS, STYLE

MARKERS = {"skips": "o", "selects": "s", "dense": "D"}
COLORS = {"skips": "#d97706", "selects": "#059669", "dense": DENSE}
CURVES = (FOCUS, "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")
LINES = ("-", "--", ":")  # of each round through the colours
# Shares of a panel.
MARGIN, SIDE_MARGIN, NAME_HEIGHT, LETTER_WIDTH, POINT_WIDTH = 0.1, 1 / 7, 0.035, 0.0115, 0.02
GAP = 3  # letters between two names
OFF_THE_SCALE = 1.5  # times the base's perplexity: such rows are named at the upper edge,
MOST_OFF = 1 / 3  # of the rows at most; where more are so far off, the panel reaches further


def draw(comparison: Comparison, cells: Sequence[Cell], path: Path) -> list[Path]:
    """The files: a figure for each place; where there are several, the name says which."""
    rows = make_rows(cells)
    here = places(rows)
    telling, files = _telling_apart(here), []
    for at in here:
        which = (re.sub(r"[^\w.-]+", "_", str(getattr(at, name))) for name in telling)
        file = path.with_stem("-".join([path.stem, *which]))
        title = f"{comparison.title}: {at.model}, {at.data}, {at.length:,} tokens. {comparison.note or ''}"
        if comparison.curves:
            plot_curves([cell for cell in cells if place_of(cell) == at], title, file)
        else:
            plot_pareto(rows, at, title, file)
        files.append(file)
    return files


def _telling_apart(here: Sequence[Place]) -> list[str]:
    """The fields that it takes."""
    taken: list[str] = []
    for name in Place._fields:
        if _distinct(here, [*taken, name]) > _distinct(here, taken):
            taken.append(name)
    return taken


def _distinct(here: Sequence[Place], names: Sequence[str]) -> int:
    return len({tuple(getattr(at, name) for name in names) for at in here})


def plot_pareto(rows: Sequence[Row], place: Place, title: str, path: Path) -> None:
    """A panel for each cost that was measured. Dashes join the rows that nothing beats on both counts; a line through a
    point goes from the lowest to the highest of its seeds."""
    from matplotlib.ticker import MaxNLocator

    here = [row for row in rows if row.place == place and row.ppl is not None]
    perplexities = sorted(row.ppl for row in here if row.ppl is not None)
    base = next((row.ppl for row in here if row.ppl is not None and row.is_base), perplexities[0])
    within = perplexities[math.ceil(len(perplexities) * (1 - MOST_OFF)) - 1]
    top = OFF_THE_SCALE * (within if within > OFF_THE_SCALE * base else base)
    axes_of = (
        ("multiply_adds", "multiply-adds of the attention, share of dense, selection included", "{:.4g}%", 100),
        ("ms", "measured time of the attention, ms a layer (this implementation)", "{:g}", 1),
    )
    panels = [panel for panel in axes_of if any(getattr(row, panel[0]) is not None for row in here)]
    with _figure(title, path, 6.0 * len(panels)) as figure:
        drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (cost, label, numbers, unit) in zip(drawn, panels, strict=True):
            axes.set_xscale("log", base=2)
            axes.margins(x=SIDE_MARGIN / (1 - 2 * SIDE_MARGIN), y=MARGIN / (1 - 2 * MARGIN))
            _panel(axes, [row for row in here if getattr(row, cost) is not None], cost, top)
            axes.set_xlabel(label)
            lowest, highest = axes.get_xlim()
            if highest < 4 * lowest:  # powers of two would leave one tick, or none
                axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            axes.xaxis.set_major_formatter(
                lambda value, _, written=(numbers, unit): written[0].format(value * written[1])
            )
        figure.axes[0].set_ylabel("perplexity (lower is better)")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)


def plot_curves(cells: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """The largest group of each trained row over the steps of its training, one line a seed."""
    curves = {(cell["row"], cell["seed"]): cell["training"]["curve"] for cell in cells if cell["training"].get("curve")}
    names = list(dict.fromkeys(name for name, _ in curves))
    with _figure(title, path, 7.0) as figure:
        axes, labelled = figure.subplots(), set()
        for (name, _), curve in curves.items():
            steps, shares = ([point[key] for point in curve] for key in ("step", "dominance"))
            round_, color = divmod(names.index(name), len(CURVES))
            style = {"color": CURVES[color], "linestyle": LINES[round_ % len(LINES)]}
            axes.plot(steps, shares, **style, label=name if name not in labelled else None)
            labelled.add(name)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("steps")
        axes.set_ylabel("share of the keys in the largest group, mean over routers")
        axes.legend(fontsize=8)


@contextmanager
def _figure(title: str, path: Path, width: float) -> Iterator[Any]:
    """A figure to draw on; the file is written afterwards."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": "focus"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, 5.4), layout="constrained")
        figure.suptitle(textwrap.fill(title, int(14 * width)), x=0.01, ha="left", fontsize=9)
        yield figure
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, rows: Sequence[Row], cost: str, top: float) -> None:
    seen = set()
    points = [(float(getattr(row, cost)), min(row.ppl or top, top)) for row in rows]
    for row, point in zip(rows, points, strict=True):
        label = "Focus" if row.is_focus else BLOCKS[row.kind]
        axes.scatter(
            *point, color=_color(row), marker=MARKERS[row.kind], label=None if label in seen else label, zorder=3
        )
        seen.add(label)
    ends = [_seed_ends(row, point[1], top) for row, point in zip(rows, points, strict=True)]
    for row, point, (lowest, highest) in zip(rows, points, ends, strict=True):
        axes.plot([point[0]] * 2, [lowest, highest], color=_color(row), linewidth=1.0, alpha=0.5)
        if (row.highest or 0.0) > top > point[1]:
            axes.annotate(  # above the names of the rows that stand there
                f"▲ {row.highest:.3g}", (point[0], top), xytext=(0, 7), textcoords="offset points", fontsize=7,
                color=_color(row), ha="center",
            )  # fmt: skip
    front = pareto_front([point for row, point in zip(rows, points, strict=True) if not row.leaking])
    axes.step(*zip(*front, strict=True), where="post", color=DENSE, linewidth=0.8, linestyle="--", zorder=1)
    names = [
        (row.name if point[1] < top else f"{row.name}: {row.ppl:.3g}") + (" (looks ahead)" if row.leaking else "")
        for row, point in zip(rows, points, strict=True)
    ]
    for row, name, point, height in zip(rows, names, points, label_heights(points, names, ends), strict=True):
        axes.annotate(
            name,
            point,
            xytext=(8, height),
            textcoords=("offset points", "axes fraction"),
            fontsize=7,
            color=_color(row),
            va="center",
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": _color(row), "relpos": (0, 0.5)},
        )


def _color(row: Row) -> str:
    return FOCUS if row.is_focus else COLORS[row.kind]


def _seed_ends(row: Row, ppl: float, top: float) -> tuple[float, float]:
    """The lowest and the highest of a row's seeds, as far as the panel reaches."""
    if row.seeds == 1 or row.lowest is None or row.highest is None:
        return ppl, ppl
    return min(row.lowest, top), min(row.highest, top)


def label_heights(
    points: Sequence[tuple[float, float]], names: Sequence[str], ends: Sequence[tuple[float, float]]
) -> list[float]:
    """How high the names stand, as shares of the panel, so that they cover neither each other nor points.

    ends: what else is drawn above and below each point.
    """
    logs = [math.log(cost) for cost, _ in points]
    x = _shares(logs, SIDE_MARGIN, logs)
    y = _shares([ppl for _, ppl in points], MARGIN, [end for both in ends for end in both])
    heights = list(y)
    placed: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: y[index]):
        begin, end = x[index] + POINT_WIDTH, x[index] + POINT_WIDTH + LETTER_WIDTH * (len(names[index]) + GAP)
        taken = [y[other] for other in range(len(points)) if begin < x[other] < end]
        for other in placed:
            left = x[other] + POINT_WIDTH
            if left < end and begin < left + LETTER_WIDTH * (len(names[other]) + GAP):
                taken.append(heights[other])
        for height in sorted(taken):
            if abs(height - heights[index]) < NAME_HEIGHT:
                heights[index] = height + NAME_HEIGHT
        placed.append(index)
    return heights


def _shares(values: Sequence[float], margin: float, drawn: Sequence[float]) -> list[float]:
    """Where values stand between the margins of a panel that shows all that is drawn."""
    low, extent = min(drawn), (max(drawn) - min(drawn)) or 1.0
    return [margin + (1 - 2 * margin) * (value - low) / extent for value in values]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats on both counts, cheapest first."""
    front: list[tuple[float, float]] = []
    for cost, ppl in sorted(points):
        if not front or ppl < front[-1][1]:
            front.append((cost, ppl))
    return front
