"""Runs of a comparison put together: more seeds, and what must not stand in one table."""

import json

import pytest
from test_compare_reproduction import write
from test_compare_table import FULL, HARD, above, cell

from focus_attn.compare.table import make_rows
from focus_attn.compare.together import put_together, read_run

BASE = {**FULL, "row": "full attention"}
TASK = {"task": "piqa", "metric": "acc", "models": {}}


def kept(folder, name, cells):
    """The cells of a run, as it keeps them."""
    file = folder / name
    file.write_text("".join(json.dumps({**one, "key": str(number)}) + "\n" for number, one in enumerate(cells)))
    return file


@pytest.fixture
def first(tmp_path):
    write(tmp_path, "table3", [BASE, cell("Focus", focus=True)], tasks=[TASK], models=["gemma3-270m"])
    return tmp_path / "compare" / "table3.json"


def test_more_seeds_join_what_was_measured_before(first, tmp_path):
    """Of `--json` the benchmarks stay, and whose they are; full attention, which both measured, is the newer one."""
    newer = {**cell("full", above(0.01)), "row": "full attention"}
    together = put_together([first, kept(tmp_path, "cells.jsonl", [newer, cell("Focus", focus=True, seed=1)])])
    rows = {row.name: row for row in make_rows(together.cells)}
    assert rows["Focus"].seeds == 2 and rows["full attention"].seeds == 1
    assert rows["full attention"].losses == above(0.01)
    assert together.tasks == [TASK] and together.models == ("gemma3-270m",) and together.note is None
    assert put_together([first], tasks=False).tasks == []


def test_other_blocks_are_not_put_together(first, tmp_path):
    for number, losses in enumerate((above(0.2), HARD[:3])):
        file = kept(tmp_path, f"{number}.jsonl", [{**cell("full", losses), "row": "full attention"}])
        between = kept(tmp_path, "between.jsonl", [cell("Focus", focus=True, seed=2)])  # has no full attention
        for files in ([first, file], [first, between, file]):
            with pytest.raises(ValueError, match=r"measured other blocks of books at 64 tokens.*--blocks"):
                put_together(files)


def test_benchmarks_of_two_runs_are_not_put_together(first, tmp_path):
    write(tmp_path, "table3", [BASE], file="more", tasks=[TASK])
    files = [first, tmp_path / "compare" / "more.json"]
    with pytest.raises(ValueError, match="have benchmarks: give the --requests that were asked"):
        put_together(files)
    assert len(put_together(files, tasks=False).cells) == 2


def test_a_quick_form_stays_one(first, tmp_path):
    write(tmp_path, "table3", [BASE], file="quick", note="QUICK FORM")
    quick = tmp_path / "compare" / "quick.json"
    assert put_together([quick]).note == "QUICK FORM"
    with pytest.raises(ValueError, match=r"QUICK FORM.*show it by itself"):
        put_together([first, quick])


@pytest.mark.parametrize("content", ["[]", "{", '{"cells": [1]}', '{"cells": []}'])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match="is not what `focus compare --json` wrote"):
        read_run(tmp_path / "other.json")
