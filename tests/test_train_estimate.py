"""The memory estimate against what there is: parameters exactly, activations against what autograd keeps."""

import dataclasses

import pytest
import torch
from tiny import tiny_model, tokens
from training_runs import CONFIG, recipe, stage

from focus_attn import get_focus_model
from focus_attn.training import step
from focus_attn.training.estimate import estimate_memory
from focus_attn.training.narrow import narrowing

CPU = torch.device("cpu")


def make(**changes):
    return get_focus_model(tiny_model(num_hidden_layers=6, hidden_size=64, intermediate_size=192, **changes), CONFIG)


def bytes_kept_for_backward(model, options, length):
    """What autograd holds on to after a forward, every storage once, parameters left out."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    pack, unpack = narrowing()

    def count(tensor):
        packed = pack(tensor)
        storage = packed.tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return packed

    model.train()
    hooks = torch.autograd.graph.saved_tensors_hooks
    with pytest.MonkeyPatch.context() as patch, hooks(count, unpack):
        patch.setattr(step, "narrow_activations", lambda model: hooks(count, unpack))
        result = step.training_step(model, tokens(1, length), options=options)
    assert result.loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("trains", ["routers", "everything"])
def test_weights_and_optimizer_are_counted_exactly(trains):
    model, chosen = make(), stage(trains=trains)
    estimate = estimate_memory(model, recipe(chosen), chosen, CPU)
    routers = sum(p.numel() for layer in model.focus_layers() for p in layer.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert estimate.weights == 4 * total
    assert estimate.optimizer == 12 * (routers if trains == "routers" else total)
    sharded = estimate_memory(model, recipe(chosen, sharding="fsdp"), chosen, CPU, processes=4)
    assert sharded.weights == (4 * (total - routers)) // 4 + 4 * routers


@pytest.mark.parametrize("trains", ["routers", "everything"])
def test_activations_are_within_a_factor_of_two_of_what_is_kept(trains):
    model, chosen = make(), stage(length=256, trains=trains)
    if trains == "everything":
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    estimate = estimate_memory(model, recipe(chosen), chosen, CPU)
    kept = bytes_kept_for_backward(model, chosen.step_options(), 256)
    assert 0.5 < estimate.activations / kept < 2, (estimate.activations, kept)


@pytest.mark.filterwarnings("ignore:a soft gate")
@pytest.mark.parametrize(
    ("gate", "backend"), [("additive", "auto"), ("additive", "reference"), ("multiplicative", "auto")]
)
def test_soft_gates_are_within_a_factor_of_two_of_what_is_kept(gate, backend):
    base, chosen = tiny_model(num_hidden_layers=6, hidden_size=64, intermediate_size=192), stage(length=512)
    model = get_focus_model(base, dataclasses.replace(CONFIG, gate=gate, backend=backend))
    estimate = estimate_memory(model, recipe(chosen), chosen, CPU)
    kept = bytes_kept_for_backward(model, dataclasses.replace(chosen.step_options(), probes=0), 512)
    assert 0.5 < estimate.activations / kept < 2, (estimate.activations, kept)


def test_checkpointing_and_precision_shrink_it():
    model, chosen = make(), stage(length=256)
    kept, again, half = (
        estimate_memory(model, recipe(chosen, **changes), chosen, CPU)
        for changes in ({}, {"gradient_checkpointing": True}, {"precision": "bf16"})
    )
    assert again.activations < kept.activations == again.activations_unchecked
    assert half.activations < kept.activations
    assert "without checkpointing" in str(again) and "more than there is" not in str(again)
    assert "more than there is" in str(dataclasses.replace(again, available=1))


def test_mixed_precision_keeps_hidden_states_wide_and_weights_twice():
    model, chosen = make(), stage(length=256, trains="everything")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    wide, mixed = (
        estimate_memory(model, recipe(chosen, precision=precision), chosen, CPU) for precision in ("fp32", "bf16")
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = bytes_kept_for_backward(model, chosen.step_options(), 256)
    copies = mixed.weights - wide.weights
    assert copies == 2 * sum(p.numel() for name, p in model.named_parameters() if "focus" not in name)
    assert 0.5 < (mixed.activations + copies) / kept < 2, (mixed.activations, copies, kept)
