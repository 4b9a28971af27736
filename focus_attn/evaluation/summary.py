"""Base and Focus beside each other: every metric with its interval, and the difference with its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from focus_attn.evaluation.answers import Answers, Scores, answers_of, mean
from focus_attn.evaluation.bootstrap import (
    FEWEST_ITEMS,
    RESAMPLES,
    Interval,
    errors_above,
    mean_interval,
    paired_difference,
    paired_ratio,
    perplexity_interval,
    perplexity_ratio,
)
from focus_attn.evaluation.metrics import FROM_LOSSES, LOWER_IS_BETTER, MEASURES, chance, weight
from focus_attn.evaluation.requests import Item, Requests, Task

FLOOR = 2.0  # standard errors above chance that the base model must have for a task to count
LEAST_RECALL = 0.5  # of the base model, for a retrieval cell to count
BASE = "base"
TOO_FEW = "too few items to tell"

Runs = Sequence[Mapping[str, Answers]]  # of one way to train, with several seeds: answers by task


@dataclass(frozen=True)
class Row:
    """One metric of one task, or of one bucket of positions."""

    task: str
    metric: str
    n: int
    models: dict[str, Interval]
    against_base: dict[str, Interval]
    is_ratio: bool  # `against_base` is a ratio of perplexities; of everything else it is a difference
    chance: float | None
    errors_above_chance: float | None  # of the base model; None where chance has no meaning
    pairs_kept: dict[str, float]
    seeds: dict[str, int] = field(default_factory=dict)  # of the models that are means over several

    @property
    def at_floor(self) -> bool:
        """The base model does no better than guessing: nothing can be lost, so nothing is shown by not losing it."""
        return self.n > 1 and self.errors_above_chance is not None and self.errors_above_chance < FLOOR

    def verdict(self, model: str) -> str:
        if self.at_floor:
            return "base at the floor, not counted"
        if model not in self.against_base:
            return ""
        interval = self.against_base[model]
        if self.n < FEWEST_ITEMS:
            return TOO_FEW
        equal = 1.0 if self.is_ratio else 0.0
        if interval.contains(equal):
            return "within the interval"
        lower_is_better = self.is_ratio or self.metric in LOWER_IS_BETTER
        return "better" if (interval.estimate < equal) == lower_is_better else "worse"

    def to_dict(self) -> dict[str, Any]:
        above = self.errors_above_chance
        return asdict(self) | {
            "errors_above_chance": above if above is None or math.isfinite(above) else None,  # JSON has no infinity
            "at_floor": self.at_floor,
            "verdict": {model: self.verdict(model) for model in self.against_base},
        }


@dataclass(frozen=True)
class Cell:
    """One cell of a retrieval grid."""

    task: str
    length: int
    depth: float | None  # None: facts all over the text
    found: dict[str, list[float]]  # recall of each item, by model

    @property
    def n(self) -> int:
        return len(next(iter(self.found.values())))

    @property
    def recall(self) -> dict[str, float]:
        return {model: sum(values) / len(values) for model, values in self.found.items()}

    def to_dict(self) -> dict[str, Any]:
        return {"task": self.task, "length": self.length, "depth": self.depth, "n": self.n, "recall": self.recall}


@dataclass(frozen=True)
class Kept:
    """A model's recall over the base model's, over the cells where the base finds at least half."""

    ratio: Interval | None  # None: there is no such cell
    counted: int
    cells: int


def summarise(requests: Requests, scores: Mapping[str, Scores], resamples: int = RESAMPLES) -> list[Row]:
    """A row for each metric of each task; the base model is the one called "base", or the first."""
    runs = {name: [answers_of(requests, own, name)] for name, own in scores.items()}
    return summarise_seeds(requests, runs, resamples)


def summarise_seeds(requests: Requests, runs: Mapping[str, Runs], resamples: int = RESAMPLES) -> list[Row]:
    """The same where models were trained with several seeds: an item's score is the mean over them."""
    rows = []
    for task in requests.tasks.values():
        items = [item for item in requests.items if item.task == task.name]
        seeds = {name: [answers[task.name] for answers in own] for name, own in runs.items()}
        rows += [_row(task, metric, items, seeds, resamples) for metric in seeds[base_of(runs)][0].metrics]
    return rows


