"""Models by name, for every command."""

import pytest
import torch
from typer.testing import CliRunner

from focus_attn import FocusConfig, gemma, get_focus_model, pretrained
from focus_attn.adapters import read_adapter
from focus_attn.cli import app
from focus_attn.pretrained import DEFAULT, GEMMA, find_pretrained, load_with_adapter
from focus_attn.zoo import MODEL_NAME, tiny_random_model


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A tiny model, in the places of both that come in wheels."""
    for part in tiny_random_model(seed=3):
        part.save_pretrained(tmp_path / "converted")
    monkeypatch.setattr(pretrained, "default_model_folder", lambda: tmp_path / "converted")
    monkeypatch.setattr(gemma, "gemma_folder", lambda: tmp_path / "converted")
    return tmp_path / "converted"


@pytest.mark.parametrize(("name", "noted"), [(None, MODEL_NAME), (DEFAULT, MODEL_NAME), (GEMMA, gemma.MODEL_NAME)])
def test_what_comes_in_a_wheel_is_noted_by_its_name_not_by_a_folder_of_the_cache(folder, tmp_path, name, noted):
    model, tokenizer = find_pretrained(name).load()
    assert not model.training
    assert model.name_or_path == model.config._name_or_path == tokenizer.name_or_path == noted
    assert find_pretrained(name).with_fresh_weights(0).config._name_or_path == noted
    get_focus_model(model, FocusConfig(num_groups=4, window=8)).save_pretrained(tmp_path / "adapter")
    assert read_adapter(tmp_path / "adapter").base.name == noted
    loaded, _ = load_with_adapter(name, tmp_path / "adapter")
    assert loaded.focus_config.num_groups == 4


def test_a_folder_is_a_model_in_its_own_precision_or_another(folder):
    assert not find_pretrained(str(folder)).in_wheel
    kept, _ = find_pretrained(str(folder)).load()
    half, _ = find_pretrained(str(folder)).load(torch.bfloat16)
    assert {p.dtype for p in kept.parameters()} == {torch.float32}
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_fresh_weights_are_of_the_seed(folder):
    first, again, other = (find_pretrained(str(folder)).with_fresh_weights(seed) for seed in (0, 0, 1))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_a_model_that_is_not_there_is_named(tmp_path):
    (tmp_path / "nothing").mkdir()
    absent = find_pretrained(str(tmp_path / "nothing"))
    for what, read in (
        ("model", absent.load),
        ("tokenizer", absent.tokenizer),
        ("model", lambda: absent.with_fresh_weights(0)),
    ):
        with pytest.raises(ValueError, match=f"no {what} '.*nothing': its files"):
            read()


def test_eval_knows_gemma_by_name(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A text to ask about, and some more of it. " * 40)
    options = ["--text", str(text), "--length", "128", "--window", "16", "--blocks", "2"]
    options += ["--output", str(tmp_path / "out"), "--json", str(tmp_path / "out.json")]
    ran = CliRunner().invoke(app, ["eval", "--model", GEMMA, *options])
    assert ran.exit_code == 0, ran.output
    assert gemma.MODEL_NAME in (tmp_path / "out.json").read_text()
