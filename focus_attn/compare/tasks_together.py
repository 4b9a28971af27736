"""Benchmarks of several runs in one table: from what rows and seeds made of every item and, of a row of which only the
summary is left, from that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from focus_attn.compare.store import Cell
from focus_attn.compare.tasks import Scored, task_table, who
from focus_attn.evaluation.requests import Requests
from focus_attn.evaluation.summary import BASE

Summary = list[dict[str, Any]]  # what `task_table` makes
OF_A_ROW = ("models", "against_base", "verdict", "pairs_kept", "seeds")  # its parts that have an entry for each row
ROUNDING = {"rel_tol": 0.02, "abs_tol": 0.005}  # what the base model's score differs by between machines


def still_true(scored: Iterable[Scored], cells: Iterable[Cell]) -> list[Scored]:
    """The last answers of each row and seed, without those of a row that was measured anew under other settings."""
    keys: dict[tuple[Any, ...], set[str]] = {}
    for cell in cells:
        keys.setdefault(tuple(cell.get(part) for part in ("model", "row", "seed")), set()).add(cell.get("key", ""))
    last = {who(one): one for one in scored}
    return [one for one in last.values() if made_with(one, keys.get((one["model"], one["row"], one["seed"]), set()))]


def made_with(one: Scored, keys: set[str]) -> bool:
    """Whether these answers are of the row that these cells are of."""
    return one["row"] == BASE or not keys.isdisjoint(one["cells"])


def tasks_together(
    requests: Requests, scored: Iterable[Scored], summaries: Sequence[Summary], rows: Sequence[str]
) -> Summary:
    """rows: their names, in order."""
    order = [BASE, *rows]
    answers = [one for one in scored if one["requests"] == requests.digest and one["row"] in order]
    if not any(one["row"] == BASE for one in answers):
        raise ValueError(
            "--requests: full attention has not answered these in any of the files to show. Give what `focus compare "
            "--requests` wrote by --json (cells.jsonl has no answers)"
        )
    if len(models := {one["model"] for one in answers}) > 1:
        raise ValueError(f"answers of {' and '.join(sorted(models))}: show each model's files by themselves")
    answers.sort(key=lambda one: (order.index(one["row"]), one["seed"]))
    return [_with_others(row, summaries, order) for row in task_table(requests, answers)]


def _with_others(row: dict[str, Any], summaries: Sequence[Summary], order: Sequence[str]) -> dict[str, Any]:
    """Rows that answered the same items in another run, which kept no more than the summary."""
    for summary in summaries:
        missing = {name for one in summary for name in one["models"] if name in order} - row["models"].keys()
        if not missing:
            continue
        same = next((one for one in summary if _same_items(one, row)), None)
        if same is None or missing - same["models"].keys():
            raise ValueError(
                f"--requests: {', '.join(sorted(missing))} answered other items, of which the summary alone was kept: "
                "measure them with these --requests, or show that file by itself"
            )
        row = of_rows(row | {part: same.get(part, {}) | row[part] for part in OF_A_ROW}, order)
    return row


def of_rows(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A row of the summary with these rows of the comparison, in this order."""
    return row | {
        part: {name: row[part][name] for name in names if name in row[part]} for part in OF_A_ROW if part in row
    }


def _same_items(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """The base model's score tells."""
    if any(one[part] != other[part] for part in ("task", "metric", "n")):
        return False
    return math.isclose(one["models"][BASE]["estimate"], other["models"][BASE]["estimate"], **ROUNDING)
