"""A row made ready to be measured: its model, trained where the row says so."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from focus_attn.adapters import CONFIG_FILE, adapter_digest
from focus_attn.baselines.seam import Baseline, use_baseline
from focus_attn.compare.data import Texts
from focus_attn.compare.peer import drawn_with, make_peer
from focus_attn.compare.recipe import Comparison, Method, plain
from focus_attn.compare.training import identity_of, training_recipe, tuning_options
from focus_attn.model import FocusModel
from focus_attn.progress import Count, Progress
from focus_attn.zoo import cast_parameters, find_adapter

CURVE_POINTS = 60
SAVE_EVERY = 100  # steps of a fine-tuning that an interruption can cost


class OutOfTimeError(Exception):
    """The time given is up; the same command goes on."""


def until(deadline: float, progress: Progress | None, what: str) -> Count:
    """Shows how much of `what` is done, and raises `OutOfTimeError` once it is late and something is left to do."""

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(what, done, total)
        if time.monotonic() > deadline and done < total:
            raise OutOfTimeError

    return report


@dataclass(frozen=True)
class Subject:
    """What is measured in a row."""

    model: nn.Module  # a causal LM or a FocusModel
    trained_parameters: int = 0
    training: dict[str, Any] = field(default_factory=dict)  # what it took
    peer: Baseline | None = None  # what its weights were trained under, centroids and all
    adapter_digest: str | None = None  # of a saved adapter
    failed: str | None = None  # why there is nothing to measure


@dataclass(frozen=True)
class Workshop:
    """What the rows of one model are made from."""

    comparison: Comparison
    model_name: str
    model: nn.Module  # as pretrained; what is trained is a copy
    texts: Mapping[str, Texts]
    folder: Path  # of what is trained
    deadline: float = math.inf  # of time.monotonic()
    progress: Progress | None = None
    log: Callable[[str], None] = lambda line: None

    def make(self, method: Method, seed: int) -> Subject:
        """The model loaded, and trained as the row says."""
        if time.monotonic() > self.deadline:
            raise OutOfTimeError
        if method.tune is not None:
            return self._tune(method, seed)
        if method.focus is not None:
            return self._train_focus(method, seed)
        if method.adapter is not None:
            folder = find_adapter(method.adapters[seed])
            try:
                focus = FocusModel.from_pretrained(copy.deepcopy(self.model), folder, changes=method.serve)
            except ValueError as error:  # made for another model: the other rows need not wait for it
                return Subject(self.model, failed=str(error))
            return Subject(focus, focus.get_nb_trainable_parameters()[0], adapter_digest=adapter_digest(folder))
        return Subject(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def identity(self, method: Method, seed: int) -> dict[str, Any]:
        """All that decides what `make` makes; a run is looked up by it."""
        made: dict[str, Any] = {"model": self.model_name, "dtype": str(self.dtype), **method.to_dict()}
        del made["name"], made["budget"]
        texts = self.texts[self.comparison.train_set(method)]
        if method.focus is not None:
            recipe = training_recipe(self.comparison, method, seed)
            made |= {"recipe": identity_of(recipe), "text": texts.train.digest}
        elif method.adapter is not None:
            file = find_adapter(method.adapters[seed]) / CONFIG_FILE
            described = json.loads(file.read_text(encoding="utf-8"))
            made["adapter"] = [described["weights_sha256"], described["config"]]
        elif method.tune is not None:
            made |= {"tuning": tuning_options(self.comparison, method), "text": texts.train.digest, "seed": seed}
            if drawn := drawn_with(method, seed):
                made["drawn_with"] = drawn
        return plain(made)

    def _train_focus(self, method: Method, seed: int) -> Subject:
        from focus_attn.training import train
        from focus_attn.training.beginning import RECORD

        recipe = training_recipe(self.comparison, method, seed)
        texts = self.texts[self.comparison.train_set(method)]
        # Rows that differ only in how they are served share their training.
        run = self.folder / digest([self.model_name, identity_of(recipe), texts.train.digest])
        result = train(
            copy.deepcopy(self.model),
            texts.train_documents(max(recipe.lengths().values())),
            recipe,
            output=run,
            device=next(self.model.parameters()).device.type,
            time_limit=None if self.deadline == math.inf else max(1.0, self.deadline - time.monotonic()),
            log=self.log,
            progress=self.progress,
        )
        if not result.finished:
            raise OutOfTimeError
        parameters, _ = result.model.get_nb_trainable_parameters()
        base = result.model.unload()
        cast_parameters(base.parameters(), self.dtype)  # one that was trained is in fp32
        record = json.loads((run / RECORD).read_text(encoding="utf-8"))
        took = {
            "steps": recipe.steps,
            "tokens": sum(stage.tokens for stage in recipe.stages),
            "seconds_of_last_call": round(record["seconds"], 1),
            "curve": _curve(run / "log.jsonl"),
        }
        return Subject(FocusModel.from_pretrained(base, run, changes=method.serve), parameters, took)

    def _tune(self, method: Method, seed: int) -> Subject:
        """LoRA, DoRA or full fine-tuning under whatever the row attends with."""
        from focus_attn.baselines.fine_tune import DivergedError, fine_tune

        options = tuning_options(self.comparison, method)
        how, length = options.pop("how"), options.pop("length")
        texts = self.texts[self.comparison.train_set(method)]
        blocks = texts.train_blocks(length, options["steps"] * options["sequences"])
        model = copy.deepcopy(self.model)
        peer = make_peer(method, model, length, method.budget, texts, seed)  # type: ignore[arg-type]
        checkpoint = self.folder / f"{digest(self.identity(method, seed))}.pt"
        report = until(self.deadline, self.progress, f"{method.name}: training")

        try:
            with nullcontext() if peer is None else use_baseline(model, peer):
                tuned = fine_tune(
                    model,
                    blocks,
                    method=how,
                    seed=seed,
                    checkpoint=checkpoint,
                    save_every=SAVE_EVERY,
                    progress=report,
                    **options,
                )
        except DivergedError as error:  # a result of this row, which the others need not wait for
            return Subject(model, failed=str(error))
        tokens = options["steps"] * options["sequences"] * length
        record = {"steps": options["steps"], "tokens": tokens, "last_loss": tuned.losses[-1]}
        return Subject(model, tuned.parameters, record, peer)


def digest(parts: Any) -> str:
    """A short name for all that defines something."""
    return hashlib.sha256(json.dumps(plain(parts), sort_keys=True).encode()).hexdigest()[:16]


def _curve(log: Path) -> list[dict[str, float]]:
    """How even the groups were over the steps of a run, a few points of it."""
    wanted = ("step", "lm", "pairs_kept", "dominance", "worst_dominance")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    points = [{name: line[name] for name in wanted if name in line} for line in lines if "dominance" in line]
    return points[:: max(1, math.ceil(len(points) / CURVE_POINTS))]
