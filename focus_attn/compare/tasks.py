"""Benchmarks beside perplexity: requests, as `focus eval --write-requests` makes them, scored for every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from focus_attn.baselines.seam import Baseline, use_baseline
from focus_attn.compare.subject import until
from focus_attn.evaluation.requests import Requests
from focus_attn.evaluation.score_file import ScoreFile, read_scores
from focus_attn.evaluation.scoring import score
from focus_attn.evaluation.summary import BASE, summarise_seeds
from focus_attn.progress import Progress


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


def task_table(requests: Requests, files: Mapping[str, Sequence[Path]]) -> list[dict[str, Any]]:
    """Every metric of every task with intervals, mean over the files of a row's seeds; "base" is what all are compared
    with."""
    scored = {name: [read_scores(file)[1] for file in own if is_scored(requests, file)] for name, own in files.items()}
    finished = {name: own for name, own in scored.items() if own}
    return [row.to_dict() for row in summarise_seeds(requests, finished)] if BASE in finished else []


def task_heading(row: Mapping[str, Any], name: str) -> str:
    """Over the cells of a row of the comparison."""
    seeds = row.get("seeds", {}).get(name, 1)
    return name if seeds == 1 else f"{name} ({seeds} seeds)"


def task_cell(row: Mapping[str, Any], name: str) -> str:
    """The score of a row of the comparison and how it stands to the base's, as text."""
    score, against = f"{row['models'][name]['estimate']:.3g}", row["against_base"].get(name)
    if against is None:
        return score
    number = "x{:.3f}" if row["is_ratio"] else "{:+.3g}"
    estimate, low, high = (number.format(against[part]) for part in ("estimate", "low", "high"))
    return f"{score}, {estimate} [{low}, {high}]"
