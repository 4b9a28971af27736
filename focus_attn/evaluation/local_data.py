"""Benchmark files on this machine, given the fields that lm-eval's own task definitions expect.

A folder is looked through for `hellaswag*.jsonl`, `arc_easy*.jsonl` and so on (`.xz` and `.gz` too). Files as the Hub
has them pass through unchanged; a few common simplifications of them are undone.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OPENERS: dict[str, Callable[..., Any]] = {".jsonl": open, ".xz": lzma.open, ".gz": gzip.open}
Record = dict[str, Any]


def find_file(folder: Path, start: str, split: str) -> Path:
    """The file of a benchmark in the folder; of several the one that is named after the split that is asked."""
    if not folder.is_dir():
        raise ValueError(f"no such folder: {str(folder)!r}")
    found = sorted(
        path
        for path in folder.iterdir()
        if path.name.startswith(start) and path.name.endswith((".jsonl", ".jsonl.xz", ".jsonl.gz"))
    )
    if not found:
        raise ValueError(
            f"no file {start}*.jsonl (or .jsonl.xz, .jsonl.gz) in {str(folder)!r}: put it there under this name"
        )
    named = [path for path in found if split[:3] in path.name.removeprefix(start)]  # "val", "valid" or "validation"
    return (named or found)[0]


def read_records(path: Path) -> Iterator[Record]:
    try:
        with OPENERS[path.suffix](path, "rt", encoding="utf-8") as file:
            lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except (lzma.LZMAError, EOFError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from None
    if not lines:
        raise ValueError(f"{str(path)!r} is empty")
    for number, line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {str(path)!r} is not JSON: {error.msg}") from None
        if not isinstance(record, dict):
            raise ValueError(f"line {number} of {str(path)!r} is no JSON object")
        yield record


def as_on_hub(path: Path, name: str) -> Iterator[Record]:
    """The records of a benchmark with the Hub's fields."""
    needed, change = SCHEMAS[name]
    for number, record in enumerate(read_records(path), start=1):
        if missing := [field for field in needed if field not in record]:
            raise ValueError(
                f"record {number} of {str(path)!r} has no field {missing[0]!r} (it has: {', '.join(record)}); "
                f"{name} needs {', '.join(needed)}"
            )
        yield change(record)


def _arc(record: Record) -> Record:
    if isinstance(record["choices"], dict):
        return record
    labels = [chr(ord("A") + index) for index in range(len(record["choices"]))]
    return {
        "question": record["question"],
        "choices": {"text": record["choices"], "label": labels},
        "answerKey": labels[record["gold"]],
    }


def _truthfulqa(record: Record) -> Record:
    """MC1 expects the true answer first."""
    targets = {}
    for name in ("mc1_targets", "mc2_targets"):
        choices = record[name]
        if "choices" not in choices:
            in_order = sorted(choices, key=lambda text: -choices[text])
            choices = {"choices": in_order, "labels": [choices[text] for text in in_order]}
        targets[name] = choices
    return {"question": record["question"], **targets}


def _same(record: Record) -> Record:
    return record


# The fields that must be there, and what is done to a record.
SCHEMAS: dict[str, tuple[tuple[str, ...], Callable[[Record], Record]]] = {
    "hellaswag": (("activity_label", "ctx_a", "ctx_b", "endings", "label"), _same),
    "arc_easy": (("question", "choices"), _arc),
    "piqa": (("goal", "sol1", "sol2", "label"), _same),
    "lambada_openai": (("text",), _same),
    "truthfulqa_mc1": (("question", "mc1_targets", "mc2_targets"), _truthfulqa),
    "truthfulqa_mc2": (("question", "mc1_targets", "mc2_targets"), _truthfulqa),
    "gsm8k": (("question", "answer"), _same),
}
