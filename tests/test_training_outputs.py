"""The fit by what a layer's output loses: its forward is the model's, its cost is the loss's, and it goes down."""

import dataclasses

import pytest
import torch
from test_training_step import planted_model
from tiny import focus, tokens

from focus_attn import FocusConfig, focus_attention, get_focus_model
from focus_attn.training import fit_coverage
from focus_attn.training.layer_fit import ObservedLayer, scores_by_side
from focus_attn.training.loss_gradients import loss_gradients
from focus_attn.training.observe import observe_layers
from focus_attn.training.output_fit import assignments, cost, cost_of_nearness, fit_output, make_lesson, output

CONFIG = FocusConfig(num_groups=4, window=4, num_sinks=1, router_dim=8)


def observed(model, blocks, queries=16):
    """By layer: what was seen of one block, and the layer's whole output [H, T, Dv] there."""
    outputs = {}
    seen = observe_layers(model, blocks, queries, 0, values=True)
    with torch.no_grad(), model.observe_attention(lambda inputs: None, lambda layer, out: outputs.update({layer: out})):
        model(blocks)
    return {layer: (one[0], outputs[layer][0]) for layer, one in seen.items()}


def at(out, positions):
    return out[:, positions].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "falcon", "gpt_oss"])
def test_a_lesson_is_what_the_layer_does(architecture):
    model = focus(architecture, config=CONFIG)
    for seen, out in observed(model, tokens(1, 60)).values():
        lesson = make_lesson(seen, CONFIG.window, CONFIG.num_sinks)
        torch.testing.assert_close(lesson.output, at(out, seen.positions), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choices", [(1, 1), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_hard_groups_give_what_is_served(architecture, choices):
    config = dataclasses.replace(CONFIG, query_top_k=choices[0], key_top_k=choices[1])
    model, blocks = focus(architecture, config=config), tokens(1, 60)
    routers = {layer.spec.layer_idx: layer.router for layer in model.focus_layers() if layer.router is not None}
    whole = {}
    with torch.no_grad(), model.observe_attention(lambda inputs: whole.update({inputs.layer_idx: inputs})):
        model(blocks)
    for layer, (seen, _) in observed(model, blocks).items():
        lesson, router, inputs = make_lesson(seen, config.window, config.num_sinks), routers[layer], whole[layer]
        scores = scores_by_side(
            *(x.detach()[None] for x in (router.projection, router.centroids, router.bias)), lesson.hidden[None]
        )
        query, key = assignments(scores[0], choices[0]), assignments(scores[-1], choices[1])
        shared = (query[..., lesson.positions].transpose(1, 2) @ key).clamp_max(1)
        with torch.no_grad():
            routing = router(inputs.hidden)
            served = focus_attention(
                inputs.q, inputs.k, inputs.v, routing.query_groups, routing.key_groups, num_groups=4, window=4,
                num_sinks=1, scale=inputs.scale, softcap=inputs.softcap, sliding_window=inputs.sliding_window,
                sink_logits=inputs.sink_logits, backend="reference",
            )  # fmt: skip
        got = output(lesson, lesson.near + shared * lesson.far)
        torch.testing.assert_close(got, at(served[0], lesson.positions), rtol=1e-4, atol=1e-5)


def test_the_factor_is_the_covariance_of_the_losss_gradients():
    model, blocks = focus(config=CONFIG), tokens(3, 40)
    factors = loss_gradients(model, blocks)
    assert all(p.grad is None for p in model.parameters())
    total, outputs = {}, {}
    for block in blocks:
        embedded = model.base_model.get_input_embeddings()(block[None]).detach().requires_grad_()
        with model.observe_attention(lambda inputs: None, lambda layer, out: outputs.update({layer: out})):
            logits = model.base_model(inputs_embeds=embedded, use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[4:-1], block[5:], reduction="sum")
        for layer, gradient in zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True):
            rows = gradient[0, :, 4:].transpose(0, 1).flatten(1)
            total[layer] = total.get(layer, 0) + rows.T @ rows / (3 * 35)
    for layer, factor in factors.items():
        torch.testing.assert_close(factor @ factor.T, total[layer], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_assignments_are_hard_in_value_and_soft_in_gradient(k):
    scores = torch.randn(2, 6, 30, requires_grad=True)
    groups = assignments(scores, k)
    assert torch.equal(groups.detach().round(), groups.detach().round().clamp(0, 1))
    assert torch.equal(groups.detach().round().sum(1), torch.full((2, 30), float(k)))
    groups.square().sum().backward()
    assert (scores.grad != 0).any()


@pytest.mark.parametrize("choices", [(1, 1), (2, 1)], ids=str)
def test_the_fit_loses_less(choices):
    config = dataclasses.replace(CONFIG, query_top_k=choices[0])
    model, blocks = get_focus_model(planted_model(), config), tokens(6, 96, seed=3)
    fit_coverage(model, blocks, steps=30, budget=0.4)
    seen, factors = observe_layers(model, blocks, 32, 0, values=True), loss_gradients(model, blocks)
    for focus_layer in model.focus_layers():
        index, router = focus_layer.spec.layer_idx, focus_layer.router
        layer = ObservedLayer(index, router, seen[index])
        alone = cost_of_nearness(layer, factors[index])
        before, after = (
            fit_output(layer, factors[index], alone, steps, 5e-3, 0, far_budget=0.35, cap=0.5) for steps in (0, 60)
        )
        assert 0 <= after < before < 1.5
        lesson = make_lesson(seen[index][0], config.window, config.num_sinks)
        everything = (lesson.near | lesson.far)[None].float()
        assert cost(lesson, everything, factors[index]) < 1e-9 < cost(lesson, lesson.near[None], factors[index])


def test_the_coverage_fit_goes_on_with_it():
    model, blocks = get_focus_model(planted_model(), CONFIG), tokens(4, 96, seed=3)
    plain = fit_coverage(model, blocks, steps=20, budget=0.4)
    both = fit_coverage(model, blocks, steps=20, budget=0.4, output_steps=20)
    assert plain.lost is None and 0 < both.lost < 1
    assert all(0 < layer.covered <= 1 for layer in both.layers)
    with pytest.raises(ValueError, match="output_steps"):
        fit_coverage(model, blocks, output_steps=-1)
