"""`dense_heads`: KV heads that see everything in layers whose other heads are routed."""

import dataclasses

import pytest
import torch
from accelerate import cpu_offload
from tiny import EXACT, focus, logits, opened, tiny_model, tokenizer_with_bos, tokens

from focus_attn import FocusConfig, FocusModel, get_focus_model
from focus_attn.compare.groups import describe_groups
from focus_attn.compare.measure import measure
from focus_attn.evaluation import group_shares, observe_routing
from focus_attn.report.domains import compare_domains
from focus_attn.report.group_content import describe_groups as describe_sampled
from focus_attn.report.sample import RoutingSample, SampledLayer, take_sample
from focus_attn.training import StepOptions, layer_sensitivity, training_step
from focus_attn.training.balance import nudge_bias, sinkhorn_divergence
from focus_attn.training.measures import collapsed_routers, group_dominance, probe_groups
from focus_attn.training.packing import read_packing
from focus_attn.training.pairs import PairCount
from focus_attn.training.starts import start_routers
from focus_attn.visibility import Pattern

CONFIG = FocusConfig(num_groups=4, window=3, num_sinks=1, router_dim=8, dense_heads=((0, 1),))
WITHOUT = dataclasses.replace(CONFIG, dense_heads=())


@pytest.mark.parametrize("changes", [{}, {"query_top_k": 2}, {"key_top_k": 2}, {"shared_router": True}])
def test_a_dense_head_sees_everything_and_the_others_what_they_saw(changes):
    ids = tokens(length=40)
    torch.manual_seed(5)
    model = focus(config=dataclasses.replace(CONFIG, **changes))
    torch.manual_seed(5)
    plain = focus(config=dataclasses.replace(WITHOUT, **changes))
    with opened(plain):
        expected = logits(plain, ids)
    torch.testing.assert_close(logits(model, ids), expected, **EXACT)
    assert not torch.allclose(expected, logits(plain, ids), **EXACT)
    with model.record_stats() as stats, torch.no_grad():
        model(ids)
    with plain.record_stats() as routed, opened(plain), torch.no_grad():
        plain(ids)
    assert stats.pairs_kept == pytest.approx(routed.pairs_kept, abs=1e-12)  # it counts all of its pairs


def test_layers_count_from_the_end_too():
    model = focus(config=dataclasses.replace(CONFIG, dense_heads=((-1, 0),)))
    assert [layer.router.dense_heads for layer in model.focus_layers()] == [(), (0,)]


def test_decoding_agrees_with_prefill():
    model, ids = focus(config=CONFIG), tokens(length=24)
    whole = logits(model, ids)
    with torch.no_grad():
        cache = model(ids[:, :10], use_cache=True).past_key_values
        parts = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(10, 24)]
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, 10:], **EXACT)


@pytest.mark.parametrize("gate", ["hard", "additive", "multiplicative"])
@pytest.mark.parametrize("normalization", ["softmax", "sinkhorn"])
def test_training_sees_what_is_served_and_leaves_the_head_alone(gate, normalization):
    config = dataclasses.replace(CONFIG, gate=gate, normalization=normalization)
    model, ids = focus(config=config).train(), tokens(length=40)
    options = StepOptions(objective="lm", budget=0.3, balance_weight=1.0, largest_group=0.3)
    result = training_step(model, ids, options=options)
    result.loss.backward()
    routers = [layer.router for layer in model.focus_layers()]
    for name in ("projection", "centroids"):
        gradient = getattr(routers[0], name).grad
        assert gradient[:, 1].abs().max() == 0  # nothing it could learn
        assert gradient[:, 0].abs().max() > 0 and getattr(routers[1], name).grad.abs().max() > 0
    log = routers[0].log_assignments(routers[0](torch.randn(1, 9, 32)).key_scores)
    assert log[:, 1, :, 0].exp().eq(1).all() and log[:, 1, :, 1:].exp().eq(0).all()


