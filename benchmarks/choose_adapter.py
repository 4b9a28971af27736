"""Train several recipes, ask each adapter the same questions, and say which one to keep.

    python benchmarks/choose_adapter.py recipes/k8_facts.yaml mine.yaml --seeds 2 --at-once 3 \
        --train books/train --train docs --test books/test --elsewhere wiki.test.raw \
        --requests choose.jsonl.xz --output runs/choice

Each recipe and seed is trained and measured by `adapter_figures.py` in a process of its own, `--at-once` of them on one
device, and scored by `focus eval` as soon as it is there. An adapter that keeps to the bars (perplexity over the base
model's on the test text and elsewhere, pairs kept, largest groups) comes before one that does not; of those, the one
with the fewest metrics below the base model's interval; of those, the one that loses least in perplexity. What
chooses must not judge: keep other questions for the one that is kept. The same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from focus_attn.bench.record import write_json
from focus_attn.evaluation.run import sum_up

BARS = {"test": 1.0, "pairs": 0.2, "elsewhere": 1.02, "largest_mean": 0.25, "largest_worst": 0.5}


@dataclass(frozen=True)
class Trial:
    """One recipe and seed, and where what came of it lies."""

    recipe: Path
    seed: int
    output: Path

    @property
    def name(self) -> str:
        return f"{self.recipe.stem}_s{self.seed}".replace(".", "_")  # as `focus eval` calls its folder

    @property
    def adapter(self) -> Path:
        return self.output / self.name

    @property
    def record(self) -> Path:
        return self.output / f"{self.name}.json"

    @property
    def figures(self) -> dict[str, float]:
        """What the bars are for."""
        found = json.loads(self.record.read_text(encoding="utf-8"))
        elsewhere = {"elsewhere": found["elsewhere"]["ratio"]["estimate"]} if "elsewhere" in found else {}
        return {
            "test": found["8192"]["ratio"]["estimate"],
            "pairs": found["8192"]["pairs_kept"],
            **elsewhere,
            "largest_mean": found["largest_group"]["mean"],
            "largest_worst": found["largest_group"]["worst"],
        }

    def over_the_bars(self) -> list[str]:
        return [name for name, value in self.figures.items() if value > BARS[name]]


def begin_training(trial: Trial, texts: Sequence[str]) -> subprocess.Popen[bytes]:
    program = [sys.executable, str(Path(__file__).with_name("adapter_figures.py")), str(trial.recipe), *texts]
    program += ["--seed", str(trial.seed), "--save", str(trial.adapter), "--json", str(trial.record)]
    with trial.record.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(program, stdout=log, stderr=log)


def trained(trials: Sequence[Trial], texts: Sequence[str], at_once: int) -> Iterator[Trial]:
    """Each when it is done. One that fails is named and left out: its log says why."""
    waiting = [trial for trial in trials if not trial.record.is_file()]
    yield from (trial for trial in trials if trial.record.is_file())
    running: dict[Trial, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running[waiting[0]] = begin_training(waiting[0], texts)
                print(f"{waiting.pop(0).name}: training", flush=True)
            time.sleep(1.0)
            for trial, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[trial]
                if trial.record.is_file():
                    yield trial
                else:
                    print(f"{trial.name}: failed, {trial.record.with_suffix('.log')} says why", flush=True)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def score(trial: Trial, requests: Path, scores: Path) -> None:
    program = [sys.executable, "-m", "focus_attn.cli", "eval", "--adapter", str(trial.adapter)]
    subprocess.run([*program, "--score-requests", str(requests), "--output", str(scores)], check=True)


def ranked(trials: Sequence[Trial], scores: Path) -> list[dict[str, Any]]:
    """The best first, each with what speaks against it."""
    rows = sum_up(scores).rows
    found = []
    for trial in trials:
        mine = [row for row in rows if trial.name in row.against_base]
        if not mine:
            raise ValueError(f"{trial.name} has no scores in {str(scores)!r}")
        found.append(
            {
                "name": trial.name,
                "figures": trial.figures,
                "over_the_bars": trial.over_the_bars(),
                "worse": [f"{row.task}, {row.metric}" for row in mine if row.verdict(trial.name) == "worse"],
                "perplexities": [row.against_base[trial.name].estimate for row in mine if row.is_ratio],
            }
        )
    return sorted(found, key=lambda one: (bool(one["over_the_bars"]), len(one["worse"]), sum(one["perplexities"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=1, help="of each recipe, from 0 on")
    parser.add_argument("--at-once", type=int, default=1, help="trainings on one device")
    parser.add_argument("--train", action="append", required=True, help="may be given several times")
    parser.add_argument("--test", required=True)
    parser.add_argument("--elsewhere", help="text of another kind")
    parser.add_argument("--requests", type=Path, required=True, help="a file of `focus eval --write-requests`")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if missing := [str(file) for file in (*options.recipes, options.requests) if not file.is_file()]:
        parser.error(f"no such file: {missing[0]}")
    texts = [word for path in options.train for word in ("--train", path)] + ["--test", options.test]
    texts += ["--elsewhere", options.elsewhere] if options.elsewhere else []
    options.output.mkdir(parents=True, exist_ok=True)
    trials = [Trial(recipe, seed, options.output) for recipe in options.recipes for seed in range(options.seeds)]
    if len({trial.name for trial in trials}) < len(trials):
        parser.error("two recipes have files of one name: their adapters would have one too")
    done = []
    for trial in trained(trials, texts, options.at_once):
        try:
            score(trial, options.requests, options.output / "scores")
        except subprocess.CalledProcessError as error:  # the others are not lost by it
            print(
                f"{trial.name}: its questions failed ({error.returncode}); the same command asks them again", flush=True
            )
            continue
        done.append(trial)
        choice = ranked(done, options.output / "scores")
        write_json(options.output / "choice.json", {"bars": BARS, "trials": choice})
        print(f"{trial.name}: {trial.figures}", flush=True)
    for one in choice if done else []:
        against = [f"over the bar: {', '.join(one['over_the_bars'])}"] if one["over_the_bars"] else []
        against += [f"worse: {'; '.join(one['worse'])}"] if one["worse"] else []
        print(f"{one['name']}: {', '.join(against) or 'nothing speaks against it'}")


if __name__ == "__main__":
    main()
