"""`focus compare` as a user types it: a slice of the quick forms."""

import json

import pytest
from typer.testing import CliRunner

from focus_attn.cli import app
from focus_attn.compare.quick import NOTE, quick_requests
from focus_attn.zoo import tiny_random_model


def focus(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_quick_form_of_a_recipe(tmp_path):
    pytest.importorskip("matplotlib")
    files = {"--out": tmp_path / "cells", "--json": tmp_path / "all.json", "--plot": tmp_path / "pareto.png"}
    options = [part for option, path in files.items() for part in (option, path)]
    answer = focus("peers", "--quick", "--seeds", "1", "--only", "window + sinks", *options)
    assert answer.exit_code == 0, answer.output
    assert NOTE.split(":")[0] in answer.output
    assert "skips work before scoring" in answer.output
    written = json.loads((tmp_path / "all.json").read_text())
    rows = ["Focus, K=8", "full attention", "window + sinks"]  # the first has the cost that the last is to have
    assert sorted(row["name"] for row in written["rows"]) == sorted(2 * rows)  # on two texts
    assert written["comparison"]["note"] == NOTE
    assert written["verdicts"]
    assert {"ms", "dense_ms"} <= written["cells"][0]["timing"].keys()
    for data in ("books", "wikitext"):
        drawn = tmp_path / f"pareto-{data}.png"
        assert drawn.stat().st_size > 10_000 and str(drawn) in answer.output.replace("\n", "")
    shown = focus("table10", "--show", tmp_path / "cells" / "cells.jsonl", "--json", tmp_path / "again.json")
    assert shown.exit_code == 0, shown.output
    assert json.loads((tmp_path / "again.json").read_text())["rows"] == written["rows"]
    shown = focus("peers", "--quick", "--show", tmp_path / "cells" / "cells.jsonl", "--json", tmp_path / "quick.json")
    assert shown.exit_code == 0, shown.output
    assert json.loads((tmp_path / "quick.json").read_text())["comparison"]["note"] == NOTE


def test_quick_form_of_an_adapter_beside_a_peer(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: mine\ntiming: false\ndata: {prose: {lengths: [1024], blocks: 2}}\n"
        "methods: [{name: ours, adapter: k8}, {name: near, attention: window, budget: ours}]\n"
    )
    answer = focus(recipe, "--quick", "--out", tmp_path / "cells", "--json", tmp_path / "all.json")
    assert answer.exit_code == 0, answer.output
    rows = {row["name"]: row for row in json.loads((tmp_path / "all.json").read_text())["rows"]}
    assert rows.keys() == {"ours", "near", "full attention"}
    assert all(row["ppl"] > 1 for row in rows.values())
    assert rows["near"]["multiply_adds"] <= rows["ours"]["multiply_adds"] < 1


def test_quick_form_asks_benchmarks_too(tmp_path):
    quick_requests().save(tmp_path / "asked.jsonl")
    part = ["--quick", "--only", "r=4"]
    answer = focus("table3", *part, "--out", tmp_path / "cells", "--json", tmp_path / "all.json")
    assert answer.exit_code == 0, answer.output
    assert "needle@512" in answer.output
    shown = ["--show", tmp_path / "all.json", "--requests", tmp_path / "asked.jsonl", "--json", tmp_path / "again.json"]
    again = focus("table3", *part, *shown)
    assert again.exit_code == 0, again.output
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("all.json", "again.json"))
    assert first["tasks"] == second["tasks"]
    assert list(first["tasks"][0]["models"]) == ["base", "LoRA, r=4"]
    assert focus("table3", "--quick", "--only", "DoRA", *shown).exit_code == 0
    assert list(json.loads((tmp_path / "again.json").read_text())["tasks"][0]["models"]) == ["base"]


def test_texts_are_written_as_tokens_and_read_back(tmp_path):
    (tmp_path / "text.txt").write_text("The whale is white, and the sea is wide. " * 200)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: mine\nmodels: [tiny]\nwindow: 8\ntiming: false\n"
        f"data: {{prose: {{test: {tmp_path / 'text.txt'}, lengths: 64, blocks: 2}}}}\n"
        "methods: [{name: near, attention: window, options: {window: 8}}]\n"
    )
    answer = focus(recipe, "--write-tokens", tmp_path / "tokens")
    assert answer.exit_code == 0, answer.output
    tokens = tmp_path / "tokens" / "tiny"
    assert f"--text prose.test={tokens / 'prose.test.npy'}" in answer.output
    from_text, from_tokens = tmp_path / "a.json", tmp_path / "b.json"
    assert focus(recipe, "--json", from_text, "--out", tmp_path / "a").exit_code == 0
    parts = [f"prose.{part}={tokens / f'prose.{part}.npy'}" for part in ("train", "test")]
    again = focus(recipe, "--json", from_tokens, "--out", tmp_path / "b", "--text", parts[0], "--text", parts[1])
    assert again.exit_code == 0, again.output
    ppl = [[row["ppl"] for row in json.loads(file.read_text())["rows"]] for file in (from_text, from_tokens)]
    assert ppl[0] == ppl[1]


def test_to_write_tokens_a_model_without_weights_is_enough(tmp_path):
    model, tokenizer = tiny_random_model()
    model.config.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The whale is white, and the sea is wide. " * 20)
    where = ["--text", tmp_path / "text.txt", "--write-tokens", tmp_path / "tokens"]
    answer = focus("peers", "--model", tmp_path / "model", *where)
    assert answer.exit_code == 0, answer.output
    assert len(list((tmp_path / "tokens").rglob("*.test.npy"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table0"], "no comparison 'table0'"),
        (["table1", "--text", "poems.test=x"], "NAME.train=PATH"),
        (["table1", "--only", "Reformer"], "no row is called so"),
        (["table1", "--json", "no/such/folder/a.json"], "does not exist"),
        (["table1", "--plot", "pareto.bmp"], ".png or .svg"),
        (["table1", "--requests", "none.jsonl"], "no such file"),
        (["table1", "--seeds", "2", "--seed", "1"], "give one of them"),
        (["table1", "--show", "none.json"], "no such file"),
        (["table1", "--show", "none.json", "--seed", "1"], "--show runs nothing: leave --seed out"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(arguments, message):
    answer = focus(*arguments)
    assert answer.exit_code == 1
    assert message in " ".join(answer.output.split())
