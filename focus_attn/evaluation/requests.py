"""What is asked of a model, as token ids in one file: written where the data and lm-eval are, scored where the GPU is.

The file is JSON, one record a line (`.xz` at the end of its name: compressed). The first line says what it is; then
come the tasks, the prefixes that items share, and the items. Without its tokens (`without_tokens`) it still has what
the metrics need, and is small enough to keep beside the scores.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, get_args

FORMAT = 1  # raised when what is written below changes

# loglikelihood: how likely each continuation is. generate: what the model writes next, greedily.
# losses: how likely the context's own tokens are.
Kind = Literal["loglikelihood", "generate", "losses"]


@dataclass(frozen=True)
class Task:
    """Items that are summed up together, and how: `measure` names a function of metrics.py."""

    name: str
    measure: str
    family: Literal["perplexity", "task", "retrieval"]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One question, or one block of text."""

    task: str
    item: str
    kind: Kind
    context: Sequence[int]
    continuations: Sequence[Sequence[int]] = ()
    prefix: str | None = None  # name of the tokens that go before the context
    answer: dict[str, Any] = field(default_factory=dict)  # what the measure needs to know
    options: dict[str, Any] = field(default_factory=dict)  # generate: max_new_tokens, until; losses: edges

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.item


@dataclass(frozen=True)
class Requests:
    """Everything that one evaluation asks."""

    tasks: dict[str, Task]
    items: list[Item]
    prefixes: dict[str, list[int]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # what was asked for, in words and numbers
    digest: str = ""  # of the records; of the whole ones also where the tokens were taken out

    def __post_init__(self) -> None:
        seen: set[tuple[str, str]] = set()
        for item in self.items:
            if item.task not in self.tasks:
                raise ValueError(f"item {item.item!r} belongs to {item.task!r}, which is not among the tasks")
            if item.kind not in get_args(Kind):
                raise ValueError(f"item {item.item!r} of {item.task!r} has the unknown kind {item.kind!r}")
            if item.prefix is not None and item.prefix not in self.prefixes:
                raise ValueError(f"item {item.item!r} of {item.task!r} names the missing prefix {item.prefix!r}")
            if item.key in seen:
                raise ValueError(f"{item.task!r} has two items {item.item!r}")
            seen.add(item.key)
        if not self.digest:
            object.__setattr__(self, "digest", self._digest())

    def _digest(self) -> str:
        whole = hashlib.sha256()
        for record in self._records():
            whole.update(_line(record).encode())
        return whole.hexdigest()[:16]

    def _records(self) -> Iterator[dict[str, Any]]:
        for task in self.tasks.values():
            yield {"type": "task", **asdict(task)}
        for name, tokens in self.prefixes.items():
            yield {"type": "prefix", "name": name, "tokens": list(tokens)}
        for item in self.items:
            yield {"type": "item", **{name: value for name, value in vars(item).items() if value not in (None, (), {})}}

    def without_tokens(self) -> Requests:
        """The same with nothing to score any more: what the metrics need."""
        items = [replace(item, context=(), continuations=()) for item in self.items]
        return replace(self, items=items, prefixes={name: [] for name in self.prefixes})

    def save(self, path: str | Path) -> Path:
        """Replaced whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"part-{path.name}")
        with _open(draft, "wt") as file:
            header = {"type": "requests", "format": FORMAT, "digest": self.digest, "settings": self.settings}
            for record in (header, *self._records()):
                file.write(_line(record))
        os.replace(draft, path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Requests:
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"no such file: {str(path)!r} (`focus eval --write-requests FILE` makes one)")
        header: dict[str, Any] = {}
        tasks: dict[str, Task] = {}
        prefixes: dict[str, list[int]] = {}
        items = []
        try:
            with _open(path, "rt") as file:
                for line in file:
                    record = json.loads(line)
                    kind = record.pop("type")
                    if kind == "requests":
                        header = record
                    elif kind == "task":
                        tasks[record["name"]] = Task(**record)
                    elif kind == "prefix":
                        prefixes[record["name"]] = record["tokens"]
                    else:
                        items.append(Item(**{"context": (), **record}))
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, lzma.LZMAError) as error:
            raise ValueError(f"{str(path)!r} is not a file of requests, or is cut short: {error}") from None
        if header.get("format") != FORMAT:
            raise ValueError(
                f"{str(path)!r} has format {header.get('format')}, this version reads {FORMAT}: write the requests anew"
            )
        return cls(tasks, items, prefixes, header["settings"], header["digest"])

    def length(self, item: Item) -> int:
        """Tokens of the longest sequence that the item needs, what is generated included."""
        written = max((len(tokens) for tokens in item.continuations), default=item.options.get("max_new_tokens", 0))
        return len(self.prefixes[item.prefix] if item.prefix else ()) + len(item.context) + written

    def whole_context(self, item: Item) -> Sequence[int]:
        """The tokens before its continuations, the prefix included."""
        return (*self.prefixes[item.prefix], *item.context) if item.prefix else item.context


def merge(parts: Sequence[Requests], settings: Mapping[str, Any]) -> Requests:
    """One file's worth of requests from several; the names of their tasks and prefixes must differ."""
    tasks: dict[str, Task] = {}
    prefixes: dict[str, list[int]] = {}
    items: list[Item] = []
    for part in parts:
        for name, task in part.tasks.items():
            if name in tasks:
                raise ValueError(f"the task {name!r} is asked for twice")
            tasks[name] = task
        prefixes |= part.prefixes
        items += part.items
    return Requests(tasks, items, prefixes, dict(settings))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"


def _open(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    if path.suffix == ".xz":
        return lzma.open(path, mode, encoding="utf-8")
    return path.open(mode, encoding="utf-8")
