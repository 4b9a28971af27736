"""`focus train`: a recipe, a text and a model folder in, an adapter out."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from focus_attn import FocusModel
from focus_attn.cli import app
from focus_attn.zoo import tiny_random_model

run = CliRunner().invoke

RECIPE = """
name: tiny
focus: {num_groups: 4, window: 8, num_sinks: 2}
start: {how: coverage, blocks: 2, length: 64, steps: 2, budget: 0.5}
data: {held_out: 1}
stages:
  - {steps: 3, length: 64, sequences: 2, learning_rate: 1e-2, warmup: 1, budget: 0.5, options: {probes: 4}}
precision: fp32
evaluate_every: 2
log_every: 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny_random_model()
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of a text to train on" for number in range(80)))
    return tmp_path


def test_help_fits_a_page():
    result = run(app, ["train", "--help"])
    assert result.exit_code == 0 and len(result.output.splitlines()) < 60


def test_train_writes_an_adapter_and_goes_on_where_it_was(folder):
    command = ["train", "recipe.yaml", "--model", "model", "--text", "text.txt", "--device", "cpu"]
    result = run(app, [*command, "--json", "result.json"])
    assert result.exit_code == 0, result.output
    assert "step 3/3" in result.output and "held-out text: perplexity" in result.output
    numbers = json.loads((folder / "result.json").read_text())
    assert numbers["finished"] and numbers["steps"] == 3
    assert FocusModel.from_pretrained(tiny_random_model()[0], folder / "runs" / "tiny").focus_config.num_groups == 4
    again = run(app, command)
    assert again.exit_code == 0 and "going on from step 3 of 3" in again.output
    assert "step 1/3" not in again.output
    anew = run(app, [*command, "--no-resume"])
    assert anew.exit_code == 0 and "step 1/3" in anew.output


def test_going_on_from_an_adapter(folder):
    """No start; where training hardly moves them, the routers stay those of the adapter. The seed may be another."""
    command = ["train", "--model", "model", "--text", "text.txt"]
    assert run(app, [*command, "recipe.yaml", "--output", "first"]).exit_code == 0
    (folder / "more.yaml").write_text(RECIPE.replace("learning_rate: 1e-2", "learning_rate: 1e-9"))
    result = run(app, [*command, "more.yaml", "--adapter", "first", "--output", "more"])
    assert result.exit_code == 0, result.output
    first, more = (load_file(folder / name / "focus_model.safetensors") for name in ("first", "more"))
    weights = [name for name in first if not name.endswith("bias")]  # balance moves those by a rate of its own
    assert all(torch.allclose(first[name], more[name], atol=1e-6) for name in weights)

    assert run(app, [*command, "recipe.yaml", "--seed", "1", "--output", "other"]).exit_code == 0
    other = load_file(folder / "other" / "focus_model.safetensors")
    assert not any(torch.allclose(first[name], other[name], atol=1e-2) for name in weights)

    (folder / "wider.yaml").write_text(RECIPE.replace("window: 8", "window: 9"))
    refused = run(app, [*command, "wider.yaml", "--adapter", "first", "--output", "wider"])
    assert refused.exit_code == 1 and "`window`: 9, 8" in refused.output


def test_fresh_weights_and_a_time_limit(folder):
    (folder / "scratch.yaml").write_text(RECIPE.replace("name: tiny", "name: scratch\nfresh_weights: true"))
    command = ["train", "scratch.yaml", "--model", "model", "--text", "text.txt", "--output", "out"]
    result = run(app, [*command, "--time-limit", "0.001"])  # a twentieth of a second
    assert result.exit_code == 0, result.output
    assert "stopped by the time limit; the same call goes on" in result.output
    assert (folder / "out" / "focus_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.yaml"], "no recipe at"),
        (["recipe.yaml", "--model", "model"], "give --text"),
        (["recipe.yaml", "--model", "model", "--text", "absent"], "no such file or folder"),
        (["recipe.yaml", "--model", "model", "--text", "text.txt", "--output", "text.txt"], "is a file"),
        (["recipe.yaml", "--text", "text.txt", "--json", "absent/r.json"], "does not exist"),
        (["recipe.yaml", "--text", "text.txt", "--adapter", "absent"], "no adapter 'absent'"),
        (["wrong.yaml"], "did you mean `stages`"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, folder):
    (folder / "wrong.yaml").write_text("stage: []")
    result = run(app, ["train", *arguments])
    assert result.exit_code == 1
    assert message in result.output and "Traceback" not in result.output
