"""LoRA, DoRA and full fine-tuning: the peers that keep every pair."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import focus, tiny_model, tokens

from focus_attn.baselines import make_baseline, use_baseline
from focus_attn.baselines.fine_tune import fine_tune
from focus_attn.evaluation import block_perplexity

BLOCKS = tokens(6, 32, seed=2)
SETTINGS = {"steps": 8, "lr": 1e-2, "rank": 4, "sequences": 3}


ADAPTED = ((32 + 32), (32 + 16))  # q_proj and v_proj, in + out
PARAMETERS = {"lora": 2 * 4 * sum(ADAPTED), "dora": 2 * (4 * sum(ADAPTED) + 32 + 16)}  # DoRA: a length for each row


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_training_lowers_perplexity_of_what_is_trained_on(method):
    model = tiny_model()
    before, everything = block_perplexity(model, BLOCKS, window=3).ppl, sum(p.numel() for p in model.parameters())
    trained = fine_tune(model, BLOCKS, method=method, **SETTINGS)
    assert block_perplexity(trained.model, BLOCKS, window=3).ppl < 0.9 * before
    assert len(trained.losses) == SETTINGS["steps"]
    assert trained.losses[-1] < trained.losses[0]
    assert not trained.model.training
    assert trained.parameters == PARAMETERS.get(method, everything)


def test_lora_leaves_the_base_alone():
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    trained = fine_tune(model, BLOCKS, method="lora", **SETTINGS)
    base = trained.model.unload()
    assert all(torch.equal(p, before[name]) for name, p in base.named_parameters())


def test_a_half_precision_model_is_trained_in_full_precision_and_given_back():
    trained = fine_tune(tiny_model().bfloat16(), BLOCKS, method="full", **SETTINGS)
    assert {p.dtype for p in trained.model.parameters()} == {torch.bfloat16}
    assert trained.losses[-1] < trained.losses[0]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_interrupted_run_goes_on(method, tmp_path):
    def run(**changes):
        return fine_tune(tiny_model(), BLOCKS, method=method, **{**SETTINGS, **changes})

    def interrupt(done, steps):
        if done == 5:
            raise KeyboardInterrupt

    whole = run()
    file = tmp_path / "runs" / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=file, save_every=100, progress=interrupt)
    done = []
    resumed = run(checkpoint=file, save_every=2, progress=lambda step, steps: done.append(step))
    assert done[0] == 6  # nothing is done twice, however seldom it is saved
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="other settings"):
        fine_tune(tiny_model(), BLOCKS, method="lora", **{**SETTINGS, "rank": 2}, checkpoint=file)
    for changes in ({"lr": 1e-5}, {"seed": 7}):
        with pytest.raises(ValueError, match="other settings"):
            run(**changes, checkpoint=file)
    with pytest.raises(ValueError, match="other settings"):
        fine_tune(tiny_model(), BLOCKS.flip(0), method=method, **SETTINGS, checkpoint=file)


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_a_step_in_parts_is_the_step(micro_batch):
    """2 of 3: parts of unlike size."""
    passes = []

    def run(**parts):
        model = tiny_model()
        model.get_input_embeddings().register_forward_hook(lambda module, args, out: passes.append(len(out)))
        return fine_tune(model, BLOCKS, method="full", **{**SETTINGS, "steps": 3}, **parts)

    whole, parts = run(), run(micro_batch=micro_batch)
    assert passes[:3] == [3, 3, 3] and max(passes[3:]) == micro_batch and sum(passes[3:]) == 9
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_model_adapts_to_a_sparse_method():
    model, method = tiny_model(), make_baseline("window", window=3)
    with use_baseline(model, method):
        before = block_perplexity(model, BLOCKS, window=3).ppl
        trained = fine_tune(model, BLOCKS, method="full", **SETTINGS)
        assert block_perplexity(trained.model, BLOCKS, window=3).ppl < 0.9 * before


def test_a_model_with_attention_dropout_adapts_too():
    model, method = tiny_model("gpt2", attn_pdrop=0.5), make_baseline("window", window=3)
    with use_baseline(model, method):
        one, other = (fine_tune(copy.deepcopy(model), BLOCKS, method="full", **SETTINGS) for _ in range(2))
    assert one.losses == other.losses  # nothing is dropped at random


def test_a_trained_adapter_runs_in_the_seam():
    trained = fine_tune(tiny_model(), BLOCKS, method="lora", **SETTINGS)
    plain = block_perplexity(trained.model, BLOCKS, window=3).ppl
    with use_baseline(trained.model, make_baseline("full")) as ledger:
        assert block_perplexity(trained.model, BLOCKS, window=3).ppl == pytest.approx(plain, rel=1e-5)
    assert ledger.share == 1.0


def test_blocks_are_cut_to_the_length():
    model, seen = tiny_model(), set()
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.add(tuple(out.shape[:2])))
    fine_tune(model, BLOCKS, method="full", steps=2, sequences=5, length=10)
    assert seen == {(5, 10)}


def test_bad_input_is_answered():
    with pytest.raises(ValueError, match="from 2 to the blocks' 32 tokens, got 64"):
        fine_tune(tiny_model(), BLOCKS, method="full", length=64)
    with pytest.raises(ValueError, match=r"int64 tokens \[N, T\]"):
        fine_tune(tiny_model(), BLOCKS.float(), method="full")
    with pytest.raises(ValueError, match='"lora", "dora" or "full"'):
        fine_tune(tiny_model(), BLOCKS, method="qlora")
    with pytest.raises(ValueError, match=r"model\.unload\(\)"):
        fine_tune(focus(), BLOCKS, method="full")
    with pytest.raises(ValueError, match="`steps`"):
        fine_tune(tiny_model(), BLOCKS, method="full", steps=0)
    with pytest.raises(ValueError, match="`micro_batch` must be at least 1, got 200, 8, 16 and 0"):
        fine_tune(tiny_model(), BLOCKS, method="full", micro_batch=0)
    with pytest.raises(ValueError, match="lower `lr`"):
        fine_tune(tiny_model(), BLOCKS, method="full", lr=1e20)
