"""Many comparisons side by side on one device, until the time is up; then put together with what there is.

    python benchmarks/tables.py table1+table7+long-context table8+collapse table9 table4 --at-once 4 --seconds 560 \
        --out runs/seeds --into results/compare --seed 1 --seed 2 \
        --text books.train=train.npy --text books.test=test.npy

A small model's training waits for the host most of the time, so that several share a GPU well. Comparisons joined by +
run one after the other in one folder: what they train alike is trained once. The same command goes on after an
interruption. `--into` adds what was measured (other seeds, rows that were missing) to the files of
`focus compare --json` there. Other options are those of `focus compare`; a `--text NAME.part=PATH` goes to the
comparisons that have a dataset NAME.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from focus_attn.compare.recipe import Comparison, find_recipe

COMPARE = [sys.executable, "-m", "focus_attn.cli", "compare"]


def name_of(recipe: str) -> str:
    return Path(recipe).stem


def texts_for(recipe: str, texts: Sequence[str]) -> list[str]:
    known = Comparison.from_yaml(find_recipe(recipe)).data
    return [text for text in texts if "=" not in text or text.partition("=")[0].partition(".")[0] in known]


def run_group(recipes: Sequence[str], options: argparse.Namespace, passed: Sequence[str], deadline: float) -> None:
    """One after the other; what is left when the time is up is not begun."""
    folder = options.out / "+".join(map(name_of, recipes))
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in recipes:
        left = deadline - time.monotonic()
        if left < 1:
            return
        files = ["--out", str(folder), "--json", str(options.out / f"{name_of(recipe)}.json")]
        texts = [part for text in texts_for(recipe, options.text) for part in ("--text", text)]
        command = [*COMPARE, recipe, *files, "--seconds", f"{left:.0f}", *texts, *passed]
        with (options.out / f"{name_of(recipe)}.log").open("ab") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)  # the log says why one failed


def put_together(recipe: str, options: argparse.Namespace, passed: Sequence[str]) -> None:
    """Under the same `--model`, which says whose benchmarks a file has."""
    new, kept = options.out / f"{name_of(recipe)}.json", options.into / f"{name_of(recipe)}{options.suffix}.json"
    shown = [part for file in (kept, new) if file.is_file() for part in ("--show", str(file))]
    subprocess.run([*COMPARE, recipe, *shown, "--json", str(kept), *passed], check=True, stdout=subprocess.DEVNULL)


def said(recipe: str, options: argparse.Namespace) -> str:
    file = options.out / f"{name_of(recipe)}.json"
    if not file.is_file():
        return "nothing: see its log" if file.with_suffix(".log").is_file() else "not begun"
    found = json.loads(file.read_text(encoding="utf-8"))
    return f"{len(found['cells'])} cells; {found['stopped'] or 'whole'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", help="recipes, those that share trainings joined by +")
    parser.add_argument("--at-once", type=int, default=3, help="processes on the device")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then; the same command goes on")
    parser.add_argument("--out", type=Path, default=Path("runs/tables"), help="cells, trainings, tables and logs")
    parser.add_argument("--into", type=Path, help="folder of tables to add what was measured to")
    parser.add_argument("--suffix", default="", help="of the files there, as in table1_gemma.json")
    parser.add_argument("--text", action="append", default=[], help="as for focus compare")
    parser.add_argument("--model", help="as for focus compare")
    options, passed = parser.parse_known_args()
    groups = [group.split("+") for group in options.groups]
    fitting = {text for group in groups for recipe in group for text in texts_for(recipe, options.text)}
    if unknown := [text for text in options.text if text not in fitting]:
        parser.error(f"--text {unknown[0]}: none of these comparisons has such a dataset")
    model = [] if options.model is None else ["--model", options.model]
    deadline = time.monotonic() + min(options.seconds, 10**9)
    with ThreadPoolExecutor(options.at_once) as pool:
        for done in [pool.submit(run_group, group, options, [*model, *passed], deadline) for group in groups]:
            done.result()
    for recipe in (recipe for group in groups for recipe in group):
        print(f"{name_of(recipe)}: {said(recipe, options)}")
        if options.into is not None and (options.out / f"{name_of(recipe)}.json").is_file():
            put_together(recipe, options, model)


if __name__ == "__main__":
    main()
