"""What several runs of a comparison measured, put together: more seeds, rows that were missing, another machine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from focus_attn.compare.recipe import Method, plain
from focus_attn.compare.store import FILE, Cell, latest, read_lines
from focus_attn.compare.table import Place, is_base, place_of
from focus_attn.compare.tasks import FIELDS, Scored
from focus_attn.compare.tasks_together import still_true, tasks_together
from focus_attn.evaluation.requests import Requests

SAME_BLOCKS = 0.1  # nats: full attention loses no more or less on a block, whatever the machine


@dataclass(frozen=True)
class Written:
    """What a run left: the cells that it keeps as it goes, or all of `--json`."""

    file: Path
    cells: list[Cell]
    tasks: list[dict[str, Any]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)  # what `tasks` are of
    models: tuple[str, ...] = ()  # whose benchmarks these are
    note: str | None = None  # of a quick form or a trial


def read_run(file: Path) -> Written:
    if not file.is_file():
        raise ValueError(f"no such file: {str(file)!r} (a run keeps its cells in {FILE} of its --out folder)")
    if file.suffix != ".json":
        return Written(file, latest(read_lines(file)))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        about = content["comparison"]
        scored = content.get("scores", [])
        if not all(one.keys() >= FIELDS for one in scored):
            raise KeyError("scores")
        return Written(file, latest(content["cells"]), content["tasks"], scored, tuple(about["models"]), about["note"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{str(file)!r} is not what `focus compare --json` wrote: give a file of that option"
        ) from None


def put_together(
    files: Sequence[Path], tasks: bool = True, requests: Requests | None = None, rows: Sequence[str] = ()
) -> Written:
    """Of a cell that was measured more than once the last. Benchmarks and notes are those of the file that has some.

    tasks: whether benchmarks are wanted.
    requests: what was asked; benchmarks are then summed up anew, from the answers in all files.
    rows: whose benchmarks, in order.
    """
    runs = [read_run(file) for file in files]
    if requests is not None and not tasks:
        raise ValueError("this comparison has no benchmarks (`tasks: true`): leave --requests out")
    if not tasks:
        runs = [replace(run, tasks=[]) for run in runs]
    if len(noted := [run for run in runs if run.note]) and len(runs) > 1:
        raise ValueError(f"{str(noted[0].file)!r} is noted as {noted[0].note!r}: show it by itself")
    if len(asked := [run for run in runs if run.tasks]) > 1 and requests is None:
        names = " and ".join(repr(str(run.file)) for run in asked)
        raise ValueError(
            f"{names} have benchmarks: give the --requests that were asked, so that they can be put together, or show "
            "each by itself"
        )
    for earlier, later in itertools.combinations(runs, 2):
        check_same_blocks(earlier.cells, later.cells, f"{earlier.file} and {later.file}")
    cells = latest(cell for run in runs for cell in run.cells)
    scored = still_true((one for run in runs for one in run.scored), cells)
    whole = next((run for run in runs if run.tasks or run.note), runs[0])
    summary = whole.tasks
    if requests is not None:
        summary = tasks_together(requests, scored, [run.tasks for run in runs], rows)
        whole = next(run for run in runs if any(one["requests"] == requests.digest for one in run.scored))
    return Written(whole.file, cells, summary, scored, whole.models if summary else (), whole.note)


def check_same_blocks(earlier: Iterable[Cell], later: Iterable[Cell], whose: str) -> set[Place]:
    """Full attention tells where both measured the same blocks. ValueError: rows on other blocks do not belong in one
    table.

    whose: the two runs, as in "a.json and b.json".
    """
    same = set()
    losses = {place_of(cell): cell["figures"]["losses"] for cell in earlier if _is_measured_base(cell)}
    for cell in filter(_is_measured_base, later):
        before, now = losses.get(place_of(cell)), cell["figures"]["losses"]
        if before is None:
            continue
        if len(before) != len(now) or max(abs(a - b) for a, b in zip(before, now, strict=True)) > SAME_BLOCKS:
            raise ValueError(
                f"{whose} measured other blocks of {cell['data']} at {cell['length']:,} tokens "
                f"({len(before)} and {len(now)} of them): their rows cannot be in one table. Give both runs the same "
                "--text and --blocks"
            )
        same.add(place_of(cell))
    return same


def is_of_row(method: Method, cell: Cell) -> bool:
    """Whether a stored cell has the settings that the row has now. An adapter may stand for what the row trains."""
    stored = cell["method"]
    same = ["attention", "options", "serve", "tune", "train_on"]
    if method.adapter is None and stored.get("adapter") is None:
        same += ["focus", "training"]
    return all(plain(getattr(method, part)) == stored[part] for part in same)


def _is_measured_base(cell: Cell) -> bool:
    return "figures" in cell and is_base(cell)
