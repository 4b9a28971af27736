"""Centroids that no gradient moves, and routers that send no gradient back: each does what it says, and is resumed."""

import pytest
import torch
from tiny import focus, tokens
from training_runs import MOVED_CENTROIDS, AtStep, assert_same, recipe, routers, run, stage

from focus_attn import FocusConfig
from focus_attn.router import normalise
from focus_attn.training import StepOptions, training_step
from focus_attn.training.centroids import SeenTokens, follow_means, recluster

CONFIG = FocusConfig(num_groups=4, window=8, num_sinks=2, router_dim=8)
SHARED = FocusConfig(num_groups=4, window=8, num_sinks=2, router_dim=8, shared_router=True, key_top_k=2)


def look(model, *batches, segments=None, backward=False):
    seen = SeenTokens()
    for ids in batches:
        with seen.collecting(model, segments):
            result = training_step(model, ids, options=StepOptions(probes=0), segments=segments)
        if backward:
            result.loss.backward()
    return seen


def routed_by(model, ids):
    """By layer: the router, its vectors [sides, B, R, T, w] and its ids, of an ordinary forward."""
    hidden, ids_of = {}, {}

    def keep(index, routing):
        ids_of[index] = routing
        return routing

    hooks = [
        layer.router.register_forward_hook(lambda m, args, _, i=layer.spec.layer_idx: hidden.update({i: args[0]}))
        for layer in model.focus_layers()
    ]
    with torch.no_grad(), model.override_routing(keep):
        model(ids)
    for hook in hooks:
        hook.remove()
    for layer in model.focus_layers():
        router, index = layer.router, layer.spec.layer_idx
        vectors = normalise(hidden[index])[None, :, None] @ router.projection[:, None]
        yield router, vectors, ids_of[index]


@pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["two sides", "shared, two groups a key"])
def test_a_centroid_goes_part_of_the_way_to_the_mean_of_its_vectors(config):
    model, ids = focus(config=config).train(), tokens(2, 40)
    segments = torch.zeros_like(ids)
    segments[1, 20:] = -1  # padding, which belongs to no group
    layer = model.focus_layers()[0]
    with torch.no_grad():
        layer.router.bias[-1, 0, 3] = -100.0  # a group that nobody is in
    empty = layer.router.centroids[-1, 0, 3].clone()
    wanted = []
    for router, vectors, routing in routed_by(model, ids):
        centroids = router.centroids.detach().clone()
        sides = (routing.query_groups, routing.key_groups)[-router.num_sides :]
        for side, groups in enumerate(sides):
            for index in range(router.num_routers):
                for group in range(4):
                    mine = (groups[:, index] == group).any(-1) & (segments >= 0)
                    if mine.any():
                        mean = vectors[side, :, index][mine].mean(0)
                        centroids[side, index, group] = 0.7 * centroids[side, index, group] + 0.3 * mean
        wanted.append(centroids)
    follow_means(model, look(model, ids, segments=segments), 0.3)
    for layer, centroids in zip(model.focus_layers(), wanted, strict=True):
        torch.testing.assert_close(layer.router.centroids.detach(), centroids, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.focus_layers()[0].router.centroids[-1, 0, 3], empty)


def test_the_highest_score_is_the_nearest_centroid():
    model, ids = focus(config=CONFIG).train(), tokens(2, 40)
    follow_means(model, look(model, ids), 0.5)
    for router, vectors, routing in routed_by(model, ids):
        distance = torch.cdist(vectors[1], router.centroids[1])  # [B, R, T, K]
        assert torch.equal(distance.argmin(-1), routing.key_groups[..., 0])


def test_reclustered_centroids_are_those_of_kmeans_on_both_sides():
    """Of k-means: the mean of what is nearest. A query and the keys it looks for lie in one space, so both sides count
    and have the same centroids."""
    model, batches = focus(config=CONFIG).train(), (tokens(2, 40), tokens(2, 40, seed=1))
    segments = torch.zeros_like(batches[0])
    segments[1, 30:] = -1
    found = [[one[1] for one in routed_by(model, ids)] for ids in batches]
    recluster(model, look(model, *batches, segments=segments), seed=0)
    for index, layer in enumerate(model.focus_layers()):
        router = layer.router
        assert torch.equal(router.centroids[0], router.centroids[1])
        for head in range(router.num_routers):
            points = torch.cat([vectors[index][:, :, head][:, segments == 0].flatten(0, 1) for vectors in found])
            nearest = torch.cdist(points, router.centroids[0, head]).argmin(-1)
            means = torch.stack([points[nearest == group].mean(0) for group in range(4)])
            torch.testing.assert_close(router.centroids[0, head].detach(), means, atol=1e-4, rtol=1e-4)


