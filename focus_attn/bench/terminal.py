"""Measurements on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from focus_attn.bench.attention import PASS_NAMES, Row
from focus_attn.bench.options import AttentionOptions
from focus_attn.bench.prefill import PrefillRow
from focus_attn.bench.timing import Measured, Timing, describe_crossover
from focus_attn.bench.trace import Trace

NOTHING = "-"
WIDEST_LOG = 200  # columns where no terminal says how many it has


def make_console() -> Console:
    """In a log file tables are to stay tables."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDEST_LOG)


def describe(options: AttentionOptions) -> str:
    """What is measured, in a line."""
    shape, setting = options.shape, options.settings[0]
    ids = setting.ids
    return (
        f"{shape.heads} query and {shape.kv_heads} key/value heads of {shape.width}, "
        f"{str(shape.dtype).removeprefix('torch.')}, batch 1 on {shape.device.type}; query_k {ids.query_k}, "
        f"key_k {ids.key_k}, {'shared' if ids.shared else 'separate'} ids of {_count(ids.routers, 'router')}, "
        f"window {setting.window}, {setting.num_sinks} sinks"
    )


def one_line(row: Row) -> str:
    """A row while others are still to come."""
    what = f"{row.length:>9,} tokens  K={row.setting.ids.num_groups:<3} {PASS_NAMES[row.backward]}, {row.backend}:"
    if not row.parity:
        return f"{what} parity FAILED: " + "; ".join(str(verdict) for verdict in row.verdicts if not verdict.ok)
    if row.timing is None or row.baseline is None:
        return f"{what} no speed-up: {row.left_out.get('Focus', 'no dense attention ran')}"
    dense = row.peers[row.baseline]
    return (
        f"{what} {row.baseline} {_ms(dense)}, Focus {_ms(row.focus)}: {row.timing.speedup:.2f}x at "
        f"{1 / row.pairs_ratio:.1%} of the pairs"
    )


def attention_table(rows: Sequence[Row], title: str) -> Table:
    """Milliseconds and TFLOP/s of everything, the baseline in bold."""
    on_gpu = any(row.focus.peak_bytes is not None for row in rows)
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("tokens", "K", "pass", "backend"):
        table.add_column(heading, justify="right" if heading in ("tokens", "K") else "left")
    for name in (*names, "Focus"):
        table.add_column(f"{name}\nms (TFLOP/s)", justify="right")
    for heading in ("Focus\n\\[min, max]", "runs, dense\nand Focus", "pairs\nkept", "pairs\nratio", "speed-up"):
        table.add_column(heading, justify="right")
    if on_gpu:
        table.add_column("MiB above inputs\nbaseline / Focus", justify="right")
    for row in rows:
        cells = [f"{row.length:,}", str(row.setting.ids.num_groups), PASS_NAMES[row.backward], row.backend]
        for name in names:
            shown = _rate(row, name) if name in row.peers else NOTHING
            cells.append(f"[bold]{shown}[/]" if name == row.baseline else shown)
        timed = row.parity and bool(row.focus.times)
        spread = rf"\[{1e3 * min(row.focus.times):,.4g}, {1e3 * max(row.focus.times):,.4g}]" if timed else NOTHING
        runs = len(row.peers[row.baseline].times) if row.baseline else 0
        cells += [_rate(row, None) if timed else NOTHING, spread, f"{runs}, {len(row.focus.times)}"]
        cells += [f"{row.pairs:,.0f}", f"{row.pairs_ratio:.2f}", _verdict(row)]
        if on_gpu:
            baseline = row.peers[row.baseline].peak_bytes if row.baseline else None
            peaks = (baseline, row.focus.peak_bytes)
            cells.append(" / ".join(NOTHING if peak is None else f"{peak / 2**20:,.0f}" for peak in peaks))
        table.add_row(*cells)
    return table