def test_what_is_measured_is_the_heads_that_choose():
    model, ids = focus(config=CONFIG).train(), tokens(length=96)
    result = training_step(model, ids, options=StepOptions(objective="lm", balance_weight=1.0, largest_group=0.3))
    assert result.loads[0, 1].sum() == 0  # no load: it has no groups
    assert collapsed_routers(model, result.loads) == []
    shares = [result.loads[at, head] / result.loads[at, head].sum() for at, head in ((0, 0), (1, 0), (1, 1))]
    largest = [share.max().item() for share in shares]
    assert result.measures["dominance"].item() == pytest.approx(sum(largest) / 3)
    assert result.measures["worst_dominance"].item() == pytest.approx(max(largest))
    assert group_dominance(result.loads).mean == pytest.approx(sum(largest) / 3)
    with torch.no_grad(), model.eval().record_stats() as stats:
        model(ids)
    assert stats.dominance == pytest.approx((largest[0] + sum(largest[1:]) / 2) / 2)
    assert stats.pairs_kept == pytest.approx(result.measures["pairs_kept"].item(), abs=1e-6)
    # How even, sure and full groups are is said of the heads that choose.
    routings = [observe_routing(model, ids)[at] for at in (0, 1)]
    scores = [torch.stack((one.query_scores, one.key_scores)) for one in _scores(model, ids)]  # [2, B, R, T, K]
    chosen = torch.cat([scores[0][:, :, :1], scores[1]], 2)
    assert result.measures["confidence"].item() == pytest.approx(chosen.softmax(-1).amax(-1).mean().item(), rel=1e-5)
    shares = [(one.key_groups[:, :, :, 0, None] == torch.arange(4)).float().mean((0, 2)) for one in routings]
    over = (torch.cat([shares[0][:1], shares[1]]) / 0.3 - 1).clamp_min(0).square().sum(-1)
    assert result.measures["overfull"].item() == pytest.approx(over.mean().item() / 2, abs=1e-6)
    real = torch.ones(ids.shape, dtype=torch.bool)
    imbalance = sinkhorn_divergence(chosen.transpose(0, 1).flatten(1, 2), real, 1.0, 10)
    assert result.measures["imbalance"].item() == pytest.approx(imbalance.item(), rel=1e-4)
    assert [groups.shape[1] for groups in probe_groups(model, ids).values()] == [1, 2]


def test_a_load_moves_no_bias_of_it():
    model = focus(config=CONFIG)
    loads = torch.tensor([[[9, 1, 1, 1], [0, 0, 0, 0]], [[9, 1, 1, 1], [3, 3, 3, 3]]])
    nudge_bias(model, loads, 0.1)
    bias = model.focus_layers()[0].router.bias
    assert bias[-1, 0].abs().max() > 0 and bias[:, 1].abs().max() == 0


@pytest.mark.parametrize("how", ["random", "pca_kmeans", "spectral", "heads", "coverage"])
def test_it_stays_dense_whatever_starts_the_routers(how):
    model, ids = focus(config=CONFIG), tokens(4, 64)
    options = {"steps": 6, "budget": 0.5, "output_steps": 2} if how == "coverage" else {}
    fit = start_routers(model, ids, how, **options)
    routing = observe_routing(model, ids)[0]
    assert routing.query_groups[:, 1].eq(0).all() and routing.key_groups[:, 1].eq(0).all()
    assert routing.key_groups[:, 0].unique().numel() > 1
    if fit is not None:
        assert fit.layers[0].far_pairs_kept > 0.5  # all of the dense head's among them
        assert fit.layers[0].largest_group == pytest.approx(group_shares(routing.key_groups, 4)[0].max().item())


def test_the_budget_of_a_start_is_for_the_heads_that_choose():
    ids = tokens(4, 96)
    kept = []
    for config in (CONFIG, WITHOUT):
        model = focus(config=config)
        start_routers(model, ids, "coverage", steps=120, budget=0.4)
        with torch.no_grad(), opened(model), model.record_stats() as stats:
            model(ids)
        kept.append(stats.per_layer[0].pairs_kept)
    assert kept[0] == pytest.approx(kept[1], abs=1e-6)  # the other head is fitted as if it were alone


@pytest.mark.parametrize("output_steps", [0, 40])
def test_what_a_start_may_keep_is_not_what_the_dense_head_keeps(output_steps):
    """Both fits aim at the budget with the other head, and see the dense one open."""
    model, ids = focus(config=CONFIG), tokens(4, 96)
    options = {"output_steps": output_steps, "output_learning_rate": 0.05}
    fit = start_routers(model, ids, "coverage", steps=80, budget=0.4, largest_group=1.0, **options)
    with torch.no_grad(), model.record_stats() as stats:
        model(ids)
    assert 2 * stats.per_layer[0].pairs_kept - 1 == pytest.approx(0.38, abs=0.03)
    assert output_steps == 0 or fit.layers[0].lost < 0.5


def test_budgets_are_shared_by_what_routed_heads_have_to_lose():
    ids = tokens(4, 96)
    worth = [layer_sensitivity(focus(config=config), ids) for config in (CONFIG, WITHOUT)]
    assert worth[0][0] < worth[1][0] and worth[0][1] == pytest.approx(worth[1][1].item(), rel=1e-5)


