"""Scores of one model, appended as they come: a run that was killed goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Score = dict[str, Any]  # what scoring.py found for an item
Key = tuple[str, str]  # task, item


class ScoreFile:
    """A JSONL file: a header that says whose scores these are, then one line an item."""

    def __init__(self, path: str | Path, header: dict[str, Any], notes: dict[str, Any] | None = None) -> None:
        """Opens what is there, if it has the same header, or begins anew. Notes are written and not compared."""
        self.path = Path(path)
        self.scores: dict[Key, Score] = {}
        if self.path.is_file():
            found, self.scores = read_scores(self.path)
            asked = json.loads(json.dumps(header))  # a tuple is a list in the file
            # Nothing is found where a run was killed before it had written its header.
            if found and (different := [name for name in asked if found.get(name) != asked[name]]):
                name = different[0]
                raise ValueError(
                    f"{str(self.path)!r} has scores of another run ({name}: {found.get(name)!r}, now "
                    f"{asked[name]!r}): choose another folder, or delete it"
                )
            self._cut_unfinished_line()
        if not self.scores:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({**header, **(notes or {})}) + "\n", encoding="utf-8")

    def append(self, scores: Iterable[tuple[Key, Score]]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for (task, item), score in scores:
                file.write(json.dumps({"task": task, "item": item, **score}, ensure_ascii=False) + "\n")
                self.scores[task, item] = score
            file.flush()
            os.fsync(file.fileno())

    def _cut_unfinished_line(self) -> None:
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            with self.path.open("rb+") as file:
                file.truncate(end)


def read_scores(path: Path) -> tuple[dict[str, Any], dict[Key, Score]]:
    """Header and scores; a last line that was cut short is passed over."""
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    try:
        records = [json.loads(line) for line in lines]
        scores = {(record.pop("task"), record.pop("item")): record for record in records[1:]}
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{str(path)!r} is not a file of scores: {error}") from None
    return (records[0] if records else {}), scores
