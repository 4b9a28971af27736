"""The demo on the terminal: a bar for each stage, one table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from focus_attn.bench import Timing, describe_crossover
from focus_attn.evaluation.perplexity import LEAK_WARNING
from focus_attn.report.html import describe_gap

if TYPE_CHECKING:
    from focus_attn.demo import DemoResult


class StageBars:
    """Calls with (what, done, of how many) become one progress bar for each `what`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.tasks: dict[str, TaskID] = {}
        self.bars = Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> StageBars:
        self.bars.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.__exit__(*error)  # type: ignore[arg-type]

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.bars.add_task(what, total=total)
            if not self.console.is_terminal:  # no bars in a log file: say what begins
                self.console.print(what, highlight=False)
        self.bars.update(self.tasks[what], completed=done, total=total)


def print_closing_table(console: Console, result: DemoResult, written: Mapping[str, Path]) -> None:
    """What was measured, in one table."""
    from focus_attn.demo import FULL

    title = f"Focus on {result.model}, {result.dtype}, {result.machine['cpu']}"
    table = Table(title=title, title_justify="left", show_header=True, header_style="bold")
    for column, justify in (("measured", "left"), ("", "right"), ("", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]

    full = result.perplexity[FULL]
    table.add_row(
        "[bold]perplexity[/], text not fitted to", "[bold]ppl[/]", "[bold]pairs kept[/]", "[bold]over full[/]"
    )
    for name, one in result.perplexity.items():
        kept = "100%" if one.pairs_kept is None else f"{one.pairs_kept:.1%}"
        leak = f" {LEAK_WARNING}" if one.leaking else ""
        table.add_row(f"  {name}", f"{one.ppl:.2f}", kept, f"{one.ppl / full.ppl - 1:+.1%}{leak}")
    table.add_section()
    for name, timings in (("one layer's attention", result.attention), ("whole-model prefill", result.prefill)):
        table.add_row(f"[bold]{name}[/], medians", "[bold]dense[/]", "[bold]Focus[/]", "[bold]Focus is[/]")
        for timing in timings:
            table.add_row(f"  {timing.length:,} tokens", *_timing_cells(timing))
        table.add_section()
    table.add_row("[bold]stage[/]", "[bold]time[/]", "", "")
    for name, seconds in result.stage_seconds.items():
        table.add_row(f"  {name}", f"{seconds:.1f} s", "", "")
    table.add_row("  in all", f"{result.seconds:.1f} s", "", "")
    console.print(table)

    console.print(describe_gap(result), highlight=False)
    console.print(f"One layer's attention: {describe_crossover(result.attention)}.", highlight=False)
    console.print(f"Whole-model prefill: {describe_crossover(result.prefill)}.", highlight=False)
    for what, path in written.items():
        console.print(f"{what}: {path}", highlight=False, markup=False, soft_wrap=True)


def _timing_cells(timing: Timing) -> tuple[str, str, str]:
    verdict = "[green]{:.2f}x, faster[/]" if timing.speedup > 1 else "[yellow]{:.2f}x, slower[/]"
    dense, focus = (f"{1000 * seconds:,.1f} ms" for seconds in (timing.dense_seconds, timing.focus_seconds))
    return dense, focus, verdict.format(timing.speedup)
