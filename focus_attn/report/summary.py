"""The report on the terminal: what is kept of the distant attention, beside what could be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from focus_attn.report.page import describe_setting, headline, routed_alone

KEEPERS = {
    "distant_kept": "Focus",
    "distant_best": "best mask, query by query",
    "distant_best_shared": "best mask, shared by a router's heads",
    "distant_best_total": "best mask, in all",
    "distant_random": "random groups",
    "content_kept_share": "without keys that act as sinks: Focus",
    "content_best_share": "  best mask, query by query",
    "content_random_share": "  random groups",
}


def print_report(console: Console, report: dict[str, Any], written: Mapping[str, Path]) -> None:
    console.print(f"{report['model']}: {describe_setting(report)}", highlight=False, markup=False)
    for text in report["texts"]:
        coverage = text["coverage"]
        title = f"{text['name']}: {coverage['blocks']} blocks of {coverage['length']:,} tokens"
        table = Table("distant attention kept by", title=title, title_justify="left")
        routed = routed_alone(coverage)
        for column in ("share", f"95 % of draws\nof {_drawn(coverage)}", *(["routed\nheads"] if routed else [])):
            table.add_column(column, justify="right")
        for name, label in KEEPERS.items():
            interval = coverage["intervals"][name]
            several = interval is not None and interval["n"] > 1
            drawn = f"{interval['low']:.1%} to {interval['high']:.1%}" if several else "one block"
            alone = [_share(routed["mass"][name])] if routed else []
            table.add_row(label, _share(coverage["mass"][name]), drawn, *alone)
        console.print(table)
        short, on_content = (", ".join(map(str, text[name])) or "none" for name in ("short_layers", "short_on_content"))
        lines = [
            f"Layers less than half of the way from random groups to the best mask, query by query: {short}; without "
            f"keys that act as sinks: {on_content}."
        ]
        if text["purity"]:
            key = text["purity"]["key"]
            lines.append(f"Purity of the key groups: {key['purity']:.2f}, random {key['purity_random']:.2f}.")
        console.print(*lines, highlight=False)
    console.print(headline(report), highlight=False, markup=False)
    if report["tagger"] is None:
        console.print("No word classes: pip install textblob and make the page again with --from.", markup=False)
    for what, path in written.items():
        console.print(f"{what}: {path}", highlight=False, markup=False, soft_wrap=True)


def _share(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"


def _drawn(coverage: dict[str, Any]) -> str:
    interval = coverage["intervals"]["distant_kept"]
    return "documents" if interval and interval.get("drawn_together") else "blocks"
