"""Retrieval as a picture: one map for each task and model, recall by length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from focus_attn.evaluation.summary import Cell

# Dark where it is lost, light where it is found; the order of the colours survives colour blindness and print.
COLORS = "cividis"


def draw_heatmaps(cells: Sequence[Cell], title: str, path: Path) -> None:
    """`.png` or `.svg`, by the name of the file."""
    from matplotlib.figure import Figure

    by_task: dict[str, list[Cell]] = {}
    for cell in cells:
        by_task.setdefault(cell.task, []).append(cell)
    models = list(cells[0].recall)
    heights = [1.2 + 0.35 * len({cell.depth for cell in of_task}) for of_task in by_task.values()]
    figure = Figure(figsize=(1.4 + 3.4 * len(models), 0.4 + sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    all_axes = figure.subplots(len(by_task), len(models), squeeze=False, gridspec_kw={"height_ratios": heights})
    image = None
    for line, (task, of_task) in zip(all_axes, by_task.items(), strict=True):
        lengths = list(dict.fromkeys(cell.length for cell in of_task))
        depths = list(dict.fromkeys(cell.depth for cell in of_task))
        for axes, model in zip(line, models, strict=True):
            values = {(cell.depth, cell.length): cell.recall[model] for cell in of_task}
            grid = [[values[depth, length] for length in lengths] for depth in depths]
            image = axes.pcolormesh(grid, vmin=0, vmax=1, cmap=COLORS, edgecolors="white", linewidth=1.5)
            axes.invert_yaxis()
            for row, recalls in enumerate(grid):
                for place, value in enumerate(recalls):
                    color = "white" if value < 0.5 else "black"
                    axes.text(place + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
            axes.set_xticks([place + 0.5 for place in range(len(lengths))], [f"{length:,}" for length in lengths])
            axes.set_yticks([row + 0.5 for row in range(len(depths))], [_depth(depth) for depth in depths])
            axes.tick_params(length=0, labelsize=8)
            axes.set_title(f"{task}, {model} ({of_task[0].n} items a cell)", fontsize=9)
            axes.set_xlabel("tokens", fontsize=8)
            axes.set_ylabel("depth", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=all_axes.ravel().tolist(), label="recall", aspect=40)
    figure.savefig(path, dpi=150)


def _depth(depth: float | None) -> str:
    return "all over" if depth is None else f"{depth:.0%}"