def by_position(requests: Requests, scores: Mapping[str, Scores], resamples: int = RESAMPLES) -> list[Row]:
    """Perplexity in buckets of position, for each blocked task; `metric` names the bucket."""
    rows = []
    for task in requests.tasks.values():
        items = [item for item in requests.items if item.task == task.name]
        if task.measure != "text_losses" or len(items[0].options["edges"]) < 2:
            continue
        edges = [*items[0].options["edges"], items[0].answer["length"]]
        for bucket, (first, last) in enumerate(pairwise(edges)):
            columns = {
                name: [own[item.key]["losses"][bucket] / (last - first) for item in items]
                for name, own in scores.items()
            }
            drawn: dict[str, Any] = {"together": drawn_together(items), "resamples": resamples}
            models = {name: perplexity_interval(column, **drawn) for name, column in columns.items()}
            base = columns[base_of(scores)]
            against = {
                name: perplexity_ratio(base, column, **drawn)
                for name, column in columns.items()
                if name != base_of(scores)
            }
            rows.append(Row(task.name, f"{first}-{last - 1}", len(items), models, against, True, None, None, {}))
    return rows


def retrieval_cells(requests: Requests, scores: Mapping[str, Scores]) -> list[Cell]:
    """Mean recall for each task, length and depth."""
    groups: dict[tuple[str, int, float | None], list[Item]] = {}
    for item in requests.items:
        if requests.tasks[item.task].family == "retrieval":
            kind, _, _ = item.task.partition("@")
            groups.setdefault((kind, item.answer["length"], item.answer["depth"]), []).append(item)
    cells = []
    for (kind, length, depth), items in groups.items():
        measure = MEASURES[requests.tasks[items[0].task].measure]
        found = {name: [measure(item, own[item.key])["recall"] for item in items] for name, own in scores.items()}
        cells.append(Cell(kind, length, depth, found))
    return cells


def kept_of_base(cells: Sequence[Cell], model: str, base: str = BASE) -> Kept:
    counted = [cell for cell in cells if cell.recall[base] >= LEAST_RECALL]
    if not counted:
        return Kept(None, 0, len(cells))
    both = ([value for cell in counted for value in cell.found[name]] for name in (base, model))
    return Kept(paired_ratio(*both), len(counted), len(cells))


def drawn_together(items: Sequence[Item]) -> list[str] | None:
    """What items share their luck with: the prefix they stand behind or, of a text's blocks, their document."""
    if all(item.kind == "losses" for item in items):
        return [item.item.partition(":")[0] for item in items]
    prefixes = [item.prefix for item in items]
    return None if None in prefixes else prefixes  # type: ignore[return-value]


def base_of(scores: Mapping[str, Any]) -> str:
    return BASE if BASE in scores else next(iter(scores))


def _row(task: Task, metric: str, items: Sequence[Item], seeds: Mapping[str, Sequence[Answers]], resamples: int) -> Row:
    base = base_of(seeds)
    columns = {
        name: [mean(of_item) for of_item in zip(*(one.metrics[metric] for one in own), strict=True)]
        for name, own in seeds.items()
    }
    weights = [weight(item, metric) for item in items]
    losses = metric in FROM_LOSSES
    one, two = (perplexity_interval, perplexity_ratio) if losses else (mean_interval, paired_difference)
    together = drawn_together(items)
    models = {name: one(column, weights, together=together, resamples=resamples) for name, column in columns.items()}
    against = {
        name: two(columns[base], column, weights, together=together, resamples=resamples)
        for name, column in columns.items()
        if name != base
    }
    guesses = None if losses else [chance(item, task.measure) for item in items]
    if guesses is None or None in guesses:
        guessing, above = None, None
    else:
        margins = [value - guess for value, guess in zip(columns[base], guesses, strict=True) if guess is not None]
        guessing = mean([guess for guess in guesses if guess is not None])
        above = errors_above(margins, 0.0, together)
    kept = {
        name: mean(shares)
        for name, own in seeds.items()
        if (shares := [answers.pairs_kept for answers in own if answers.pairs_kept is not None])
    }
    several = {name: len(own) for name, own in seeds.items() if len(own) > 1}
    return Row(task.name, metric, len(items), models, against, losses, guessing, above, kept, several)
