"""benchmarks/tables.py: several comparisons side by side, and what they measured put together with what there was."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import tables

from focus_attn.compare.quick import quick_requests

RECIPE = """
name: {name}
models: [tiny]
window: 8
timing: false
data: {{prose: {{lengths: [64], blocks: 2}}}}
training:
  start: {{how: random}}
  stages: [{{steps: 1, length: 64, sequences: 1, micro_batch: 1, warmup: 0}}]
methods:
  - {{name: ours, focus: {{num_groups: 4, window: 8, num_sinks: 1}}}}
"""


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["tables.py", *map(str, arguments)])
    tables.main()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "text.txt").write_text("The whale is white, and the sea is wide. " * 400)
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.yaml").write_text(RECIPE.format(name=name))
    return tmp_path


def test_another_seed_joins_what_was_measured_before(folder, monkeypatch, capsys):
    common = ["--text", "prose=text.txt", "--device", "cpu"]
    run(monkeypatch, "one.yaml+two.yaml", *common, "--at-once", 2, "--out", "first", "--seed", 0)
    assert capsys.readouterr().out == "one: 2 cells; whole\ntwo: 2 cells; whole\n"
    trained = [path for path in (folder / "first" / "one+two" / "trained").iterdir() if path.is_dir()]
    assert len(trained) == 1  # by both
    shutil.copy(folder / "first" / "one.json", folder / "kept" / "one.json")
    run(monkeypatch, "one.yaml", *common, "--out", "second", "--into", "kept", "--seeds", 2)
    assert capsys.readouterr().out == f"one: 3 cells; whole -> {Path('kept', 'one.json')}\n"
    assert len((folder / "second" / "one" / "cells.jsonl").read_text().splitlines()) == 1  # what was missing
    rows = {row["name"]: row for row in json.loads((folder / "kept" / "one.json").read_text())["rows"]}
    assert rows["ours"]["seeds"] == 2 and rows["full attention"]["seeds"] == 1
    assert rows["ours"]["lowest"] < rows["ours"]["highest"]


def test_a_long_one_is_shared_out_by_its_rows(folder, monkeypatch, capsys):
    windows = {"near": 8, "far": 32}
    more = "".join(f"  - {{name: {one}, attention: window, options: {{window: {n}}}}}\n" for one, n in windows.items())
    (folder / "one.yaml").write_text(RECIPE.format(name="one") + more)
    common = ["--text", "prose=text.txt", "--device", "cpu", "--out", "out", "--into", "kept"]
    run(monkeypatch, "one.yaml@near", "one.yaml@ours@far", *common, "--at-once", 2)
    said = capsys.readouterr().out.splitlines()
    kept = Path("kept", "one.json")
    assert said == [f"one-near: 2 cells; whole -> {kept}", f"one-ours-far: 3 cells; whole -> {kept}"]
    rows = [row["name"] for row in json.loads((folder / kept).read_text())["rows"]]
    assert sorted(rows) == ["far", "full attention", "near", "ours"]


def test_and_by_its_seeds(folder, monkeypatch, capsys):
    common = ["--text", "prose=text.txt", "--device", "cpu", "--out", "out", "--into", "kept", "--at-once", 2]
    run(monkeypatch, "one.yaml#0@ours", "one.yaml#2#3", *common)
    kept = Path("kept", "one.json")
    said = [f"one-0-ours: 2 cells; whole -> {kept}", f"one-2-3: 3 cells; whole -> {kept}"]
    assert capsys.readouterr().out.splitlines() == said
    cells = json.loads((folder / kept).read_text())["cells"]
    assert [cell["seed"] for cell in cells if cell["row"] == "ours"] == [0, 2, 3]


def test_benchmarks_of_its_rows_are_put_together(folder, monkeypatch, capsys):
    windows = {"near": 8, "far": 32}
    rows = "".join(f"  - {{name: {one}, attention: window, options: {{window: {n}}}}}\n" for one, n in windows.items())
    (folder / "one.yaml").write_text(RECIPE.format(name="one").split("training:")[0] + f"tasks: true\nmethods:\n{rows}")
    quick_requests().save(folder / "asked.jsonl")
    common = ["--text", "prose=text.txt", "--device", "cpu", "--into", "kept", "--requests", "one=asked.jsonl"]
    run(monkeypatch, "one.yaml@near", "one.yaml@far", *common, "--out", "out", "--at-once", 2)
    assert all("not put into" not in line for line in capsys.readouterr().out.splitlines())
    kept = json.loads((folder / "kept" / "one.json").read_text())
    assert set(kept["tasks"][0]["models"]) == {"base", "near", "far"}
    with pytest.raises(SystemExit):
        run(monkeypatch, "one.yaml", *common, "--requests", "two=asked.jsonl")
    assert "--requests two=asked.jsonl: give it as TABLE=FILE, for one of one" in capsys.readouterr().err


def test_what_found_no_memory_is_tried_once_more(folder, monkeypatch, capsys):
    """When all others are done, by itself."""
    (folder / "compare.py").write_text(
        "import json, sys\n"
        "recipe, file = sys.argv[1], sys.argv[sys.argv.index('--json') + 1]\n"
        "with open('begun.txt', 'a') as begun: print(recipe, file=begun)\n"
        "stopped = 'out of memory: ours' if recipe == 'one.yaml' else None\n"
        "open(file, 'w').write(json.dumps({'cells': [], 'stopped': stopped}))\n"
    )
    monkeypatch.setattr(tables, "COMPARE", [sys.executable, str(folder / "compare.py")])
    run(monkeypatch, "one.yaml+two.yaml", "three.yaml", "--out", "out", "--at-once", 1)
    assert (folder / "begun.txt").read_text().split() == ["one.yaml", "two.yaml", "three.yaml", "one.yaml"]
    said = ["one: 0 cells; out of memory: ours", "two: 0 cells; whole", "three: 0 cells; whole"]
    assert capsys.readouterr().out.splitlines() == said


def test_rows_may_have_a_plus(folder, monkeypatch, capsys):
    more = "  - {name: near + sinks, attention: window_sinks, options: {window: 8}}\n"
    (folder / "one.yaml").write_text(RECIPE.format(name="one") + more)
    run(monkeypatch, "one.yaml@near + sinks", "--text", "prose=text.txt", "--device", "cpu", "--out", "out")
    assert capsys.readouterr().out == "one-near_sinks: 2 cells; whole\n"


def test_what_was_not_begun_is_said(folder, monkeypatch, capsys):
    run(monkeypatch, "three.yaml", "--seconds", 0.5, "--into", "kept")
    assert capsys.readouterr().out == "three: not begun\n"
    assert not list((folder / "kept").iterdir())
    with pytest.raises(ValueError, match="no comparison 'table0'"):
        run(monkeypatch, "table0")


def test_a_text_goes_where_it_belongs(folder, monkeypatch, capsys):
    assert tables.texts_for(tables.Part("table10"), ["wikitext.test=a", "books.test=b", "c"]) == ["books.test=b", "c"]
    with pytest.raises(SystemExit):
        run(monkeypatch, "table10", "--text", "wikitext.test=a")
    assert "--text wikitext.test=a: none of these comparisons has such a dataset" in capsys.readouterr().err


def test_one_that_fails_points_to_its_log_and_changes_nothing(folder, monkeypatch, capsys):
    (folder / "failed").mkdir()
    (folder / "failed" / "one.json").write_text("{}")  # of an earlier call
    with pytest.raises(SystemExit):
        run(monkeypatch, "one.yaml", "--text", "prose=absent.txt", "--out", "failed", "--into", "kept")
    assert capsys.readouterr().out == f"one: failed: {Path('failed', 'one.log')} says why\n"
    assert "absent.txt" in (folder / "failed" / "one.log").read_text()
    assert not list((folder / "kept").iterdir())


def test_a_quick_form_is_put_into_nothing(folder, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "table1", "--quick", "--into", "kept")
    assert "leave --into out" in capsys.readouterr().err
