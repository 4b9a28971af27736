"""From requests to results: every model is scored into one folder, and the folder is summed up.

    items.jsonl     the requests without their tokens: what the metrics need
    base.jsonl      scores of the base model, one line an item
    <adapter>.jsonl the same with an adapter

A folder can be carried to another machine, gone on with after an interruption, and summed up without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from focus_attn.bench.record import describe_run
from focus_attn.evaluation.bootstrap import RESAMPLES
from focus_attn.evaluation.models import Compared
from focus_attn.evaluation.requests import Requests
from focus_attn.evaluation.score_file import ScoreFile, read_scores
from focus_attn.evaluation.scoring import Scorer
from focus_attn.evaluation.summary import (
    BASE,
    Cell,
    Row,
    base_of,
    by_position,
    kept_of_base,
    retrieval_cells,
    summarise,
)
from focus_attn.progress import Progress

ITEMS = "items.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """What was measured."""

    requests: Requests
    base: str
    rows: list[Row]
    positions: list[Row]
    cells: list[Cell]
    runs: dict[str, dict[str, Any]]  # the header of each model's scores: where and with what they were made

    def to_dict(self) -> dict[str, Any]:
        others = [name for name in self.runs if name != self.base]
        kept = {
            task: {
                name: asdict(kept_of_base([cell for cell in self.cells if cell.task == task], name, self.base))
                for name in others
            }
            for task in dict.fromkeys(cell.task for cell in self.cells)
        }
        return {
            "settings": self.requests.settings,
            "tasks": {name: task.settings for name, task in self.requests.tasks.items()},
            "requests": self.requests.digest,
            "models": self.runs,
            "rows": [row.to_dict() for row in self.rows],
            "positions": [row.to_dict() for row in self.positions],
            "cells": [cell.to_dict() for cell in self.cells],
            "retrieval_kept": kept,
        }


def score_all(
    compared: Compared,
    requests: Requests,
    folder: Path,
    *,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Score with every model what the folder does not have yet."""
    for name in compared.names:  # before hours are spent on the first one
        with compared.use(name) as model:
            Scorer(model, requests, compared.tokenizer).check()
    for name in compared.names:
        facts = compared.facts(name)
        with compared.use(name) as model:
            score_model(
                model,
                compared.tokenizer,
                requests,
                folder,
                name,
                facts,
                batch_tokens=batch_tokens,
                progress=progress,
            )


def score_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    requests: Requests,
    folder: Path,
    name: str,
    facts: dict[str, Any] | None = None,
    *,
    batch_tokens: int | None = None,
    share_prefixes: bool = True,
    progress: Progress | None = None,
) -> None:
    """Any causal LM becomes a column: its scores go to `<folder>/<name>.jsonl`.

    Args:
        facts: what the scores are known by, such as the model's name and dtype; others are not gone on with.
    """
    if f"{name}.jsonl" == ITEMS:
        raise ValueError(f"a model cannot be called {name!r}: {ITEMS} holds the requests")
    scorer = Scorer(model, requests, tokenizer, batch_tokens, share_prefixes)
    scorer.check()  # before anything is written: what is refused is to leave no trace
    if not (folder / ITEMS).is_file():
        requests.without_tokens().save(folder / ITEMS)
    elif Requests.load(folder / ITEMS).digest != requests.digest:
        raise ValueError(f"{str(folder)!r} has scores of other requests: choose another folder, or delete it")
    header = {"requests": requests.digest, **(facts or {})}
    scores = ScoreFile(folder / f"{name}.jsonl", header, notes={"run": describe_run()})
    scorer.score(scores, None if progress is None else partial(progress, f"scoring {name}"))


def sum_up(folder: Path, resamples: int = RESAMPLES, order: Sequence[str] = ()) -> Evaluation:
    """The results of a folder of scores: the base model, then the others as in `order`, then the rest by name."""
    if not (folder / ITEMS).is_file():
        raise ValueError(f"no {ITEMS} in {str(folder)!r}: it is not a folder that `focus eval` has scored into")
    requests = Requests.load(folder / ITEMS)
    places = {name: place for place, name in enumerate((BASE, *order))}
    files = [file for file in folder.glob("*.jsonl") if file.name != ITEMS]
    files.sort(key=lambda file: (places.get(file.stem, len(places)), file.stem))
    if not files:
        raise ValueError(f"no scores in {str(folder)!r}: `focus eval --score-requests FILE --output DIR` makes them")
    runs, scores = {}, {}
    for file in files:
        runs[file.stem], scores[file.stem] = read_scores(file)
        if runs[file.stem].get("requests") != requests.digest:
            raise ValueError(f"{str(file)!r} has scores of other requests than {ITEMS}: do not mix folders")
    rows = summarise(requests, scores, resamples)
    positions = by_position(requests, scores, resamples)
    return Evaluation(requests, base_of(scores), rows, positions, retrieval_cells(requests, scores), runs)
