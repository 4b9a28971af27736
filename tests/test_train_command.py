"""`focus train`: a recipe, a text and a model folder in, an adapter out."""

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from training_runs import AtStep
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
    assert "base model" in result.output and "at random" not in result.output
    numbers = json.loads((folder / "result.json").read_text())
    assert numbers["finished"] and numbers["steps"] == 3
    assert numbers["base_perplexity"] == pytest.approx(numbers["perplexity"]["ppl"], rel=0.5)
    assert FocusModel.from_pretrained(tiny_random_model()[0], folder / "runs" / "tiny").focus_config.num_groups == 4
    again = run(app, command)
    assert again.exit_code == 0 and "going on from step 3 of 3" in again.output
    assert "step 1/3" not in again.output
    anew = run(app, [*command, "--no-resume"])
    assert anew.exit_code == 0 and "step 1/3" in anew.output


def test_several_texts_and_their_answers(folder):
    rows = [{"prompt": f"what is line {number}? " * 3, "completion": "a line"} for number in range(90)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weighted = RECIPE.replace("probes: 4", "probes: 4, answer_weight: 20").replace("held_out: 1", "packing: true")
    (folder / "recipe.yaml").write_text(weighted)
    command = ["train", "recipe.yaml", "--model", "model", "--device", "cpu", "--text", "text.txt"]
    alone = run(app, command)
    assert alone.exit_code == 1 and "give rows of `prompt` and `completion`" in " ".join(alone.output.split())
    result = run(app, [*command, "--text", "asked.jsonl"])
    assert result.exit_code == 0, result.output
    assert "text: text.txt, asked.jsonl" in result.output and "tokens of answers in them" in result.output
    log = [json.loads(line) for line in (folder / "runs" / "tiny" / "log.jsonl").read_text().splitlines()]
    assert any(line.get("answers", 0) > 0 for line in log)


@pytest.fixture
def first(folder):
    """A trained adapter, and what to type to train in this folder."""
    command = ["train", "--model", "model", "--text", "text.txt"]
    assert run(app, [*command, "recipe.yaml", "--output", "first"]).exit_code == 0
    (folder / "gently.yaml").write_text(RECIPE.replace("learning_rate: 1e-2", "learning_rate: 1e-9"))
    return command


def weights(folder):
    """Balance moves biases by a rate of its own."""
    tensors = load_file(folder / "focus_model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}


def test_going_on_from_an_adapter_leaves_the_start_out(folder, first):
    result = run(app, [*first, "gently.yaml", "--adapter", "first", "--output", "more"])
    assert result.exit_code == 0, result.output
    before, after = weights(folder / "first"), weights(folder / "more")
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    assert json.loads((folder / "more" / "run.json").read_text())["recipe"]["adapter"] == "first"
    again = run(app, [*first, "gently.yaml", "--adapter", "first", "--output", "more"])
    assert again.exit_code == 0 and "going on from step 3 of 3" in again.output


def test_a_run_goes_on_from_its_own_adapter_alone(folder, first):
    shutil.copytree("first", "second")
    assert run(app, [*first, "gently.yaml", "--adapter", "first", "--output", "more"]).exit_code == 0
    other = run(app, [*first, "gently.yaml", "--adapter", "second", "--output", "more"])
    assert other.exit_code == 1 and "`adapter`: 'second', 'first'" in other.output
    anew = run(app, [*first, "gently.yaml", "--output", "more"])
    assert anew.exit_code == 1 and "`start`: 'one', 'none'. Choose" in anew.output and "start.how" not in anew.output


def test_an_adapter_is_not_written_over(folder, first):
    before = (folder / "first" / "focus_model.safetensors").read_bytes()
    for options in ([], ["--no-resume"]):
        refused = run(app, [*first, "recipe.yaml", "--adapter", "first", "--output", "./first", *options])
        assert refused.exit_code == 1 and "would be written over" in refused.output
    assert (folder / "first" / "focus_model.safetensors").read_bytes() == before
    assert (folder / "first" / "checkpoints").is_dir()


def test_another_seed_is_another_start_and_another_order(folder, first):
    assert run(app, [*first, "recipe.yaml", "--seed", "1", "--output", "other"]).exit_code == 0
    before, other = weights(folder / "first"), weights(folder / "other")
    assert not any(torch.allclose(before[name], other[name], atol=1e-2) for name in before)
    for seed in "12":
        command = [*first, "recipe.yaml", "--adapter", "first", "--seed", seed, "--output", seed]
        assert run(app, command).exit_code == 0
    one, two = weights(folder / "1"), weights(folder / "2")
    assert not all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("window: 8", "window: 9", "`window`: 9, 8"),
        ("name: tiny", "name: tiny\nfresh_weights: true", "routers belong to a model's weights"),
        (RECIPE[RECIPE.index("stages:") : RECIPE.index("precision")], "stages: []\n", "nothing to do without `stages`"),
    ],
)
def test_what_does_not_go_with_an_adapter(folder, first, old, new, message):
    assert old in RECIPE
    (folder / "wrong.yaml").write_text(RECIPE.replace(old, new))
    refused = run(app, [*first, "wrong.yaml", "--adapter", "first", "--output", "more"])
    assert refused.exit_code == 1 and message in refused.output and not (folder / "more").exists()


