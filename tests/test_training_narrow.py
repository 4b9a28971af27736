"""Copies in fp32 of half-precision hidden states are kept for the backward in half precision."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_model, tokens
from training_runs import CONFIG

from focus_attn import get_focus_model
from focus_attn.training import step
from focus_attn.training.narrow import narrow_activations, widened_from
from focus_attn.training.step import StepOptions, training_step


def normed(x):
    """As models write it: (the result, a reference to the wide copy that lives as long as something keeps it)."""
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6), weakref.ref(wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_wide_copy_is_let_go_and_gradients_are_the_same_bits(dtype):
    start = torch.randn(5, 64).to(dtype).requires_grad_()
    grads, alive = [], []
    for context in (nullcontext, narrow_activations):
        with context():
            out, wide = normed(start * 3)
        alive.append(wide() is not None)
        grads.append(torch.autograd.grad(out, start, torch.ones_like(out))[0])
    assert alive == [True, False]
    assert torch.equal(*grads)


def test_only_copies_of_half_precision_are_narrowed():
    half, full = torch.randn(4, dtype=torch.bfloat16, requires_grad=True), torch.randn(4, requires_grad=True)
    assert widened_from(half.float()) == torch.bfloat16
    assert widened_from((half * 2).to(torch.float32)) == torch.bfloat16
    for other in (half.float() * 2, half.float()[:2], half.double(), full * 1, full.double().float(), full, half):
        assert widened_from(other) is None
    assert widened_from(half.detach().float()) is None  # nothing tells where it is from


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_step_learns_the_same(checkpointing, monkeypatch):
    ids, learned = tokens(2, 48), []
    for context in (narrow_activations, nullcontext):
        monkeypatch.setattr(step, "narrow_activations", context)
        model = get_focus_model(tiny_model().bfloat16(), CONFIG).train()
        if checkpointing:
            model.base_model.gradient_checkpointing_enable({"use_reentrant": False})
        training_step(model, ids, options=StepOptions(probes=4)).loss.backward()
        learned.append([p.grad for p in model.parameters() if p.grad is not None])
    assert learned[0] and all(torch.equal(a, b) for a, b in zip(*learned, strict=True))