def print_attention(console: Console, rows: Sequence[Row], title: str, stopped: str | None) -> None:
    console.print(attention_table(rows, title))
    console.print(
        "Milliseconds are medians; TFLOP/s count the pairs to compute. Bold: the fastest dense one, the baseline."
    )
    for label, timings in crossovers(rows):
        console.print(f"{label}: {describe_crossover(timings)}.")
    for line in dict.fromkeys(_reasons(rows)):
        console.print(line, markup=False)
    for row in rows:
        if not row.parity:
            console.print(one_line(row), style="red", markup=False)
    if stopped is not None:
        console.print(f"stopped: {stopped}")


def _reasons(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        for name, reason in row.left_out.items():
            yield f"left out of {PASS_NAMES[row.backward]}: {name}: {reason}"


def crossovers(rows: Iterable[Row]) -> list[tuple[str, list[Timing]]]:
    """The timings of each K, pass and backend, by length."""
    lines: dict[str, list[Timing]] = {}
    for row in rows:
        label = f"K = {row.setting.ids.num_groups}, {PASS_NAMES[row.backward]}, backend {row.setting.backend}"
        timings = lines.setdefault(label, [])
        if row.timing is not None:
            timings.append(row.timing)
    return list(lines.items())


def print_trace(console: Console, trace: Trace) -> None:
    title = f"One eager call at {trace.length:,} tokens, {PASS_NAMES[trace.backward]}"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("device kernel", "launches", "ms", ""):
        table.add_column(heading, justify="right" if heading in ("launches", "ms") else "left", no_wrap=True)
    for kernel in trace.kernels:
        kind = "attention" if kernel.is_attention else ""
        table.add_row(kernel.name[:90], str(kernel.launches), f"{kernel.milliseconds:.4f}", kind)
    table.add_section()
    table.add_row("the eager call, device idle to device idle (median)", "", f"{trace.call_ms:.4f}", "")
    table.add_row("  of it the host, until the call returned", "", f"{trace.host_ms:.4f}", "")
    table.add_row("  of it attention kernels on the device", "", f"{trace.attention_ms:.4f}", "")
    table.add_row("  overhead: the call minus its attention kernels", "", f"{trace.overhead_ms:.4f}", "")
    table.add_row("the router, not in the call", "", f"{trace.router_ms:.4f}", "")
    console.print(table)


def print_choices(console: Console, choices: list[dict[str, Any]]) -> None:
    for choice in choices:
        console.print(f"{choice['length']:,} tokens, K = {choice['K']}: auto takes [bold]{choice['chosen']}[/]")
        for name, reason in choice["reasons"].items():
            console.print(f"  {name}: {reason}", markup=False)


def print_prefill(console: Console, rows: Sequence[PrefillRow]) -> None:
    table = Table(header_style="bold")
    for heading in ("tokens", "dense", "Focus", "of it routers", "speed-up", "pairs kept", "repeats"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.length:,}",
            _ms(row.dense),
            _ms(row.focus),
            _ms(row.routers),
            f"{row.timing.speedup:.2f}x",
            NOTHING if row.pairs_kept is None else f"{row.pairs_kept:.1%}",
            str(row.timing.repeats),
        )
    console.print(table)
    console.print(f"Prefill: {describe_crossover([row.timing for row in rows])}.")


def _rate(row: Row, name: str | None) -> str:
    measured = row.focus if name is None else row.peers[name]
    return f"{_milliseconds(measured)} ({row.tflops(name):,.3g})"


def _ms(measured: Measured) -> str:
    return f"{_milliseconds(measured)} ms"


def _milliseconds(measured: Measured) -> str:
    milliseconds = 1e3 * measured.seconds
    return f"{milliseconds:,.3f}" if milliseconds < 10 else f"{milliseconds:,.1f}"


def _verdict(row: Row) -> str:
    if not row.parity:
        return "[red]parity FAILED[/]"
    if row.timing is None:
        return NOTHING
    return f"[{'green' if row.timing.speedup > 1 else 'yellow'}]{row.timing.speedup:.2f}x[/]"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
