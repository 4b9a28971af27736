"""Balance: the target, the cap, and the bias that moves against the load."""

import pytest
import torch
from tiny import focus, tokens

from focus_attn import FocusConfig
from focus_attn.training.balance import group_members, nudge_bias, overfull, sinkhorn_divergence
from focus_attn.training.step import StepOptions, training_step

CONFIG = FocusConfig(num_groups=4, window=8, num_sinks=2, router_dim=8)
REAL = torch.ones(2, 30, dtype=torch.bool)


def test_divergence_is_nothing_when_balanced_and_teaches_balance():
    scores = torch.zeros(2, 3, 30, 4)
    assert sinkhorn_divergence(scores, REAL, 1.0, 10).abs() < 1e-6
    torch.manual_seed(0)
    lopsided = torch.randn(2, 3, 30, 4) + torch.tensor([3.0, 0, 0, 0])
    offset = torch.zeros(4, requires_grad=True)
    before = sinkhorn_divergence(lopsided, REAL, 1.0, 10)
    for _ in range(200):
        offset.grad = None
        divergence = sinkhorn_divergence(lopsided + offset, REAL, 1.0, 10)
        divergence.backward()
        offset.data -= 2.0 * offset.grad
    shares = (lopsided + offset).softmax(-1).mean((0, 2))
    assert divergence < before / 10
    assert (shares - 0.25).abs().max() < 0.08  # one offset for three routers: not exact for each


def test_divergence_balances_over_the_batch_not_over_a_sequence():
    """Two sequences that each fill a group of their own are balanced together."""
    scores = torch.zeros(2, 1, 30, 2)
    scores[0, ..., 0] = scores[1, ..., 1] = 8.0
    assert sinkhorn_divergence(scores, REAL, 1.0, 10) < 1e-4
    assert sinkhorn_divergence(scores[:1], REAL[:1], 1.0, 10) > 1


def test_padding_takes_no_part():
    torch.manual_seed(0)
    scores, real = torch.randn(2, 3, 30, 4), REAL.clone()
    real[:, 20:] = False
    padded = scores.clone()
    padded[:, :, 20:] = 50.0
    wanted = sinkhorn_divergence(scores[:, :, :20], REAL[:, :20], 1.0, 10)
    torch.testing.assert_close(sinkhorn_divergence(padded, real, 1.0, 10), wanted)


def test_only_groups_above_the_cap_cost():
    even = torch.nn.functional.one_hot(torch.arange(60) % 4, 4).float().reshape(2, 1, 30, 4)
    assert overfull(group_members(even, REAL), 0.4) == 0
    key = even.clone()
    key[..., :30, :] = torch.tensor([1.0, 0, 0, 0])
    key.requires_grad_()
    cost = overfull(group_members(key, REAL), 0.4)
    torch.testing.assert_close(cost, torch.tensor((1 / 0.4 - 1) ** 2 / 2))
    cost.backward()
    assert key.grad[..., 0].min() > 0 and key.grad[..., 1:].abs().max() == 0


def test_bias_moves_against_the_load_within_the_rate():
    model = focus(config=CONFIG)
    loads = torch.tensor([[[100, 50, 50, 0], [50, 50, 50, 50]], [[200, 0, 0, 0], [0, 0, 0, 0]]])
    nudge_bias(model, loads, 0.1)
    first, second = (layer.router.bias for layer in model.focus_layers())
    torch.testing.assert_close(first[1, 0], torch.tensor([-0.1, 0.0, 0.0, 0.1]))
    assert torch.equal(first[1, 1], torch.zeros(4))
    assert second[1, 0, 0] < 0 < second[1, 0, 1] and second[1].abs().max() < 0.2
    assert torch.equal(first[0], torch.zeros(2, 4))  # the query side has no load to balance
    torch.testing.assert_close(second.sum(-1), torch.zeros(2, 2))


def test_bias_evens_out_a_lopsided_router():
    model, ids = focus(config=CONFIG), tokens(batch=4, length=64)
    for layer in model.focus_layers():
        layer.router.bias[1, :, 0] = 2.0
    options = StepOptions(balance_weight=0.0)
    with torch.no_grad():
        before = training_step(model, ids, options=options)
        for _ in range(100):
            nudge_bias(model, training_step(model, ids, options=options).loads, 0.05)
        after = training_step(model, ids, options=options)
    assert before.measures["dominance"] > 0.7
    assert after.measures["worst_dominance"] < 0.35


def test_a_shared_router_has_one_bias():
    model = focus(config=FocusConfig(num_groups=4, window=8, shared_router=True))
    loads = torch.zeros(2, 2, 4)
    loads[..., 2] = 10
    nudge_bias(model, loads, 0.1)
    assert all(layer.router.bias[0, :, 2].max() < 0 for layer in model.focus_layers())


def test_a_forward_leaves_the_bias_alone():
    model = focus(config=CONFIG).train()
    model.gradient_checkpointing_enable()
    before = [layer.router.bias.clone() for layer in model.focus_layers()]
    training_step(model, tokens(length=64), options=StepOptions()).loss.backward()
    assert all(torch.equal(a, layer.router.bias) for a, layer in zip(before, model.focus_layers(), strict=True))


def test_loads_of_another_model_are_refused():
    with pytest.raises(ValueError, match="2 routed layers"):
        nudge_bias(focus(config=CONFIG), torch.zeros(3, 2, 4), 0.1)
