"""The table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from focus_attn.compare.recipe import Comparison
from focus_attn.compare.runner import Outcome
from focus_attn.compare.table import BLOCKS, Place, Row, blocks_of, make_rows, places, verdicts
from focus_attn.compare.tasks import task_cell, task_heading

COLUMNS = ("method", "PPL", "over full [95 %]", "pairs", "mult-adds", "ms", "x dense", "largest group", "trained")


class Bars:
    """Calls with (what, done, of how many) move one bar, that of what is being done now."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.now: tuple[str, TaskID] | None = None

    def __enter__(self) -> Bars:
        self.bars.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.__exit__(*error)  # type: ignore[arg-type]

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.now is None or self.now[0] != what:
            if self.now is not None:
                self.bars.remove_task(self.now[1])
            self.now = what, self.bars.add_task(what, total=total)
        self.bars.update(self.now[1], completed=done, total=total)


def print_outcome(console: Console, comparison: Comparison, outcome: Outcome) -> None:
    if comparison.note:
        console.print(comparison.note, style="bold yellow", markup=False)
    if comparison.bench is not None:
        console.print(bench_table(comparison, outcome.cells))
    rows = make_rows(outcome.cells)
    for place in places(rows):
        console.print(place_table(comparison, rows, place))
        for row in (row for row in rows if row.place == place and row.failed):
            console.print(f"{row.name}: {row.failed}", markup=False, highlight=False)
        for sentence in verdicts(rows, place):
            console.print(sentence, markup=False, highlight=False, style="yellow" if "NOT first" in sentence else "")
    if outcome.tasks:
        console.print(task_table(outcome.tasks))
    elif comparison.tasks:
        ask = f"focus eval --no-perplexity {comparison.asks} --write-requests FILE"
        console.print(f"tasks: not run. `{ask}` makes a file of them for --requests.", markup=False, highlight=False)
    if outcome.stopped:
        console.print(outcome.stopped, style="yellow", markup=False)


def place_table(comparison: Comparison, rows: Sequence[Row], place: Place) -> Table:
    title = f"{comparison.title}: {place.model}, {place.data}, {place.length:,} tokens a block"
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=column == "method")
    for kind, block in blocks_of(rows, place, comparison.stepwise).items():
        table.add_row(f"[bold]{BLOCKS[kind]}[/]")
        for row in block:
            table.add_row(*map(escape, row_cells(row)), style="bold blue" if row.is_focus else None)
        table.add_section()
    return table


def row_cells(row: Row) -> list[str]:
    """As text, one for each of COLUMNS."""
    name = f"  {row.name}{' (looks ahead)' if row.leaking else ''}"
    if row.failed is not None or row.ppl is None:
        return [name, "-"]
    spread = f" ({row.lowest:.2f} to {row.highest:.2f})" if row.seeds > 1 else ""
    over = ""
    if row.over_base is not None:
        over = f"{row.over_base.estimate - 1:+.1%} [{row.over_base.low - 1:+.1%}, {row.over_base.high - 1:+.1%}]"
    return [
        name,
        f"{row.ppl:.2f}{spread}",
        over,
        _share(row.pairs_kept),
        _share(row.multiply_adds),
        "" if row.ms is None else f"{row.ms:.3g}",
        "" if row.speedup is None else f"{row.speedup:.2f}",
        _share(row.dominance),
        f"{row.trained_parameters:,}" if row.trained_parameters else "",
    ]


def task_table(tasks: Sequence[dict[str, Any]]) -> Table:
    """A line for each metric, a column for each row of the comparison."""
    names = list(tasks[0]["models"])
    table = Table(
        title="tasks: score, and difference (of perplexities ratio, x) to base [95 %]",
        title_justify="left",
        header_style="bold",
    )
    for column in ("task", "n", *(task_heading(tasks[0], name) for name in names)):
        table.add_column(escape(column), justify="left" if column == "task" else "right")
    for row in tasks:
        floor = " (base at chance)" if row["at_floor"] else ""
        cells = f"{row['task']}, {row['metric']}{floor}", f"{row['n']:,}", *(task_cell(row, name) for name in names)
        table.add_row(*map(escape, cells))
    return table


def bench_table(comparison: Comparison, cells: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=comparison.title, title_justify="left", header_style="bold")
    for column in ("groups", "tokens", "fastest dense", "Focus", "speed-up", "pairs kept", "parity"):
        table.add_column(column, justify="right")
    for cell in cells:
        one = cell["bench"]
        dense = one["peers"].get(one["baseline"] or "", {}).get("ms")
        table.add_row(
            cell["row"],
            f"{one['length']:,}",
            "" if dense is None else f"{one['baseline']}, {dense:.2f} ms",
            "" if one["focus"] is None else f"{one['focus']['ms']:.2f} ms",
            "" if one["speedup"] is None else f"{one['speedup']:.2f}x",
            f"{one['pairs_kept_share']:.1%}",
            "ok" if one["parity"]["ok"] else "FAILED",
        )
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
