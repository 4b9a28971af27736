"""Perplexity against a plain computation, and the words around it."""

import math

import pytest
import torch
from tiny import SPARSE, VOCAB, tiny_model, tokenizer_with_bos, tokens

from focus_attn import FocusConfig, get_focus_model
from focus_attn.baselines import RandomGroups, window_and_sinks
from focus_attn.evaluation import (
    block_perplexity,
    group_shares,
    head,
    observe_routing,
    perplexity,
    token_blocks,
    top_tokens,
)
from focus_attn.evaluation import perplexity as function
from focus_attn.evaluation.perplexity import blocks_of_documents
from focus_attn.visibility import Pattern, Tokens, count_causal_pairs, count_visible_pairs
from focus_attn.zoo import tiny_random_model


@torch.no_grad()
def plain_perplexity(model, blocks, start):
    logits = model(blocks).logits.double()
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), blocks[:, 1:], reduction="none")
    return math.exp(losses[:, start - 1 :].mean())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "cohere2", "opt"])
@pytest.mark.parametrize("at_once", [1, 7 * VOCAB, 1 << 24])
def test_equals_a_plain_computation(architecture, at_once, monkeypatch):
    """Chunked or not, and with whatever a model does to its logits (gemma2 caps them, cohere2 scales them)."""
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", at_once)
    model, blocks = tiny_model(architecture), tokens(batch=3, length=40)
    measured = block_perplexity(model, blocks, window=5)
    assert measured.ppl == pytest.approx(plain_perplexity(model, blocks, 6), rel=1e-5)
    assert measured.ppl_last_half == pytest.approx(plain_perplexity(model, blocks, 20), rel=1e-5)
    assert (measured.tokens, measured.blocks, measured.pairs_kept) == (3 * 34, 3, None)
    assert math.exp(sum(measured.block_losses) / 3) == pytest.approx(measured.ppl)
    assert "forward" not in vars(model.get_decoder())


def test_focus_model_counts_its_pairs_and_disabled_it_does_not():
    model, blocks = get_focus_model(tiny_model(), SPARSE), tokens(batch=2, length=40)
    measured = block_perplexity(model, blocks)
    assert measured.window == SPARSE.window
    assert measured.ppl == pytest.approx(plain_perplexity(model, blocks, SPARSE.window + 1), rel=1e-5)
    assert 0 < measured.pairs_kept < 1
    with model.disable_focus():
        dense = block_perplexity(model, blocks)
    assert dense.pairs_kept is None
    assert dense.ppl == pytest.approx(plain_perplexity(tiny_model(), blocks, SPARSE.window + 1), rel=1e-5)


def test_leaking_routing_is_never_quiet():
    model = get_focus_model(tiny_model(), FocusConfig.paper(num_groups=4, window=3, routing="paper_leaky"))
    measured = block_perplexity(model, tokens(batch=1, length=40))
    assert measured.leaking and "NOT CAUSAL" in str(measured)
    model = get_focus_model(tiny_model(), SPARSE)
    measured = block_perplexity(model, tokens(batch=1, length=40))
    assert not measured.leaking and "NOT CAUSAL" not in str(measured)


def test_training_mode_is_given_back():
    model = get_focus_model(tiny_model(), SPARSE).train()
    block_perplexity(model, tokens(batch=1, length=40))
    assert model.training


def test_blocks_stay_inside_documents_and_do_not_overlap():
    _, tokenizer = tiny_random_model()
    blocks = token_blocks(tokenizer, ["abcdefgh", "xyz", "123456"], 3)
    assert [tokenizer.decode(block) for block in blocks] == ["abc", "def", "xyz", "123", "456"]
    assert len(token_blocks(tokenizer, "abcdefgh" * 10, 4, max_blocks=5)) == 5


def test_perplexity_of_text():
    model, tokenizer = tiny_random_model()
    text = "the quick brown fox jumps over the lazy dog. " * 4
    seen = []
    measured = perplexity(model, tokenizer, text, length=60, window=8, progress=lambda *x: seen.append(x))
    assert measured.blocks == 3 and seen == [(1, 3), (2, 3), (3, 3)]
    assert measured == function(model, tokenizer, [text], length=60, window=8)


def test_too_short_text_is_an_error():
    model, tokenizer = tiny_random_model()
    with pytest.raises(ValueError, match="longest has 5"):
        perplexity(model, tokenizer, "hello", length=64)
    with pytest.raises(ValueError, match="past a window of 64"):
        perplexity(model, tokenizer, "hello" * 20, length=60, window=64)
    with pytest.raises(ValueError, match="`max_blocks`"):
        token_blocks(tokenizer, "hello" * 20, 8, max_blocks=0)


def test_window_and_sinks_keeps_exactly_these():
    model, blocks = get_focus_model(tiny_model(), SPARSE), tokens(batch=1, length=40)
    with model.override_routing(window_and_sinks):
        kept = block_perplexity(model, blocks).pairs_kept
    positions = torch.arange(40)[None]
    where = Tokens(positions, positions)
    apart = torch.zeros(1, 1, 40, 1, dtype=torch.long), torch.ones(1, 1, 40, 1, dtype=torch.long)
    pattern = Pattern(SPARSE.num_groups, SPARSE.window, SPARSE.num_sinks)
    expected = count_visible_pairs(*apart, where, pattern) / count_causal_pairs(where)
    assert kept == pytest.approx(expected.item())


def test_random_groups_keep_the_sizes_and_nothing_else():
    model, blocks = get_focus_model(tiny_model(), SPARSE), tokens(batch=2, length=64)
    own = observe_routing(model, blocks)
    deal = RandomGroups(seed=1)
    for routing in own.values():
        dealt = deal(0, routing)
        for before, after in ((routing.query_groups, dealt.query_groups), (routing.key_groups, dealt.key_groups)):
            assert torch.equal(before.sort(2).values, after.sort(2).values)
            assert not torch.equal(before, after)


def test_group_shares_and_top_tokens_count_what_is_there():
    _, tokenizer = tiny_random_model()
    blocks = token_blocks(tokenizer, "aaabbbccc", 9)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 0])[None, None, :, None]
    model = get_focus_model(tiny_model(), FocusConfig(num_groups=2, window=1))
    routing = next(iter(observe_routing(model, tokens(1, 9)).values()))._replace(query_groups=ids, key_groups=ids)
    assert group_shares(ids, 2).tolist() == [[pytest.approx(4 / 9), pytest.approx(5 / 9)]]
    shown = top_tokens(routing, blocks, tokenizer, 2, layer_idx=0, router=0)
    assert [group.key_tokens for group in shown.groups] == [["a"], ["b", "c"]]


@pytest.mark.parametrize("most", [2, 3, 99])
@pytest.mark.parametrize("begins", [False, True], ids=["", "with a token of its own"])
def test_blocks_know_their_documents(most, begins):
    tokenizer = tokenizer_with_bos()[0] if begins else tiny_random_model()[1]
    texts = ["a" * 25, "b" * 5, "c" * 40, "d" * 12]
    blocks, documents = blocks_of_documents(tokenizer, texts, 10, most)
    assert torch.equal(blocks, token_blocks(tokenizer, texts, 10, most))
    assert [texts[number][0] for number in documents] == [tokenizer.decode(block)[-1] for block in blocks]
