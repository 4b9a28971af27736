"""Benchmarks beside perplexity: requests, as `focus eval --write-requests` makes them, scored for every row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from focus_attn.baselines.seam import Baseline, use_baseline
from focus_attn.compare.subject import until
from focus_attn.evaluation.answers import Answers, answers_of
from focus_attn.evaluation.requests import Requests
from focus_attn.evaluation.score_file import ScoreFile, read_scores
from focus_attn.evaluation.scoring import score
from focus_attn.evaluation.summary import BASE, summarise_seeds
from focus_attn.progress import Progress

Scored = dict[str, Any]  # what one seed of a row made of every item, as JSON has it
# cells: keys of those that it was made beside
FIELDS = {"model", "row", "seed", "requests", "cells", "values", "pairs_kept"}


def score_row(
    model: nn.Module,
    peer: Baseline | None,
    requests: Requests,
    file: Path,
    tokenizer: Any,
    deadline: float,
    progress: Progress | None,
    name: str,
) -> None:
    """Score what the file does not have yet; it goes on where it was stopped."""
    report = until(deadline, progress, f"{name}: tasks")
    scores = ScoreFile(file, {"requests": requests.digest})
    if peer is None:
        score(model, requests, scores, tokenizer, progress=report)
        return
    with use_baseline(model, peer):
        # Whole sequences: a peer has no cache for what several items begin with.
        score(model, requests, scores, tokenizer, share_prefixes=False, progress=report)


def is_scored(requests: Requests, file: Path) -> bool:
    if not file.is_file():
        return False
    header, scores = read_scores(file)
    return header.get("requests") == requests.digest and len(scores) == len(requests.items)


def answers_in(file: Path, requests: Requests, name: str) -> dict[str, Any]:
    """The numbers of a metric stand in one string: thousands of them, a line each, would be most of a table's JSON.

    name: whose answers these are, for an error.
    """
    answers = answers_of(requests, read_scores(file)[1], name)
    values = {
        task: {metric: " ".join(f"{value:.6g}" for value in column) for metric, column in one.metrics.items()}
        for task, one in answers.items()
    }
    kept = {task: one.pairs_kept for task, one in answers.items() if one.pairs_kept is not None}
    return {"values": values, "pairs_kept": kept}


def who(one: Scored) -> tuple[Any, ...]:
    """Whose answers these are, and to what."""
    return tuple(one[name] for name in ("model", "row", "seed", "requests"))


def task_table(requests: Requests, every: Iterable[Scored]) -> list[dict[str, Any]]:
    """Every metric of every task with intervals, mean over the seeds of a row; "base" is what all are compared with.
    Answers to other requests are passed over."""
    runs: dict[str, list[dict[str, Answers]]] = {}
    for one in every:
        if one["requests"] == requests.digest:
            runs.setdefault(one["row"], []).append(_answers(one))
    return [row.to_dict() for row in summarise_seeds(requests, runs)] if BASE in runs else []


def _answers(one: Scored) -> dict[str, Answers]:
    return {
        task: Answers(
            {metric: [float(value) for value in column.split()] for metric, column in metrics.items()},
            one["pairs_kept"].get(task),
        )
        for task, metrics in one["values"].items()
    }


def task_heading(row: Mapping[str, Any], name: str) -> str:
    """Over the cells of a row of the comparison."""
    seeds = row.get("seeds", {}).get(name, 1)
    return name if seeds == 1 else f"{name} ({seeds} seeds)"


def task_cell(row: Mapping[str, Any], name: str) -> str:
    """The score of a row of the comparison and how it stands to the base's, as text."""
    score, against = f"{row['models'][name]['estimate']:.3g}", row["against_base"].get(name)
    if against is None:
        return score
    number = "x{:.3f}" if row["is_ratio"] else "{:+z.3f}"  # z: no minus before zeros
    estimate, low, high = (number.format(against[part]) for part in ("estimate", "low", "high"))
    return f"{score}, {estimate} [{low}, {high}]"