def test_checkpointing_runs_a_forward_twice_and_counts_it_once():
    model, ids = focus(config=CONFIG).train(), tokens(2, 40)
    once = look(model, ids)
    model.gradient_checkpointing_enable()
    twice = look(model, ids, backward=True)
    for index, forwards in twice.layers.items():
        assert len(forwards) == len(once.layers[index]) == 1
        assert torch.equal(forwards[0].vectors, once.layers[index][0].vectors)
    assert not any(layer.router._forward_hooks for layer in model.focus_layers())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_stop_gradient_routing_does_not_shape_the_model(checkpointing):
    """The base's gradients are those under routers that learn nothing at all, whatever the routing's terms weigh."""

    def gradients(options, frozen=False):
        model = focus(config=CONFIG).train()
        model.base_model.requires_grad_(True)
        if frozen:
            for layer in model.focus_layers():
                layer.requires_grad_(False)
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        training_step(model, tokens(2, 40), options=options).loss.backward()
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return [{name: grad for name, grad in named.items() if (".focus." in name) == ours} for ours in (False, True)]

    terms = {"balance_weight": 3.0, "budget": 0.3, "probes": 8}
    nothing = {"balance_weight": 0.0, "dominance_weight": 0.0, "probes": 0}
    untouched, _ = gradients(StepOptions(**nothing), frozen=True)
    stopped, learned = gradients(StepOptions(**terms, stop_gradient=True))
    assert_same(stopped, untouched, atol=1e-5, rtol=1e-4)
    assert len(learned) == 4 and all(grad.abs().max() > 0 for grad in learned.values())
    passed, _ = gradients(StepOptions(**terms))
    assert any((passed[name] - untouched[name]).abs().max() > 1e-3 for name in passed)


@pytest.mark.parametrize("moved", MOVED_CENTROIDS, ids=lambda moved: next(iter(moved)))
def test_what_moves_centroids_is_the_whole_step_however_many_forwards_it_has(moved, tmp_path):
    chosen = {"steps": 2, "sequences": 4, "learning_rate": 0.0, "bias_rate": 0.0, **moved}  # nothing else moves
    one, four = (
        routers(run(tmp_path / str(size), recipe(stage(micro_batch=size, **chosen), evaluate_every=0)))
        for size in (4, 1)
    )
    assert_same(four, one, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(one["0 centroids"], focus(config=CONFIG).focus_layers()[0].router.centroids, atol=0.1)


@pytest.mark.parametrize("moved", MOVED_CENTROIDS, ids=lambda moved: next(iter(moved)))
def test_interruptions_change_nothing(moved, tmp_path):
    chosen = recipe(
        stage(steps=3, bias_rate=0.0, trains="everything", base_learning_rate=1e-3, stop_gradient=True, **moved),
        save_every=1,
        evaluate_every=0,
        gradient_checkpointing=True,
    )
    whole = routers(run(tmp_path / "whole", chosen))

    class KilledError(Exception):
        pass

    def kill():
        raise KilledError

    with pytest.raises(KilledError):  # in the middle of a step that moves centroids
        run(tmp_path / "killed", chosen, callbacks=[AtStep(2, kill)])
    assert_same(routers(run(tmp_path / "killed", chosen)), whole)


def test_what_follows_means_has_no_gradient_and_the_next_stage_does(tmp_path):
    seen = []

    def note():
        seen.append((router.centroids.grad is not None, router.projection.grad is not None))

    model = focus(config=CONFIG)
    router = model.focus_layers()[0].router
    both = recipe(stage(steps=1, bias_rate=0.0, centroid_rate=0.1), stage(steps=1), evaluate_every=0)
    run(tmp_path, both, model=model, callbacks=[AtStep(1, note)])
    assert seen == [(False, True), (True, True)]


def test_a_stage_reclusters_at_its_steps_only(tmp_path, monkeypatch):
    at = []
    monkeypatch.setattr(
        "focus_attn.training.callbacks.recluster",
        lambda model, seen, seed: at.append((seed, sum(map(len, seen.layers.values())))),
    )
    run(tmp_path, recipe(stage(steps=5, bias_rate=0.0, recluster_every=2), evaluate_every=0))
    assert len(at) == 2 and at[0][0] != at[1][0]
    assert [forwards for _, forwards in at] == [4, 4]  # two layers, two sequences: of this step alone
