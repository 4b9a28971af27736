"""Plots as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from focus_attn.bench import Timing
from focus_attn.evaluation import Perplexity
from focus_attn.training import LayerFit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DENSE, FOCUS, MUTED = "#8a94a6", "#2563eb", "#cbd5e1"

STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text: smaller, selectable, in the page's own font
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "grid.color": "#eef1f5",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib") from None


def perplexity_plot(measured: dict[str, Perplexity], highlight: str) -> str:
    """Bars of perplexity, each with the pairs it keeps."""
    with _figure("perplexity", 7.2, 0.55 * len(measured) + 0.9) as (figure, svg):
        axes = figure.subplots()
        names = list(measured)[::-1]
        values = [measured[name].ppl for name in names]
        axes.barh(names, values, color=[FOCUS if name == highlight else DENSE for name in names], height=0.6)
        for row, name in enumerate(names):
            kept = measured[name].pairs_kept
            share = "all pairs" if kept is None else f"{kept:.0%} of pairs"
            axes.text(values[row], row, f"  {values[row]:.2f}  ({share})", va="center")
        axes.set_xlim(0, max(values) * 1.35)
        axes.set_xlabel("perplexity on text not fitted to (lower is better)")
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    return svg[0]


def timing_plot(timings: list[Timing], title: str) -> str:
    """Milliseconds over length, both on logarithmic scales."""
    with _figure(title, 4.6, 3.2) as (figure, svg):
        axes = figure.subplots()
        lengths = [timing.length for timing in timings]
        for label, color, values in (
            ("dense SDPA", DENSE, [timing.dense_seconds for timing in timings]),
            ("Focus, router included", FOCUS, [timing.focus_seconds for timing in timings]),
        ):
            axes.plot(lengths, [1000 * value for value in values], marker="o", color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
        axes.set_xlabel("tokens")
        axes.set_ylabel("milliseconds")
        axes.set_title(title, loc="left", fontsize=11)
        axes.legend()
    return svg[0]


def coverage_plot(layers: list[LayerFit]) -> str:
    """How much of each layer's attention is kept, and how much the window and the sinks keep alone."""
    with _figure("coverage", 7.2, 2.8) as (figure, svg):
        axes = figure.subplots()
        indices = [layer.layer_idx for layer in layers]
        axes.bar(indices, [layer.covered for layer in layers], color=FOCUS, label="with the fitted groups")
        axes.bar(indices, [layer.covered_nearby for layer in layers], color=MUTED, label="window + sinks alone")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("layer")
        axes.set_ylabel("attention kept")
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2)
    return svg[0]


@contextmanager
def _figure(name: str, width: float, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure to draw on, and a list that holds its SVG afterwards."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    svg: list[str] = []
    # The salt keeps the ids of several drawings in one page apart, and the same from run to run.
    style: Any = {**STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, svg
        FigureCanvasSVG(figure)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    markup = buffer.getvalue()
    svg.append(markup[markup.index("<svg") :])
