"""The cells of a comparison, one after the other. Each is written when it is measured; a rerun skips what is there."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from focus_attn.baselines.seam import Baseline
from focus_attn.compare.bench import bench_cells
from focus_attn.compare.data import Texts
from focus_attn.compare.groups import describe_groups
from focus_attn.compare.measure import measure
from focus_attn.compare.models import describe_model, load_model
from focus_attn.compare.peer import kind_of, make_peer, needs_text
from focus_attn.compare.recipe import Comparison, Method
from focus_attn.compare.store import FILE, Cell, CellStore, this_run, who_and_where
from focus_attn.compare.subject import OutOfTimeError, Subject, Workshop, digest, until
from focus_attn.compare.table import Place
from focus_attn.compare.tasks import Scored, answers_in, is_scored, score_row, task_table, who
from focus_attn.compare.tasks_together import made_with
from focus_attn.compare.timing import time_attention
from focus_attn.compare.together import check_same_blocks, is_of_row
from focus_attn.compare.training import check_positions
from focus_attn.evaluation.requests import Requests
from focus_attn.evaluation.summary import BASE
from focus_attn.model import FocusModel
from focus_attn.progress import Progress

FORMAT = 1  # raised when what is measured of a method changes, so that older cells are not taken for it
TIMED_RUNS = {"cuda": 11, "cpu": 3}


@dataclass(frozen=True)
class Settings:
    """Where and how a comparison is run."""

    folder: Path
    device: torch.device
    dtype: torch.dtype
    seconds: float = math.inf
    requests: Requests | None = None  # of the benchmarks, where the comparison asks for them
    known: Sequence[Cell] = ()  # of other runs, which need not be measured
    known_scores: Sequence[Scored] = ()  # their benchmarks
    time_again: bool = False  # measure the time of known cells on this machine, now
    progress: Progress | None = None
    log: Callable[[str], None] = lambda line: None


@dataclass
class Outcome:
    """What there is of a comparison so far."""

    cells: list[Cell] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)  # the benchmarks, item by item
    tasks: list[dict[str, Any]] = field(default_factory=list)  # every metric of the benchmarks, with intervals
    stopped: str | None = None  # why it is not all


def run(comparison: Comparison, settings: Settings) -> Outcome:
    """Measure what is missing, until it is all there or the time is up."""
    outcome = Outcome()
    deadline = time.monotonic() + settings.seconds
    store = CellStore(settings.folder / FILE, settings.known)
    try:
        if comparison.bench is not None:
            for cell in bench_cells(comparison.bench, store, deadline, settings.log):
                outcome.cells.append(cell)
            return outcome
        too_large: dict[str, None] = {}
        for model_name in comparison.models:
            model = _Model(comparison, model_name, settings, store, deadline)
            try:
                for cell in model.cells():
                    outcome.cells.append(cell)
            finally:  # what is scored by then
                if model.requests is not None:
                    outcome.scored = model.scored
                    outcome.tasks = task_table(model.requests, model.scored)
            too_large |= model.too_large
        if too_large:
            rows = ", ".join(too_large)
            outcome.stopped = f"out of memory: {rows}. The same command tries them again; `micro_batch` lowers it"
    except OutOfTimeError:
        late = time.monotonic() > deadline
        when = f"after the {settings.seconds:.0f} s given" if late else "by a signal in the middle of a training"
        outcome.stopped = f"stopped {when}: the same command goes on"
    return outcome


@dataclass(frozen=True)
class _Place:
    """Where a row is measured."""

    data: str
    length: int
    blocks: int


class _Model:
    """The cells of one model."""

    def __init__(
        self, comparison: Comparison, name: str, settings: Settings, store: CellStore, deadline: float
    ) -> None:
        self.comparison, self.settings, self.store, self.deadline = comparison, settings, store, deadline
        self.requests = settings.requests
        if self.requests is not None and not comparison.tasks:
            raise ValueError("this comparison has no benchmarks (`tasks: true`): leave --requests out")
        if self.requests is not None and len(comparison.models) > 1:
            raise ValueError("--requests holds tokens of one model: give that --model alone")
        model, tokenizer = load_model(name, settings.dtype, settings.device)
        check_positions(comparison, name, model)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self.name, self.tokenizer = name, tokenizer
        self.texts: dict[str, Texts] = {
            data: Texts(dataset, tokenizer, vocabulary) for data, dataset in comparison.data.items()
        }
        self.workshop = Workshop(
            comparison,
            name,
            model,
            self.texts,
            settings.folder / "trained",
            deadline,
            settings.progress,
            settings.log,
        )
        self.scored: list[Scored] = []
        self.too_large: dict[str, None] = {}  # rows for which there was not enough memory, in order
        self.known = {who_and_where(cell): cell for cell in settings.known}
        self.known_keys = {cell["key"] for cell in settings.known}
        self.known_scores = {who(one): one for one in settings.known_scores}
        self.same_blocks: set[Place] = set()  # where known cells were measured on the blocks of this run
        self.begun = 0  # cells
        self.measured = False  # any of them, in this run
        self.costs: dict[tuple[str, _Place], float] = {}  # (row, place) -> share, for rows of equal cost

    @property
    def total(self) -> int:
        rows = sum(len(self.comparison.seeds_of(method)) for method in self.comparison.methods)
        return rows * len(self._places())

    def cells(self) -> Iterator[Cell]:
        for method in self.comparison.methods:
            for seed in self.comparison.seeds_of(method):
                try:
                    yield from self._row(method, seed)
                except torch.OutOfMemoryError:  # no result: whoever else uses the device may be gone next time
                    self.too_large.setdefault(method.name)
                    self.settings.log(f"{method.name}: out of memory")
                else:
                    continue
                self._free_memory()  # only here has the exception let go of what was in memory

    def _row(self, method: Method, seed: int) -> Iterator[Cell]:
        """A row is made once, and only if one of its cells is missing."""
        subject: Subject | None = None
        keys: set[str] = set()  # of its cells
        for place in self._places():
            self.begun += 1
            cell = self._known(method, place, seed)
            if cell is None:
                if (key := self._key(method, place, seed)) not in self.store:
                    if time.monotonic() > self.deadline:
                        raise OutOfTimeError
                    subject = subject or self.workshop.make(method, seed)
                    self.store.put(key, self._measured(method, subject, place, seed))
                    self.measured = True
                # Names are for people: a row that was renamed is not measured again.
                cell = self.store[key] | {"row": method.name, "data": place.data}
                if method.is_base and self.settings.known:
                    self.same_blocks |= check_same_blocks(self.settings.known, [cell], "The known cells and this run")
            if self.settings.time_again and cell["key"] in self.known_keys and "figures" in cell:
                subject, cell = self._timed_again(method, subject, place, seed, cell)
            if subject is not None:
                where = f"{describe_model(self.name)}, {place.data}, {place.length:,}"
                self.settings.log(f"{self.begun}/{self.total} {where}: {one_line(cell)}")
            if "figures" in cell:
                self.costs.setdefault((method.name, place), cell["figures"]["full_layers"])
            keys.add(cell["key"])
            yield cell
        if self.requests is not None:
            row = BASE if method.is_base else method.name
            answers = {"model": describe_model(self.name), "row": row, "seed": seed, "requests": self.requests.digest}
            known = self.known_scores.get(who(answers))
            if known is not None and made_with(known, keys):
                self.scored.append(known)
            else:
                subject, file = self._score(method, subject, seed)
                if is_scored(self.requests, file):
                    values = answers_in(file, self.requests, row)
                    self.scored.append({**answers, "cells": sorted(keys), **values})
        if subject is not None and subject.model is not self.workshop.model:  # a copy, whose memory the next one needs
            del subject
            self._free_memory()

    def _known(self, method: Method, place: _Place, seed: int) -> Cell | None:
        """By its name and settings, once full attention has shown that the blocks are the same: the digest of a
        training is of the order of its text too. An adapter is known by its digest alone: settings do not tell
        weights."""
        at = Place(describe_model(self.name), place.data, place.length)
        cell = self.known.get((*at, method.name, seed))
        if cell is None or at not in self.same_blocks or method.adapter is not None or "failed" in cell:
            return None
        same_cost = cell.get("budget") == self._budget(method, place)
        return cell if same_cost and is_of_row(method, cell) else None

    def _timed_again(
        self, method: Method, subject: Subject | None, place: _Place, seed: int, cell: Cell
    ) -> tuple[Subject | None, Cell]:
        """A known cell with the time that its attention takes now. Only an attention that depends on what was trained
        has its row trained again for it."""
        again = digest(["timed again", cell["key"]])
        if again not in self.store:
            if time.monotonic() > self.deadline:
                raise OutOfTimeError
            if subject is None:
                subject = Subject(self.workshop.model) if cell["kind"] == "dense" else self.workshop.make(method, seed)
            peer = self._peer(method, subject, place.length, cell["budget"], seed)
            timing = self._time(subject, peer, self.texts[place.data].test_blocks(place.length, place.blocks)[0])
            self.store.put(again, cell | {"key": again, "timing": timing, "timed": this_run()})
        return subject, self.store[again] | {"key": cell["key"]}

    def _time(self, subject: Subject, peer: Baseline | None, block: torch.Tensor) -> dict[str, Any]:
        return time_attention(subject.model, peer, block, TIMED_RUNS[self.settings.device.type])

    def _free_memory(self) -> None:
        gc.collect()
        if self.settings.device.type == "cuda":
            torch.cuda.empty_cache()

    def _score(self, method: Method, subject: Subject | None, seed: int) -> tuple[Subject | None, Path]:
        """The benchmarks of a row, which is made for them if it is not there yet, and their file."""
        assert self.requests is not None
        made = [self.workshop.identity(method, seed), method.budget, self._fitted_to(method)]
        key = digest([*made, self.requests.digest])
        file = self.settings.folder / "scores" / f"{key}.jsonl"
        name = method.name if len(self.comparison.seeds_of(method)) == 1 else f"{method.name}, seed {seed}"
        if is_scored(self.requests, file):
            return subject, file
        subject = subject or self.workshop.make(method, seed)
        if subject.failed is not None:
            return subject, file
        longest = max(map(self.requests.length, self.requests.items))
        assert not isinstance(method.budget, str)  # `Comparison` refuses it
        try:
            peer = self._peer(method, subject, longest, method.budget, seed)
        except ValueError as error:  # as in `_measured`
            self.settings.log(f"{name}: no tasks: {error}")
            return subject, file
        score_row(subject.model, peer, self.requests, file, self.tokenizer, self.deadline, self.settings.progress, name)
        return subject, file

    def _places(self) -> list[_Place]:
        return [
            _Place(name, length, dataset.blocks)
            for name, dataset in self.comparison.data.items()
            for length in dataset.lengths
        ]

    def _key(self, method: Method, place: _Place, seed: int) -> str:
        texts = self.texts[place.data]
        identity = {
            "format": FORMAT,
            "made": self.workshop.identity(method, seed),
            "budget": self._budget(method, place),
            "text": texts.test.digest,
            "fitted_to": self._fitted_to(method),
            "length": place.length,
            "blocks": place.blocks,
            "window": self.comparison.window,
            "timing": self.comparison.timing,
            "groups": self.comparison.groups,
            "device": self.settings.device.type,
        }
        return digest(identity)

    def _peer(self, method: Method, subject: Subject, length: int, budget: float | None, seed: int) -> Baseline | None:
        if subject.peer is not None and budget is None:  # served as it was trained
            return subject.peer
        return make_peer(method, subject.model, length, budget, self._train_texts(method), seed)

    def _train_texts(self, method: Method) -> Texts:
        return self.texts[self.comparison.train_set(method)]

    def _fitted_to(self, method: Method) -> str | None:
        return self._train_texts(method).train.digest if needs_text(method) else None

    def _budget(self, method: Method, place: _Place) -> float | None:
        if not isinstance(method.budget, str):
            return method.budget
        return self.costs.get((method.budget, place))

    def _measured(self, method: Method, subject: Subject, place: _Place, seed: int) -> Cell:
        blocks = self.texts[place.data].test_blocks(place.length, place.blocks)
        cell: Cell = {
            "model": describe_model(self.name),
            "data": place.data,
            "text": self.texts[place.data].test.name,
            "length": place.length,
            "row": method.name,
            "method": method.to_dict(),
            "seed": seed,
            "kind": kind_of(method),
            "focus": method.is_focus,
            "dtype": str(self.settings.dtype).removeprefix("torch."),
            "adapter_digest": subject.adapter_digest,
            "trained_parameters": subject.trained_parameters,
            "training": subject.training,
            "budget": self._budget(method, place),
            "documents": self.texts[place.data].test_documents(place.length, place.blocks),
        }
        if subject.failed is not None:
            return cell | {"failed": subject.failed}
        if method.budget is not None and cell["budget"] is None:
            return cell | {"failed": f"what {method.budget!r} costs here is not known"}
        try:
            peer = self._peer(method, subject, place.length, cell["budget"], seed)
        except ValueError as error:  # a cost it cannot come down to, or a use it is not made for
            return cell | {"failed": str(error)}
        what = f"{self.begun}/{self.total} {method.name}, {place.data}, {place.length:,}"
        # One cell is finished in any case: one that takes longer than the time given would never be.
        report = until(self.deadline if self.measured else math.inf, self.settings.progress, what)
        cell["peer"] = None if peer is None else str(peer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a peer that looks ahead is marked in the table
            try:
                figures = measure(subject.model, peer, blocks, self.comparison.window, report)
            except ValueError as error:  # a peer may find out only when it attends that it cannot, as Linformer does
                if peer is None:
                    raise
                return cell | {"failed": str(error)}
            if not all(map(math.isfinite, figures.losses)):
                return cell | {"failed": "its loss is not a number"}
            cell["figures"] = figures.to_dict()
            if self.comparison.timing:
                cell["timing"] = self._time(subject, peer, blocks[0])
        if self.comparison.groups and isinstance(subject.model, FocusModel):
            cell["groups"] = describe_groups(subject.model, blocks, self.tokenizer)
        return cell


def one_line(cell: Cell) -> str:
    if "failed" in cell:
        return f"{cell['row']}: {cell['failed']}"
    figures = cell["figures"]
    return f"{cell['row']}: perplexity {figures['ppl']:.3f}, {figures['multiply_adds']:.1%} of the multiply-adds"
