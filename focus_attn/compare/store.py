"""Finished cells in one file, a line each, appended as they come: a run that was killed goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from focus_attn.bench.record import describe_run

Cell = dict[str, Any]
FILE = "cells.jsonl"


class CellStore:
    """Cells by the digest of all that defines them: those of the file, and `known` ones of other runs."""

    def __init__(self, path: Path, known: Iterable[Cell] = ()) -> None:
        self.path = path
        self.cells: dict[str, Cell] = {cell["key"]: cell for cell in known}
        if path.is_file():
            self.cells |= {cell["key"]: cell for cell in read_lines(path)}
        path.parent.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: str) -> bool:
        return key in self.cells

    def __getitem__(self, key: str) -> Cell:
        return dict(self.cells[key])

    def put(self, key: str, cell: Cell) -> None:
        """On disk before it returns, beside the run that measured it."""
        self.cells[key] = {"key": key, "run": this_run(), **cell}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.cells[key]) + "\n")
            file.flush()
            os.fsync(file.fileno())


def latest(cells: Iterable[Cell]) -> list[Cell]:
    """Each row, place and seed once: what was measured again, under other settings perhaps, is not another seed."""
    return list({who_and_where(cell): cell for cell in cells}.values())


def who_and_where(cell: Cell) -> tuple[Any, ...]:
    """What a cell is of, as people name it."""
    return tuple(cell.get(name) for name in ("model", "data", "length", "row", "seed"))


def read_lines(path: Path) -> list[Cell]:
    """A last line that was cut short is taken off the file: what is appended next must begin a line."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    try:
        cells = [json.loads(line) for line in whole.splitlines()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{str(path)!r} is not a file of cells: {error}") from None
    if not all(isinstance(cell, dict) and "key" in cell for cell in cells):
        raise ValueError(f"{str(path)!r} is not a file of cells, as a run keeps them in {FILE} of its --out folder")
    return cells


@cache
def this_run() -> dict[str, Any]:
    return describe_run()
