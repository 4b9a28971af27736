"""An evaluation on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from focus_attn.evaluation.bootstrap import Interval
from focus_attn.evaluation.requests import Requests
from focus_attn.evaluation.summary import TOO_FEW, Cell, Row, kept_of_base

SHORT = {"within the interval": "within", "base at the floor, not counted": "floor", TOO_FEW: "few"}

# Colour-blind safe, from lost to found.
SHADES = ("#00204d", "#31446b", "#666970", "#958f78", "#cbba69", "#ffea46")


def print_rows(console: Console, requests: Requests, rows: Sequence[Row], base: str) -> None:
    for family, title in (("perplexity", "Perplexity"), ("task", "Tasks"), ("retrieval", "Retrieval, all depths")):
        of_family = [row for row in rows if requests.tasks[row.task].family == family]
        if of_family:
            names = [row.task if row.metric in row.task else f"{row.task} {row.metric}" for row in of_family]
            _print_comparison(console, title, names, of_family, base)
    for row in rows:
        if row.pairs_kept and row.is_ratio:
            shares = ", ".join(f"{model} {share:.1%}" for model, share in row.pairs_kept.items())
            console.print(f"Pairs kept in {row.task}: {shares}.")
    if any(row.against_base for row in rows):
        console.print(
            "within: the paired 95 % interval holds 0 (a ratio of 1), so that no difference can be told. "
            "better, worse: it does not hold it."
        )
    if any(row.verdict(model) == TOO_FEW for row in rows for model in row.against_base):
        console.print("few: fewer than six blocks or questions, too few to tell; ask for more.")
    if floors := [f"{row.task} {row.metric}" for row in rows if row.at_floor]:
        console.print(
            f"floor: the base model is less than two standard errors above chance, not counted: {', '.join(floors)}."
        )


def print_positions(console: Console, rows: Sequence[Row], base: str) -> None:
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
        _print_comparison(console, f"{task}, by position", [row.metric for row in of_task], of_task, base)


def print_grids(console: Console, cells: Sequence[Cell], base: str) -> None:
    """Each grid with a colour for its recall, the models side by side, and what is kept of the base model's."""
    for task in dict.fromkeys(cell.task for cell in cells):
        of_task = [cell for cell in cells if cell.task == task]
        adapters = [model for model in of_task[0].recall if model != base]
        _print_fitting(console, partial(_grid, of_task, base), adapters)
        for adapter in adapters:
            console.print(f"{task}: {_kept(of_task, adapter, base)}")


def _grid(cells: Sequence[Cell], base: str, adapters: Sequence[str]) -> Table:
    models = [base, *adapters]
    title = f"{cells[0].task}: recall, {cells[0].n} items a cell"
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.add_column("depth")
    for model in models:
        for length in dict.fromkeys(cell.length for cell in cells):
            table.add_column(f"{model}\n{length:,}", justify="right")
    for depth in dict.fromkeys(cell.depth for cell in cells):
        shown = [_shade(cell.recall[model]) for model in models for cell in cells if cell.depth == depth]
        table.add_row("all over" if depth is None else f"{depth:.0%}", *shown)
    return table


def _print_fitting(console: Console, make: Callable[[Sequence[str]], Table], adapters: Sequence[str]) -> None:
    """One table for all adapters, or one for each where it would not fit."""
    whole = make(adapters)
    unbound = console.options.update(width=1 << 20)
    if len(adapters) < 2 or console.measure(whole, options=unbound).maximum <= console.width:
        console.print(whole)
        return
    for adapter in adapters:
        console.print(make([adapter]))


def _kept(cells: Sequence[Cell], model: str, base: str) -> str:
    kept = kept_of_base(cells, model, base)
    if kept.ratio is None:
        return "the base model's recall is below 50 % in every cell: nothing to compare."
    share = rf"{kept.ratio.estimate:.1%} \[{kept.ratio.low:.1%}, {kept.ratio.high:.1%}]"
    where = f"over the {kept.counted} of {kept.cells} cells where that is at least 50 %"
    return f"{model} has {share} of the base model's recall {where}."


def _print_comparison(console: Console, title: str, names: Sequence[str], rows: Sequence[Row], base: str) -> None:
    adapters = [model for model in rows[0].models if model != base]
    _print_fitting(console, partial(_table, title, names, rows, base), adapters)


def _table(title: str, names: Sequence[str], rows: Sequence[Row], base: str, adapters: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("n", justify="right")
    models = [base, *adapters]
    for model in models:
        table.add_column(model, justify="right")
    for model in adapters:
        table.add_column(f"{model} against {base}", justify="right")
        table.add_column("")
    guessing = any(row.chance for row in rows)
    if guessing:
        table.add_column("chance", justify="right")
    for name, row in zip(names, rows, strict=True):
        cells = [name, f"{row.n:,}", *(_estimate(row, row.models[model]) for model in models)]
        for model in adapters:
            cells += [_against(row, row.against_base[model]), SHORT.get(row.verdict(model), row.verdict(model))]
        if guessing:
            cells.append("" if row.chance is None else f"{row.chance:.1%}")
        table.add_row(*cells)
    return table


def _estimate(row: Row, interval: Interval) -> str:
    """A share is shown with half its interval's width; of a perplexity the interval mostly says how texts differ."""
    if row.chance is None:
        return f"{interval.estimate:.3f}"
    return f"{interval.estimate:.1%} ± {(interval.high - interval.low) / 2:.1%}"


def _against(row: Row, interval: Interval) -> str:
    """A ratio as "x 0.99", a difference with its sign: a table may have both."""
    form = "+.1%" if row.chance is not None else ".4f" if row.is_ratio else "+.4f"
    times = "x " if row.is_ratio else ""
    return rf"{times}{interval.estimate:{form}} \[{interval.low:{form}}, {interval.high:{form}}]"


def _shade(recall: float) -> Text:
    index = min(int(recall * len(SHADES)), len(SHADES) - 1)
    return Text(f" {recall:4.2f} ", style=f"{'white' if index < 3 else 'black'} on {SHADES[index]}")
