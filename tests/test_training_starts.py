"""Starts: each against what it promises, and the budget's share by layer."""

import pytest
import torch
from test_training_step import planted_model
from tiny import focus, tiny_model, tokens

from focus_attn import FocusConfig, get_focus_model
from focus_attn.training import fit_coverage
from focus_attn.training.coverage import _fitted_together
from focus_attn.training.layer_fit import LayersTrainer, ObservedLayer
from focus_attn.training.measures import coverage, probe_groups
from focus_attn.training.observe import observe_layers
from focus_attn.training.sensitivity import layer_sensitivity, share_budget
from focus_attn.training.start_layer import Coordinates, _write, kmeans
from focus_attn.training.starts import start_routers

CONFIG = FocusConfig(num_groups=4, window=4, num_sinks=1, router_dim=8)


def test_kmeans_finds_what_is_apart():
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.randn(5, 3, generator=generator)
    points = centres.repeat_interleave(40, 0) + 0.1 * torch.randn(200, 3, generator=generator)
    found = kmeans(points, 5, generator)
    assert torch.cdist(found, centres).amin(0).max() < 0.1


def test_a_router_made_of_clusters_sends_tokens_to_the_nearest():
    model = focus(config=CONFIG)
    router = model.focus_layers()[0].router
    torch.manual_seed(0)
    tokens_ = torch.randn(50, 32)
    tokens_ = tokens_ / tokens_.square().mean(-1, keepdim=True).sqrt()
    view, centres = Coordinates(torch.randn(32), torch.randn(32, 8)), torch.randn(4, 8) * 3
    with torch.no_grad():
        _write(router, 1, 0, view, centres, tokens_)
        routing = router(tokens_[None])
    assert torch.equal(routing.key_groups[0, 0, :, 0], torch.cdist(view.of(tokens_), centres).argmin(-1))
    assert routing.key_scores[0, 0].std(-1).square().mean().sqrt().item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("how", ["pca_kmeans", "spectral", "heads"])
def test_informed_starts_keep_kinds_together(how):
    """Attention here goes by the kind of a token: an informed start must cover more of it than a random one, a pair
    for a pair."""
    model = get_focus_model(planted_model(), CONFIG)
    blocks = tokens(8, 128, seed=3)

    def gain():
        """Covered attention over what as many random pairs would cover."""
        with torch.no_grad(), model.record_stats() as stats:
            model(blocks)
        near = 1 - 122 * 123 / (128 * 129)
        return coverage(model, blocks)[0] - (stats.pairs_kept - near) / (1 - near)

    start_routers(model, blocks, "random")
    random = gain()
    start_routers(model, blocks, how)
    assert gain() > random + 0.05


@pytest.mark.parametrize("how", ["spectral", "heads"])
def test_starts_from_attention_find_the_side_it_looks_from(how):
    """Queries of one kind that look for keys of another: only the attention knows that they belong together."""
    model = planted_model()
    shift = torch.zeros(16, 16)
    with torch.no_grad():
        codes = torch.zeros(16, 16)
        for token in range(16):
            codes[token] = model.transformer.wte.weight[token, :16] / 4
        shift = codes.T @ codes.roll(4, 0)  # the code of a kind -> the code of the kind four further on
        weight = model.transformer.h[0].attn.c_attn.weight
        weight[:16, :32] = shift @ weight[:16, :32]
    model = get_focus_model(model, CONFIG)
    blocks = tokens(8, 128, seed=3)
    start_routers(model, blocks, "pca_kmeans")
    by_hidden = coverage(model, blocks)[0]
    start_routers(model, blocks, how)
    assert coverage(model, blocks)[0] > by_hidden + 0.05


