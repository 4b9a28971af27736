"""`focus bench prefill` on a tiny random model."""

import json

import pytest
import torch
from tiny import save_tiny_default
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from focus_attn import FocusConfig, get_focus_model
from focus_attn.adapters import adapter_digest
from focus_attn.bench.prefill import prefill_rows, time_prefill
from focus_attn.bench.prefill_model import load_for_prefill
from focus_attn.cli import app
from focus_attn.evaluation import observe_routing, token_blocks
from focus_attn.text import default_text
from focus_attn.zoo import tiny_random_model

run = CliRunner().invoke


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model and an adapter for it, as folders."""
    folder = tmp_path_factory.mktemp("saved")
    model = save_tiny_default(folder)
    get_focus_model(model, FocusConfig(num_groups=4, window=16)).save_pretrained(folder / "adapter")
    return folder


def test_the_command_prints_and_writes_everything(saved, tmp_path):
    json_file, plot = tmp_path / "p.json", tmp_path / "p.png"
    arguments = ["--model", str(saved / "model"), "--adapter", str(saved / "adapter"), "--lengths", "64,128"]
    arguments += ["--dtype", "fp32", "--device", "cpu", "--json", str(json_file), "--plot", str(plot)]
    result = run(app, ["bench", "prefill", *arguments])
    assert result.exit_code == 0, result.output
    assert "dense attention sdpa" in " ".join(result.output.split())
    assert plot.read_bytes()[:4] == b"\x89PNG"
    results = json.loads(json_file.read_text())
    assert results["config"]["num_groups"] == 4 and "adapter" in results["setting"]
    assert results["adapter_digest"] == adapter_digest(saved / "adapter")
    assert [row["length"] for row in results["rows"]] == [64, 128]
    for row in results["rows"]:
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["focus_ms"], rel=1e-2)
        assert 0 < row["routers_ms"] < row["focus_ms"]
    assert results["rows"][1]["pairs_kept"] < results["rows"][0]["pairs_kept"] < 1


def test_without_an_adapter_it_says_that_the_routers_are_random(saved):
    arguments = ["--model", str(saved / "model"), "--lengths", "64", "--dtype", "fp32", "--device", "cpu"]
    result = run(app, ["bench", "prefill", *arguments, "--json", str(saved / "random.json")])
    assert result.exit_code == 0, result.output
    assert "random routers" in " ".join(result.output.split())
    assert json.loads((saved / "random.json").read_text())["adapter_digest"] is None


def test_dense_runs_without_focus(monkeypatch):
    base, tokenizer = tiny_random_model()
    model = get_focus_model(base, FocusConfig(num_groups=4, window=16))
    implementations = []
    forward = type(base).forward
    monkeypatch.setattr(
        type(base),
        "forward",
        lambda self, *a, **k: implementations.append(self.config._attn_implementation) or forward(self, *a, **k),
    )
    ids = tokenizer("some text to be repeated", return_tensors="pt")["input_ids"][0]
    (row,) = prefill_rows(model, ids, [64], repeats=2, count_pairs=False)
    assert implementations == ["sdpa", "focus"] * 3
    assert row.pairs_kept is None and row.timing.repeats == 2
    (timing,) = time_prefill(model, ids, [32], repeats=1)
    assert timing.length == 32


def test_ids_of_a_model_can_be_measured_with(tmp_path):
    base, tokenizer = tiny_random_model()
    model = get_focus_model(base, FocusConfig(num_groups=4, window=16))
    routing = observe_routing(model, token_blocks(tokenizer, default_text().held_out, 64, 1))[1]
    ids = {"query_groups": routing.query_groups[0].tolist(), "key_groups": routing.key_groups[0].tolist()}
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    options = [
        "--lengths",
        "100",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--width",
        "16",
        "--groups",
        "4",
        "--device",
        "cpu",
    ]
    result = run(app, ["bench", "attention", *options, "--dtype", "fp32", "--skew", str(tmp_path / "ids.json")])
    assert result.exit_code == 0, result.output


def test_a_table_of_positions_ends(tmp_path):
    _, tokenizer = tiny_random_model()
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 64 positions, got 128"):
        load_for_prefill(str(tmp_path), None, torch.float32, torch.device("cpu"), 128)
