"""What a model made of every item of some requests: the numbers that all summaries are of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from focus_attn.evaluation.metrics import MEASURES
from focus_attn.evaluation.requests import Requests
from focus_attn.evaluation.score_file import Key, Score

Scores = Mapping[Key, Score]


@dataclass(frozen=True)
class Answers:
    """Of one task."""

    metrics: dict[str, list[float]]  # a value for each item, in the order of the requests
    pairs_kept: float | None = None  # mean share, where it was counted


def answers_of(requests: Requests, scores: Scores, name: str) -> dict[str, Answers]:
    """By task. name: whose they are, for the error where some are missing."""
    return {task: _of_task(requests, task, scores, name) for task in requests.tasks}


def _of_task(requests: Requests, task: str, scores: Scores, name: str) -> Answers:
    items = [item for item in requests.items if item.task == task]
    if missing := [item for item in items if item.key not in scores]:
        raise ValueError(
            f"the scores of {name!r} lack {len(missing):,} of {len(items):,} items of {task!r}: run the same command "
            "with --score-requests again, it goes on where it stopped"
        )
    own = [scores[item.key] for item in items]
    measure = MEASURES[requests.tasks[task].measure]
    values = [measure(item, score) for item, score in zip(items, own, strict=True)]
    kept = [score["pairs_kept"] for score in own if "pairs_kept" in score]
    return Answers({metric: [one[metric] for one in values] for metric in values[0]}, mean(kept) if kept else None)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
