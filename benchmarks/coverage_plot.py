"""What stays visible of each layer's distant attention, from the JSON of reports: Focus between random groups and the
best mask of the same size.

    python benchmarks/coverage_plot.py results/report/k8_2048.json results/report/k8_8192.json \
        --plot results/report/k8_layers.png

Keys that act as sinks are left out (docs/report.md): nearly any mask keeps those.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from focus_attn.report.plots import DENSE, FOCUS, STYLE

LINES = (
    ("content_best_share", "best mask of the same size", DENSE, "--"),
    ("content_kept_share", "Focus", FOCUS, "-"),
    ("content_random_share", "random groups of the same sizes", "#d97706", ":"),
)


def draw(reports: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = STYLE
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.4 * len(reports), 3.8), layout="constrained")
        for axes, report in zip(figure.subplots(1, len(reports), sharey=True, squeeze=False)[0], reports, strict=True):
            layers = report["layers"]
            for share, label, color, line in LINES:
                shares = [layer["mass"][share] for layer in layers]
                axes.plot([layer["layer_idx"] for layer in layers], shares, line, color=color, marker="o", label=label)
            for layer in report["short_on_content"]:
                axes.axvspan(layer - 0.5, layer + 0.5, color="#eef1f5", zorder=0, linewidth=0)
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.set_title(f"{report['coverage']['length']:,} tokens", loc="left", fontsize=10)
            axes.set_xlabel("layer (shaded: less than half of the way from random to best)")
        figure.axes[0].set_ylabel("distant attention that stays visible")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
        figure.savefig(path, dpi=160)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="what `focus report --json` wrote")
    parser.add_argument("--plot", required=True, type=Path)
    options = parser.parse_args()
    draw([json.loads(file.read_text(encoding="utf-8")) for file in options.reports], options.plot)
