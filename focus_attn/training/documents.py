"""The documents of what can be trained on: files, folders, JSONL line by line, datasets of the hub or at hand.

A row of JSONL or of a dataset has a field of text, or `prompt` and `completion`, as TRL has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from focus_attn.text import SUFFIXES, json_records, read_text
from focus_attn.training.recipe import Data

HUB = "hub:"
LONGEST_NAME = 255  # of a file, in most file systems
CHARACTERS_TO_MEASURE = 20_000_000  # of a hub dataset, which need not end
JOINED_CHARACTERS = 1 << 20  # of a document of joined lines: a stream is read a piece at a time
PROMPT, COMPLETION = "prompt", "completion"


class Answered(str):
    """A prompt with its answer behind it, and the character that the answer begins with."""

    begins: int

    def __new__(cls, prompt: str, completion: str) -> Answered:
        both = super().__new__(cls, prompt + completion)
        both.begins = len(prompt)
        return both


def read_documents(path: Path, field: str, join: bool = False) -> Iterator[str]:
    """The texts of a file or of every file below a folder, in the order of their names; JSONL line by line, or with
    `join` as one text."""
    for file in text_files(path):
        if file.suffix == ".jsonl":
            yield from _documents(_jsonl(file, field), join)
        elif file.stat().st_size:
            yield from read_text(file)


def text_files(path: Path) -> list[Path]:
    if "\n" in str(path) or len(path.name) > LONGEST_NAME:
        raise ValueError("a text itself is given as a list of documents, [text]; a string names a file or a folder")
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise ValueError(
                f"no {', '.join(SUFFIXES)} file below the folder {str(path)!r} (token files, .npy, are named singly)"
            )
        return files
    if not path.is_file():
        raise ValueError(
            f"no such file or folder: {str(path)!r} (a dataset of the Hugging Face Hub is written "
            f"{HUB}owner/name, and text itself is given as a list of documents)"
        )
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r} is not one of the kinds that can be read: {', '.join(SUFFIXES)}, .npy")
    return [path]


def _jsonl(file: Path, field: str) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for where, record in json_records(lines, file):
            yield text_of(record, field, where)


def _documents(rows: Iterable[str], join: bool) -> Iterator[str]:
    """Each row is a document or, joined, a line of one text, blank ones included: WikiText on the hub is so, and any
    text file that `datasets` reads."""
    if not join:
        yield from rows
        return
    lines: list[str] = []
    size = 0
    for row in rows:
        if isinstance(row, Answered):
            raise ValueError(
                f"`data.join` puts the lines of one text together, and rows of `{PROMPT}` and `{COMPLETION}` are none: "
                "leave it out, and set `data.packing: true` where they are short"
            )
        lines.append(row if row.endswith("\n") else f"{row}\n")
        size += len(lines[-1])
        if size >= JOINED_CHARACTERS:
            yield "".join(lines)
            lines, size = [], 0
    yield "".join(lines)


def text_of(record: Any, field: str, where: str) -> str:
    """The text of a row, or its prompt and completion where it has none and no field is asked for."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{where} is a {type(record).__name__}: a document is an object with a field {field!r}")
    if record.get(field) is not None:
        return _text(record, field, where)
    if field == Data.field and record.get(PROMPT) is not None and record.get(COMPLETION) is not None:
        return Answered(_text(record, PROMPT, where), _text(record, COMPLETION, where))
    otherwise = f", or give `{PROMPT}` and `{COMPLETION}`" if field == Data.field else ""
    has = ", ".join(name for name in record if record[name] is not None)
    raise ValueError(f"{where} has no field {field!r} (it has: {has}); name it with `data.field`{otherwise}")


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    text = record[field]
    if not isinstance(text, str):
        messages = "; make text of messages first (`tokenizer.apply_chat_template`)" if isinstance(text, list) else ""
        raise ValueError(f"{where}: the field {field!r} holds a {type(text).__name__}, no text{messages}")
    return text


def hub_documents(name: str, data: Data) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("datasets of the Hugging Face Hub need: pip install datasets") from None
    dataset, split, subset, *more = [*name.removeprefix(HUB).split(":"), "", ""]
    if not dataset or len(more) > 2:
        raise ValueError(f"a dataset of the hub is written {HUB}owner/name[:split[:subset]], got {name!r}")
    return dataset_documents(
        name, lambda: load_dataset(dataset, subset or None, split=split or "train", streaming=True), data
    )


def documents_to_measure(source: str | Path, most: int = CHARACTERS_TO_MEASURE) -> list[str]:
    """Those of a file or a folder, or the first of a hub dataset."""
    if not str(source).startswith(HUB):
        return read_text(source)
    documents: list[str] = []
    for document in filter(str.strip, hub_documents(str(source), Data())):
        documents.append(document)
        if (most := most - len(document)) <= 0:
            break
    if not documents:
        raise ValueError(f"{str(source)!r} holds no text")
    return documents


def dataset_documents(name: str, load: Callable[[], Iterable[Any]], data: Data) -> Iterator[str]:
    """The texts of a dataset. However the transfer fails, it is one sentence."""
    read = 0

    def rows() -> Iterator[str]:
        nonlocal read
        for row in load():
            yield text_of(row, data.field, name)
            read += 1

    try:
        yield from _documents(rows(), data.join)
    except (ValueError, GeneratorExit):  # of ours, or of `datasets` about what was asked for
        raise
    except Exception as error:  # one of many: offline, no such dataset, a broken connection
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OSError(
            f"reading {name} stopped after {read:,} rows ({reason}): nothing was kept; look at the connection and "
            "start the same command again"
        ) from error
