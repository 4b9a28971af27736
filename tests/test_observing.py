"""Looking into a forward: stats, the inputs of attention, and routing put in place of the router's."""

from __future__ import annotations

import pytest
import torch
from tiny import EXACT, SPARSE, focus, logits, tiny_model, tokens

from focus_attn import FocusConfig, get_focus_model
from focus_attn.visibility import Pattern, count_causal_pairs, visible_mask

pytestmark = pytest.mark.filterwarnings("ignore:this input of")


def test_stats_agree_with_the_predicate():
    model, ids = focus("gemma2"), tokens(length=40)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    where, groups = {}, {}

    def watch(layer_idx, routing):
        groups[layer_idx] = routing
        return routing

    with model.observe_attention(lambda inputs: where.update({inputs.layer_idx: inputs.tokens})):
        logits(model, ids, attention_mask=mask)
    with model.record_stats() as stats, model.override_routing(watch):
        logits(model, ids, attention_mask=mask)
    pattern, kept = Pattern(SPARSE.num_groups, SPARSE.window, SPARSE.num_sinks), []
    for layer in stats.per_layer:
        place = where[1]
        causal = count_causal_pairs(place).double()
        if layer.layer_idx in groups:
            routing = groups[layer.layer_idx]
            visible = visible_mask(routing.query_groups, routing.key_groups, place, pattern).sum((-1, -2))
            kept.append((visible / causal[:, None]).mean().item())
            counts = [
                [int((routing.key_groups[:, r][mask.bool()] == g).sum()) for g in range(4)]
                for r in range(routing.key_groups.shape[1])
            ]
            assert layer.group_sizes == counts
            assert layer.dominance == pytest.approx(sum(max(c) / sum(c) for c in counts) / len(counts))
        else:
            near = place.query_positions[:, :, None] - place.key_positions[:, None, :]
            real = (place.query_positions >= 0)[:, :, None] & (place.key_positions >= 0)[:, None, :]
            kept.append((((near >= 0) & (near < 24) & real).sum((-1, -2)) / causal).mean().item())
            assert layer.dominance is None
        assert layer.pairs_kept == pytest.approx(kept[-1])
    assert stats.pairs_kept == pytest.approx(sum(kept) / 4)


@pytest.mark.filterwarnings("ignore:a soft gate")
def test_stats_of_a_soft_forward_are_those_of_serving():
    model, ids = focus(config=FocusConfig(num_groups=4, window=3, gate="additive")), tokens(length=40)
    with model.record_stats() as served:
        logits(model, ids)
    with model.record_stats() as trained:
        model.train()(ids)
    assert trained.per_layer[0] == served.per_layer[0]


def test_stats_of_a_dense_model_are_one_and_of_nothing_an_error():
    model = focus(config=FocusConfig(num_groups=2, query_top_k=2, window=5))
    with model.record_stats() as stats:
        with pytest.raises(ValueError, match="nothing was recorded"):
            _ = stats.pairs_kept
        logits(model, tokens())
    assert stats.pairs_kept == 1.0


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "falcon"])
def test_observing_shows_the_base_models_attention(architecture):
    base, ids = tiny_model(architecture), tokens(length=40)
    expected = logits(base, ids)
    model, seen = get_focus_model(base, SPARSE), {}
    with model.observe_attention(lambda inputs: seen.update({inputs.layer_idx: inputs})):
        torch.testing.assert_close(logits(model, ids), expected, **EXACT)
    assert sorted(seen) == [layer.spec.layer_idx for layer in model.focus_layers() if layer.router is not None]
    for layer_idx, inputs in seen.items():
        assert inputs.hidden.shape == (2, 40, 32)
        assert inputs.q.shape[:3] == (2, 4, 40)
        assert inputs.k.shape[:3] == (2, model.focus_layers()[layer_idx].spec.num_kv_heads, 40)
        assert inputs.scale == pytest.approx(inputs.q.shape[-1] ** -0.5)
        assert inputs.softcap == (5.0 if architecture == "gemma2" else None)
    assert (logits(model, ids) - expected).abs().max() > 0.1  # and only inside


def test_overridden_routing_is_what_is_used():
    base, ids = tiny_model(), tokens(length=40)
    expected = logits(base, ids)
    model = get_focus_model(base, SPARSE)

    def one_group(layer_idx, routing):
        zeros = torch.zeros_like(routing.query_groups)
        return routing._replace(query_groups=zeros, key_groups=zeros)

    with model.override_routing(one_group):
        torch.testing.assert_close(logits(model, ids), expected, **EXACT)
    with pytest.raises(KeyError), model.override_routing(lambda layer_idx, routing: {}[layer_idx]):
        logits(model, ids)
    assert (logits(model, ids) - expected).abs().max() > 0.1
