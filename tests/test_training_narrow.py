"""Copies in fp32 of half-precision hidden states are kept for the backward in half precision."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_model, tokens
from torch._dynamo.testing import CompileCounter
from torch.autograd.graph import saved_tensors_hooks
from training_runs import CONFIG

from focus_attn import get_focus_model
from focus_attn.training import step
from focus_attn.training.narrow import narrow_activations, narrowing, norms, widened_from
from focus_attn.training.step import StepOptions, training_step


def normed(x):
    """As models write it: (the result, a reference to the wide copy that lives as long as something keeps it)."""
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6), weakref.ref(wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_wide_copy_is_let_go_and_gradients_are_the_same_bits(dtype):
    start = torch.randn(5, 64).to(dtype).requires_grad_()
    grads, alive = [], []
    for context in (nullcontext(), saved_tensors_hooks(*narrowing())):
        with context:
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
    for context in (narrow_activations, lambda model: nullcontext()):
        monkeypatch.setattr(step, "narrow_activations", context)
        model = get_focus_model(tiny_model().bfloat16(), CONFIG).train()
        if checkpointing:
            model.base_model.gradient_checkpointing_enable({"use_reentrant": False})
        training_step(model, ids, options=StepOptions(probes=4)).loss.backward()
        learned.append([p.grad for p in model.parameters() if p.grad is not None])
    assert learned[0] and all(torch.equal(a, b) for a, b in zip(*learned, strict=True))


def test_results_that_operators_keep_are_let_go_without_a_backward():
    x = torch.randn(4, 8, requires_grad=True)
    with saved_tensors_hooks(*narrowing()):
        y = x.exp().softmax(-1)
    kept = weakref.ref(y)
    del y
    gc.collect()
    assert kept() is None


def test_what_was_written_to_is_neither_narrowed_nor_used():
    x = torch.randn(4, requires_grad=True)
    with saved_tensors_hooks(*narrowing()):
        y = x * 2
        z = y * y
    y.detach().add_(5)
    with pytest.raises(RuntimeError, match="written to in place"):
        torch.autograd.grad(z.sum(), x)
    half = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors_hooks(*narrowing()):
        wide = (half * 1).float()
        with torch.no_grad():
            wide.mul_(1.1)
        square = wide * wide
    assert torch.equal(torch.autograd.grad(square.sum(), half)[0], (2 * wide).to(torch.bfloat16).detach())


def hooks_of(model):
    return [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_models_in_half_precision_have_hooks_while_it_runs(dtype):
    model = tiny_model().to(dtype)
    with narrow_activations(model):
        assert len(hooks_of(model)) == (0 if dtype == torch.float32 else 2 * len(norms(model)))
    assert not hooks_of(model)
    assert [type(norm).__name__ for norm in norms(model)] == ["LlamaRMSNorm"] * 5  # two a layer, and the last


def test_an_error_inside_a_norm_leaves_no_hook_behind():
    model = tiny_model().bfloat16()
    with pytest.raises(TypeError), narrow_activations(model):
        norms(model)[0](None, None)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None and not hooks_of(model)


def test_hooks_of_others_go_first():
    packed = []
    model = tiny_model().bfloat16()
    with saved_tensors_hooks(lambda x: packed.append(x.dtype) or x, lambda x: x), narrow_activations(model):
        norms(model)[0](torch.randn(2, 3, model.config.hidden_size).bfloat16().requires_grad_() * 1)
    assert torch.float32 in packed


def test_an_interrupt_inside_a_norm_leaves_no_hook_behind(monkeypatch):
    model = tiny_model().bfloat16()
    monkeypatch.setattr(norms(model)[0], "forward", lambda x: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), narrow_activations(model):
        norms(model)[0](torch.zeros(1))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_are_compiled_once_and_whole(in_place):
    model, counter = tiny_model(num_hidden_layers=1).bfloat16(), CompileCounter()
    torch._dynamo.reset()
    if in_place:
        model.model.compile(backend=counter, fullgraph=True)
    else:
        model.model = torch.compile(model.model, backend=counter, fullgraph=True)
    for _ in range(3):
        with narrow_activations(model):
            model.model(tokens(1, 24), use_cache=False)
    assert counter.frame_count == 1