@pytest.mark.parametrize(("query_k", "key_k"), [(1, 1), (2, 2), (3, 2)])
def test_training_counts_the_pairs_of_a_dense_head_once(query_k, key_k):
    config = dataclasses.replace(CONFIG, num_groups=8, query_top_k=query_k, key_top_k=key_k)
    model, ids = focus(config=config), tokens(length=96)
    with torch.no_grad():
        kept = training_step(model, ids, options=StepOptions(objective="lm")).measures["pairs_kept"].item()
    count = PairCount(read_packing(ids, None, None), Pattern(8, 3, 1))
    shares = []
    for at, routing in observe_routing(model, ids).items():
        query, key = (torch.nn.functional.one_hot(side, 8).sum(-2).float() for side in routing[:2])
        for head in range(2):
            dense = (at, head) == (0, 1)
            shares.append(1.0 if dense else count.share(query[:, head, None], key[:, head, None]).item())
    assert kept == pytest.approx(sum(shares) / 4, rel=1e-5)


def test_nothing_of_it_is_saved_and_a_model_may_be_offloaded():
    for config in (CONFIG, WITHOUT):
        model, ids = focus(config=config), tokens(length=40)
        before = logits(model, ids)
        names = {name.rsplit(".", 1)[-1] for name in model.focus_layers()[0].state_dict()}
        assert names == {"projection", "centroids", "bias"}
        cpu_offload(model.base_model, execution_device=torch.device("cpu"), offload_buffers=True)
        torch.testing.assert_close(logits(model, ids), before, **EXACT)


def test_compared_and_described_are_the_heads_that_choose():
    ids = tokens(length=96)
    model, tokenizer = focus(config=dataclasses.replace(CONFIG, dense_heads=((1, 0),))), tokenizer_with_bos()[0]
    figures = measure(model, None, ids, window=3)
    assert figures.worst_dominance < 0.9
    seen = describe_groups(model, ids, tokenizer)
    assert seen["layer"] == 1 and seen["router"] == 1 and seen["confidence"] < 0.9
    sample = take_sample(model, tokenizer, ids)
    assert RoutingSample.from_dict(sample.to_dict()).layers[1].dense_heads == (0,)
    dense = [[router["dense"] for router in layer["routers"]] for layer in describe_sampled(sample, None)]
    assert dense == [[False, False], [True, False]]
    alone = RoutingSample(sample.length, 4, sample.pieces, {1: _cut(sample.layers[1], [1])})
    assert compare_domains(sample, sample)[1] == compare_domains(alone, alone)[0]


def _cut(layer, routers):
    return SampledLayer(layer.query[routers], layer.key[routers])


def _scores(model, ids):
    seen = {}
    with torch.no_grad(), model.override_routing(lambda at, routing: seen.setdefault(at, routing)):
        model(ids)
    return [seen[at] for at in sorted(seen)]


def test_an_adapter_brings_its_dense_heads_along(tmp_path):
    model, ids = focus(config=CONFIG), tokens(length=40)
    model.save_pretrained(tmp_path)
    again = FocusModel.from_pretrained(tiny_model(), tmp_path)
    assert again.focus_config == CONFIG and again.focus_config.dense_heads == ((0, 1),)
    torch.testing.assert_close(logits(again, ids), logits(model, ids), **EXACT)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (3, TypeError),
        ((3,), TypeError),
        (((1, 2, 3),), TypeError),
        ((("a", 0),), TypeError),
        (((0, True),), TypeError),
        (((0, -1),), ValueError),
    ],
)
def test_what_is_no_pair_of_a_layer_and_a_head_is_named(value, error):
    with pytest.raises(error, match=r"`dense_heads`.*\[\[18, 2\]\]"):
        FocusConfig(dense_heads=value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dense_heads": ((7, 0),)}, r"layer 7.*has 2"),
        ({"dense_heads": ((0, 2),)}, r"head 2 of layer 0.*has 2"),
        ({"dense_heads": ((0, 0), (0, 1))}, r"every head of layer 0.*`dense_layers`"),
        ({"dense_layers": (0,)}, r"layer 0.*not routed"),
        ({"router_scope": "layer"}, r"`dense_heads`.*router_scope"),
        ({"routing": "paper_leaky"}, r"`dense_heads`.*paper_leaky"),
    ],
)
def test_heads_that_cannot_be_dense_are_refused_and_the_model_untouched(changes, match):
    model = tiny_model()
    with pytest.raises(ValueError, match=match):
        get_focus_model(model, dataclasses.replace(CONFIG, **changes))
    assert not any(module._forward_pre_hooks for module in model.modules())