@pytest.mark.parametrize("how", ["random", "pca_kmeans", "spectral", "heads", "coverage"])
def test_starts_are_reproducible(how):
    results = []
    for draws in (0, 3):
        model = get_focus_model(tiny_model(), CONFIG)
        torch.randn(draws)  # the global generator must not matter
        options = {"steps": 3, "budget": 0.5} if how == "coverage" else {}
        start_routers(model, tokens(2, 64), how, seed=1, **options)
        results.append([layer.router.projection.clone() for layer in model.focus_layers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("how", ["spectral", "heads"])
def test_starts_run_on_other_kinds_of_attention(architecture, shared, how):
    model = focus(architecture, FocusConfig(num_groups=4, window=3, num_sinks=1, router_dim=4, shared_router=shared))
    start_routers(model, tokens(2, 48), how)
    assert all(torch.isfinite(layer.router.projection).all() for layer in model.focus_layers() if layer.router)


def test_where_nothing_is_far_the_random_start_stays():
    """Values of no length: no key counts, so there is no attention to cluster by."""
    model = get_focus_model(tiny_model(), CONFIG)
    with torch.no_grad():
        model.base_model.model.layers[0].self_attn.v_proj.weight.zero_()
    start_routers(model, tokens(2, 64), "random")
    random = [layer.router.centroids.clone() for layer in model.focus_layers()]
    start_routers(model, tokens(2, 64), "spectral")
    spectral = [layer.router.centroids for layer in model.focus_layers()]
    assert torch.equal(random[0], spectral[0]) and not torch.equal(random[1], spectral[1])


def test_the_fit_goes_on_from_a_start():
    blocks = tokens(4, 128, seed=3)
    shares = {}
    for start in ("random", "spectral", None):
        model = get_focus_model(planted_model(), CONFIG)
        if start is None:
            start_routers(model, blocks, "spectral")
            before = probe_groups(model, blocks)
        fit_coverage(model, blocks, steps=1, budget=0.35, start=start, learning_rate=1e-5)
        shares[start] = coverage(model, blocks)[0]
        if start is None:
            assert all((before[0] == after).float().mean() > 0.99 for after in probe_groups(model, blocks).values())
    assert shares["spectral"] > shares["random"] + 0.05


def test_layers_fitted_together_are_fitted_as_alone():
    blocks = tokens(3, 64)
    results = []
    for at_once in (1, 2):
        model = get_focus_model(tiny_model(), CONFIG)
        start_routers(model, blocks, "random")
        seen = observe_layers(model, blocks, 20, 0)
        layers = [ObservedLayer(i, layer.router, seen[i]) for i, layer in enumerate(model.focus_layers())]
        fits = []
        for together in _fitted_together(layers, at_once):
            trainer = LayersTrainer(together, 10, 0.01, 0)
            trainer.order = [2, 0, 1]
            fits += trainer.run([0.3] * len(together))
        results.append((fits, [layer.router.projection.detach().clone() for layer in layers]))
    (alone, first), (together, second) = results
    for a, b in zip(alone, together, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_layers_of_other_shapes_are_fitted_apart():
    config = FocusConfig(num_groups=4, window=2, num_sinks=1, sliding_layers="intersect")
    model = focus("gemma2", config)
    seen = observe_layers(model, tokens(1, 48), 8, 0)
    layers = [ObservedLayer(i, layer.router, seen[i]) for i, layer in enumerate(model.focus_layers())]
    together = [[layer.layer_idx for layer in some] for some in _fitted_together(layers, 8)]
    assert sorted(together) == [[0, 2], [1, 3]]


def test_budgets_follow_the_sensitivity_and_keep_their_mean():
    shares = share_budget(0.2, torch.tensor([1e-4, 1e-3, 1e-2, 1e-1]))
    assert shares == sorted(shares)
    assert sum(shares) / 4 == pytest.approx(0.2, abs=1e-6)
    assert min(shares) >= 0.4 * 0.2 - 1e-9 and max(shares) <= 2 * 0.2 + 1e-9
    assert share_budget(0.2, torch.ones(3)) == pytest.approx([0.2] * 3)


def test_sensitivity_is_the_divergence_of_one_sparse_layer():
    model = get_focus_model(tiny_model(), CONFIG)
    with torch.no_grad():  # a layer whose values are nothing loses nothing
        model.base_model.model.layers[0].self_attn.v_proj.weight.zero_()
    ids = tokens(1, 64)
    first, second = layer_sensitivity(model, ids).tolist()
    assert abs(first) < 1e-6 and second > 1e-3
    fit = fit_coverage(model, ids, steps=30, budget=0.45, learning_rate=0.01, sensitivity=torch.tensor([1e-6, 1.0]))
    assert fit.layers[0].far_pairs_kept < fit.layers[1].far_pairs_kept


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((tokens(2, 64), "kmeans"), {}, "`how` must be one of"),
        ((tokens(2, 64), "spectral"), {"steps": 3}, "`steps`: options of"),
        ((tokens(2, 6), "spectral"), {}, "too small to fit on"),
    ],
)
def test_starts_that_cannot_be_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        start_routers(focus(config=CONFIG), *arguments, **options)