def test_a_recipe_names_its_adapter_or_its_start(folder, first):
    (folder / "both.yaml").write_text(RECIPE + "adapter: first\n")
    assert "leave `start:` empty" in run(app, [*first, "both.yaml"]).output
    start = next(line for line in RECIPE.splitlines() if line.startswith("start"))
    (folder / "named.yaml").write_text(RECIPE.replace(start, "start:\nadapter: first"))
    assert run(app, [*first, "named.yaml", "--output", "more"]).exit_code == 0
    (folder / "first" / "base_model").mkdir()
    own = run(app, [*first, "named.yaml", "--output", "again"])
    assert own.exit_code == 1 and "use the one in 'first/base_model' (--model)" in own.output


def test_fresh_weights_and_a_time_limit(folder):
    (folder / "scratch.yaml").write_text(RECIPE.replace("name: tiny", "name: scratch\nfresh_weights: true"))
    command = ["train", "scratch.yaml", "--model", "model", "--text", "text.txt", "--output", "out"]
    result = run(app, [*command, "--time-limit", "0.001"])  # a twentieth of a second
    assert result.exit_code == 0, result.output
    assert "stopped by the time limit; the same command goes on" in result.output
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


def test_an_interrupted_training_is_no_success(folder, monkeypatch):
    from focus_attn.training import loop

    stop = AtStep(1, lambda: signal.raise_signal(signal.SIGTERM))
    whole = loop.train
    monkeypatch.setattr(loop, "train", lambda *args, **options: whole(*args, **options, callbacks=[stop]))
    result = run(app, ["train", "recipe.yaml", "--model", "model", "--text", "text.txt", "--output", "out"])
    assert result.exit_code == 128 + signal.SIGTERM and "the same command goes on" in result.output


def test_an_adapter_that_no_run_has_left_is_not_written_over(folder, first, monkeypatch):
    command = [*first, "recipe.yaml", "--output", "by_hand"]
    shutil.copytree(folder / "first", folder / "by_hand", ignore=shutil.ignore_patterns("run.json", "checkpoints"))
    before = (folder / "by_hand" / "focus_model.safetensors").read_bytes()
    refused = run(app, command)
    assert refused.exit_code == 1 and "would be written over" in refused.output
    assert (folder / "by_hand" / "focus_model.safetensors").read_bytes() == before
    with monkeypatch.context() as patch:  # anew, and stopped before there was a checkpoint
        patch.setattr("focus_attn.training.loop._start", lambda *args: 1 / 0)
        run(app, [*command, "--no-resume"])
    assert run(app, command).exit_code == 0


def test_routers_that_begin_at_random_are_named(folder):
    start = next(line for line in RECIPE.splitlines() if line.startswith("start"))
    (folder / "random.yaml").write_text(RECIPE.replace(start, "start:"))
    result = run(app, ["train", "random.yaml", "--model", "model", "--text", "text.txt"])
    assert result.exit_code == 0 and "the routers begin at random" in result.output


def test_a_model_that_is_not_there_is_named(folder):
    result = run(app, ["train", "recipe.yaml", "--model", "./modell", "--text", "text.txt"])
    assert result.exit_code == 1 and "no model './modell'" in result.output
