"""Many comparisons side by side on one device, until the time is up; then put together with what there is.

    python benchmarks/tables.py table1+table7+long-context table8+collapse table9 table4 --at-once 4 --seconds 560 \
        --out runs/seeds --into results/compare --text books.train=train.npy --text books.test=test.npy

A small model's training waits for the host most of the time, so that several share a GPU well. Comparisons joined by +
run one after the other in one folder: what they train alike is trained once. A long one can be shared out by its rows:
`table9@K=@N= table9@w=@tau=` are two processes, of the rows whose names hold these; and by its seeds: `table1#1@Focus
table1#2@Focus`. The same command goes on after an interruption; what found no memory beside the others is tried once
more when they are done. `--into` is a folder of what `focus compare --json` wrote: what stands there is not measured
again, and what was missing (rows, seeds, answers to benchmarks) is added to it. Other options are those of `focus
compare`; a `--text NAME.part=PATH` goes to the comparisons that have a dataset NAME, `--requests table4=FILE` to that
table.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from focus_attn.compare.recipe import Comparison, find_recipe

Process = subprocess.Popen[bytes]
NO_MEMORY = "out of memory"  # as `focus compare` says it
COMPARE = [sys.executable, "-m", "focus_attn.cli", "compare"]


@dataclass(frozen=True)
class Part:
    """What one process does: a comparison, or some rows or seeds of it."""

    recipe: str
    rows: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()

    @classmethod
    def read(cls, written: str) -> Part:
        recipe, *rows = written.split("@")
        recipe, *seeds = recipe.split("#")
        return cls(recipe, tuple(rows), tuple(seeds))

    @property
    def table(self) -> str:
        return Path(self.recipe).stem

    @property
    def name(self) -> str:
        """Of its files."""
        return "-".join([self.table, *self.seeds, *(re.sub(r"\W+", "_", row) for row in self.rows)])

    def options(self) -> list[str]:
        only = [word for row in self.rows for word in ("--only", row)]
        return only + [word for seed in self.seeds for word in ("--seed", seed)]


def texts_for(part: Part, texts: Sequence[str]) -> list[str]:
    known = Comparison.from_yaml(find_recipe(part.recipe)).data
    return [text for text in texts if "=" not in text or text.partition("=")[0].partition(".")[0] in known]


def requests_for(part: Part, options: argparse.Namespace) -> list[str]:
    return [
        word
        for given in options.requests
        for name, _, file in [given.partition("=")]
        if name == part.table
        for word in ("--requests", file)
    ]


def begin(part: Part, folder: Path, options: argparse.Namespace, passed: Sequence[str], seconds: float) -> Process:
    folder.mkdir(parents=True, exist_ok=True)
    written = options.out / f"{part.name}.json"
    written.unlink(missing_ok=True)  # of an earlier call: the cells that it was made from are in the folder
    texts = [word for text in texts_for(part, options.text) for word in ("--text", text)]
    kept = options.into and kept_for(part, options)
    known = ["--known", str(kept)] if kept and kept.is_file() else []
    files = ["--out", str(folder), "--json", str(written), "--seconds", f"{seconds:.0f}"]
    with written.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*COMPARE, part.recipe, *files, *texts, *part.options(), *known, *requests_for(part, options), *passed],
            stdout=log,
            stderr=log,
        )


def run_all(groups: Sequence[Sequence[Part]], options: argparse.Namespace, passed: Sequence[str]) -> dict[Part, str]:
    """What became of each part. Those of a group run one after the other; what is late is not begun."""
    deadline = time.monotonic() + options.seconds
    waiting = [(options.out / "+".join(part.name for part in group), list(group)) for group in groups]
    running: dict[Process, tuple[Path, list[Part]]] = {}
    became = {part: "not begun" for group in groups for part in group}
    again: list[Part] = []
    crowded: list[tuple[Path, list[Part]]] = []
    try:
        while waiting or running or crowded:
            while waiting and len(running) < options.at_once:
                folder, parts = waiting.pop(0)
                left = deadline - time.monotonic()
                if left >= 1:
                    running[begin(parts[0], folder, options, passed, min(left, 10**9))] = folder, parts
            for process in [process for process in running if process.poll() is not None]:
                folder, (part, *rest) = running.pop(process)
                became[part] = said(options.out / f"{part.name}.json", process.returncode)
                if NO_MEMORY in became[part] and part not in again:
                    again.append(part)
                    crowded.append((folder, [part]))
                if rest:
                    waiting.insert(0, (folder, rest))
            if not waiting and not running:
                waiting, crowded = crowded[:1], crowded[1:]  # alone on the device
            time.sleep(0.1)
    finally:  # each keeps the cells that are whole
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return became


def said(written: Path, returncode: int) -> str:
    if returncode != 0 or not written.is_file():
        return f"failed: {written.with_suffix('.log')} says why"
    found = json.loads(written.read_text(encoding="utf-8"))
    return f"{len(found['cells'])} cells; {found['stopped'] or 'whole'}"


def kept_for(part: Part, options: argparse.Namespace) -> Path:
    return Path(options.into, f"{part.table}{options.suffix}.json")


def put_together(part: Part, options: argparse.Namespace) -> str:
    """Under the same `--model`, for it stands in the file."""
    new, kept = options.out / f"{part.name}.json", kept_for(part, options)
    shown = [word for file in (kept, new) if file.is_file() for word in ("--show", str(file))]
    model = [] if options.model is None else ["--model", options.model]
    answered = json.loads(new.read_text(encoding="utf-8")).get("scores")
    asked = requests_for(part, options) if answered else []
    answer = subprocess.run(
        [*COMPARE, part.recipe, *shown, "--json", str(kept), *model, *asked],
        check=False,
        capture_output=True,
        text=True,
    )
    return f" -> {kept}" if answer.returncode == 0 else f", and not put into {kept}: {answer.stderr or answer.stdout}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", help="recipes, those that share trainings joined by +")
    parser.add_argument("--at-once", type=int, default=3, help="processes on the device")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then; the same command goes on")
    parser.add_argument("--out", type=Path, default=Path("runs/tables"), help="cells, trainings, tables and logs")
    parser.add_argument("--into", type=Path, help="folder of tables: what they lack is measured, and added")
    parser.add_argument("--suffix", default="", help="of the files there, as in table1_gemma.json")
    parser.add_argument("--text", action="append", default=[], help="as for focus compare")
    parser.add_argument("--requests", action="append", default=[], help="TABLE=FILE, as for focus compare")
    parser.add_argument("--model", help="as for focus compare")
    options, passed = parser.parse_known_args()
    # rows' names have a + between blanks
    groups = [[Part.read(part) for part in re.split(r"(?<! )\+(?! )", group)] for group in options.groups]
    fitting = {text for group in groups for part in group for text in texts_for(part, options.text)}
    if unknown := [text for text in options.text if text not in fitting]:
        parser.error(f"--text {unknown[0]}: none of these comparisons has such a dataset")
    tables = {part.table for group in groups for part in group}
    if unknown := [given for given in options.requests if given.partition("=")[0] not in tables]:
        parser.error(f"--requests {unknown[0]}: give it as TABLE=FILE, for one of {', '.join(sorted(tables))}")
    if options.into is not None and "--quick" in passed:
        parser.error("--quick has figures that mean nothing: leave --into out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    became = run_all(groups, options, [*([] if options.model is None else ["--model", options.model]), *passed])
    for part, what in became.items():
        measured = options.into is not None and what.partition(" ")[0].isdigit()
        print(f"{part.name}: {what}{put_together(part, options) if measured else ''}")
    if any(what.startswith("failed") for what in became.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
