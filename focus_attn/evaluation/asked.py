"""What an evaluation asks for, and the requests that this comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from focus_attn.evaluation.long_form import behind_text, many_shot
from focus_attn.evaluation.requests import Requests, merge
from focus_attn.evaluation.retrieval import DEPTHS, retrieval
from focus_attn.evaluation.tasks import short_form
from focus_attn.evaluation.text_requests import blocked, strided
from focus_attn.progress import Progress
from focus_attn.text import default_text
from focus_attn.training.documents import documents_to_measure

FORMS = ("short", "shots", "text")


@dataclass(frozen=True)
class Asked:
    """Nothing, until something is set."""

    text: Path | None = None  # None: the documentation that comes with Python, the part that is held out
    lengths: tuple[int, ...] = ()  # of blocks for perplexity
    stride: int | None = None
    blocks: int | None = None  # at most
    window: int = 128
    tasks: tuple[str, ...] = ()
    data: Path | None = None  # None: the Hub
    limit: int | None = None  # items a task
    long: tuple[int, ...] = ()  # lengths of the long forms
    forms: tuple[str, ...] = ("short", "shots")
    retrieval: tuple[str, ...] = ()
    retrieval_lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = DEPTHS
    per_cell: int = 20
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        values = dataclasses.asdict(self) | {"text": str(self.text or "Python's own documentation")}
        return values | {"data": str(self.data or "Hugging Face Hub") if self.tasks else None}


def build(tokenizer: PreTrainedTokenizerBase, asked: Asked, progress: Progress | None = None) -> Requests:
    """The requests of everything that is asked for."""
    if not (asked.lengths or asked.tasks or asked.retrieval):
        raise ValueError("nothing is asked for: leave out --no-perplexity, or give --tasks or --retrieval")
    if asked.tasks and not asked.long and "short" not in asked.forms:
        raise ValueError(f"--forms {','.join(asked.forms)} need a length: give --long TOKENS, as in --long 4096")
    if asked.long and not asked.tasks:
        raise ValueError("--long is the length of the long forms of --tasks: name some")
    documents = default_text().held_out if asked.text is None else documents_to_measure(asked.text)
    work: list[Callable[[], Requests]] = []
    for length in asked.lengths:
        work.append(partial(blocked, tokenizer, documents, length, asked.window, asked.blocks))
        if asked.stride is not None:
            work.append(partial(strided, tokenizer, documents, length, asked.stride, asked.blocks))
    for name in asked.tasks:
        if "short" in asked.forms:
            work.append(partial(short_form, tokenizer, name, asked.data, asked.limit))
        for length in asked.long:
            if "shots" in asked.forms:
                work.append(partial(many_shot, tokenizer, name, length, asked.data, asked.limit, seed=asked.seed))
            if "text" in asked.forms:
                work.append(partial(behind_text, tokenizer, name, length, documents, asked.data, asked.limit))
    for kind in asked.retrieval:
        grid = (asked.retrieval_lengths, asked.depths, asked.per_cell, asked.seed)
        work.append(partial(retrieval, tokenizer, kind, documents, *grid))
    parts = []
    for done, make in enumerate(work):
        if progress:
            progress("preparing requests", done, len(work))
        parts.append(make())
    if progress:
        progress("preparing requests", len(work), len(work))
    return merge(parts, asked.to_dict() | {"tokenizer": tokenizer.name_or_path})
