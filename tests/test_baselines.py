"""The seam of the peers: on and off a model, padding, costs counted, budgets met, fits."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny import ARCHITECTURES, EXACT, SPARSE, focus, logits, tiny_model, tokens

from focus_attn import FocusConfig
from focus_attn.baselines import (
    BASELINES,
    FittedBaseline,
    RandomGroups,
    focus_ledger,
    make_baseline,
    use_baseline,
    window_and_sinks,
)
from focus_attn.baselines.budget import attention_shape
from focus_attn.baselines.call import Shape
from focus_attn.baselines.fit import watch_layers
from focus_attn.baselines.full import Full
from focus_attn.baselines.loki import Loki
from focus_attn.baselines.magicpig import MagicPIG
from focus_attn.baselines.routing_transformer import RoutingTransformer
from focus_attn.baselines.window import Window
from focus_attn.baselines.window_sinks import WindowSinks
from focus_attn.evaluation import block_perplexity
from focus_attn.hf import Seam

pytestmark = pytest.mark.filterwarnings("ignore:this input of", "ignore:Focus has not been tested")
MEETS = sorted(set(BASELINES) - {"full", "linformer"})  # those with a knob


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"falcon"}))
def test_full_attention_is_the_model(architecture):
    model, ids = tiny_model(architecture), tokens()
    before = logits(model, ids)
    with use_baseline(model, Full()) as ledger:
        inside = logits(model, ids)
    torch.testing.assert_close(inside, before, **EXACT)
    assert ledger.share == 1.0
    assert torch.equal(logits(model, ids), before)


def test_falcon_is_refused():
    with pytest.raises(ValueError, match="falcon"), use_baseline(tiny_model("falcon"), Full()):
        pass


@pytest.mark.filterwarnings("ignore:linformer")
def test_the_model_is_given_back_after_an_error():
    model, ids = tiny_model(), tokens()
    before, implementation = logits(model, ids), model.config._attn_implementation
    with pytest.raises(ValueError, match="causal LM"), use_baseline(model, make_baseline("linformer")):
        logits(model, ids)
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model, ids), before)


def test_two_models_at_once():
    one, other, ids = tiny_model(), tiny_model("gpt2"), tokens()
    with use_baseline(one, Window(3)) as outer, use_baseline(other, Full()) as inner:
        logits(one, ids)
        logits(other, ids)
    assert outer.share < 0.2
    assert inner.share == 1.0


def test_the_innermost_method_on_a_model_is_the_one_that_runs():
    model, ids = tiny_model(), tokens()
    with use_baseline(model, Window(3)) as outer:
        with use_baseline(model, Full()) as inner:
            logits(model, ids)
        assert not outer.per_layer
        assert inner.share == 1.0
        logits(model, ids)
    assert outer.share < 0.2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["window_sinks", "h2o", "performer"])
def test_padding_is_as_if_it_were_not_there(name, side):
    method = {"window_sinks": WindowSinks(4, 2), "h2o": make_baseline("h2o", heavy=3, recent=3)}.get(
        name, make_baseline(name)
    )
    model, ids = tiny_model(), tokens(2, 40)
    mask = torch.ones_like(ids)
    padding = slice(0, 13) if side == "left" else slice(27, 40)
    mask[0, padding] = 0
    with use_baseline(model, method) as ledger:
        batch = logits(model, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
    real = mask[0].bool()
    with use_baseline(model, method) as alone:
        torch.testing.assert_close(batch[0, real], logits(model, ids[:1, real])[0], **EXACT)
        torch.testing.assert_close(batch[1], logits(model, ids[1:])[0], **EXACT)
    assert ledger.multiply_adds == alone.multiply_adds
    assert ledger.pairs_kept == pytest.approx(alone.pairs_kept)


def test_packed_sequences_are_taken_apart():
    model, ids, method = tiny_model(), tokens(1, 40), WindowSinks(4, 2)
    restart = torch.cat((torch.arange(18), torch.arange(22)))[None]
    with use_baseline(model, method):
        packed = logits(model, ids, position_ids=restart, use_cache=False)
        torch.testing.assert_close(packed[:, :18], logits(model, ids[:, :18]), **EXACT)
        torch.testing.assert_close(packed[:, 18:], logits(model, ids[:, 18:]), **EXACT)


def test_decoding_is_refused():
    model = tiny_model()
    with use_baseline(model, Full()), pytest.raises(ValueError, match="use_cache=False"):
        model.generate(tokens(1, 8), max_new_tokens=3)


def test_generation_without_a_cache():
    model, ids = tiny_model(), tokens(1, 8)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with use_baseline(model, Full()):
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False), expected)


def test_methods_compute_in_their_own_precision_under_autocast():
    """Ids and scores that a method has in fp32 must not come from half precision while a model is tuned under it."""
    seen = []

    class Watching(Full):
        def attend(self, call):
            seen.append((torch.is_autocast_enabled("cpu"), call.q.dtype))
            return super().attend(call)

    model = tiny_model()
    with torch.autocast("cpu", torch.bfloat16), use_baseline(model, Watching()):
        logits(model, tokens())
    assert set(seen) == {(False, torch.bfloat16)}


def test_ledger_against_a_count_by_hand():
    model = tiny_model()  # 2 layers, 4 heads of 8
    with use_baseline(model, Window(window=3)) as ledger:
        logits(model, tokens(2, 10))
    pairs = 1 + 2 + 3 + 7 * 4
    assert ledger.dense_multiply_adds == 2 * 2 * 4 * 55 * 16
    assert ledger.multiply_adds == 2 * 2 * 4 * pairs * 16
    assert ledger.pairs_kept == pytest.approx(pairs / 55)
    assert [layer.layer_idx for layer in ledger.per_layer] == [0, 1]
    with use_baseline(model, Window(window=3)) as both:  # two forwards, weighted by their causal pairs
        logits(model, tokens(1, 10))
        logits(model, tokens(1, 3))
    assert both.pairs_kept == pytest.approx((pairs + 6) / (55 + 6))
    with use_baseline(model, Full()) as empty, pytest.raises(ValueError, match="nothing was counted"):
        _ = empty.pairs_kept


def test_sliding_layers_are_left_alone_and_counted_as_focus_counts_them():
    model, ids = focus("gemma3_text"), tokens()
    with model.record_stats() as stats, model.override_routing(window_and_sinks):
        routed = logits(model, ids)
    with use_baseline(model, WindowSinks(SPARSE.window, SPARSE.num_sinks)) as ledger:
        ours = logits(model, ids)
    torch.testing.assert_close(ours, routed, **EXACT)
    for counted, layer in zip(stats.per_layer, ledger.per_layer, strict=True):
        assert layer.pairs_kept == pytest.approx(counted.pairs_kept)
    sliding = [layer for layer in ledger.per_layer if layer.multiply_adds == layer.dense_multiply_adds]
    assert [layer.layer_idx for layer in sliding] == [0, 2]


def test_sliding_layers_are_left_alone_where_a_sequence_fits_into_their_window():
    """As Focus leaves them, and a method that was fitted on longer text has nothing for them."""
    model = tiny_model("gemma3_text")
    slides = [spec.layer_idx for spec in Seam(model).specs if spec.sliding_window is not None]
    method = make_baseline("routing_transformer", num_clusters=2, window=2)
    method.fit(model, tokens(2, 96))
    short = tokens(1, 6)
    with use_baseline(model, method) as ledger:
        logits(model, short)
    kept = {layer.layer_idx: layer.pairs_kept for layer in ledger.per_layer}
    assert slides and all((kept[layer] == 1.0) == (layer in slides) for layer in kept)


def test_window_and_sinks_in_both_seams_and_in_perplexity():
    model, blocks = focus(), tokens(3, 40, seed=1)
    with model.override_routing(window_and_sinks):
        routed = block_perplexity(model, blocks, window=SPARSE.window)
    with use_baseline(model, WindowSinks(SPARSE.window, SPARSE.num_sinks)) as ledger:
        ours = block_perplexity(model, blocks, window=SPARSE.window)
    assert ours.ppl == pytest.approx(routed.ppl, rel=1e-5)
    assert ledger.pairs_kept == pytest.approx(routed.pairs_kept)
    again = block_perplexity(model, blocks)  # Focus is back
    assert again.pairs_kept is not None


def test_random_groups_in_both_seams():
    """Not the same draw, but the same share of pairs: groups of learned sizes and uniform ones."""
    config = FocusConfig(num_groups=2, window=3, num_sinks=1)
    model = focus(config=config)
    with model.record_stats() as stats, model.override_routing(RandomGroups()):
        logits(model, tokens(4, 64))
    with use_baseline(model, make_baseline("random_groups", num_groups=2, window=3, num_sinks=1)) as ledger:
        logits(model, tokens(4, 64))
    assert ledger.pairs_kept == pytest.approx(stats.pairs_kept, abs=0.1)


def test_focus_is_counted_with_its_routers():
    model, ids = focus(), tokens(1, 40)
    with model.record_stats() as stats:
        logits(model, ids)
    ledger = focus_ledger(model, stats, length=40)
    pair = 4 * 820 * 16
    router = 2 * 2 * SPARSE.num_groups * 32  # sides, KV heads, groups, width of the hidden states
    for layer, counted in zip(ledger.per_layer, stats.per_layer, strict=True):
        routing = router * (40 + SPARSE.router_dim)
        assert layer.multiply_adds == pytest.approx(routing + counted.pairs_kept * pair)
        assert layer.dense_multiply_adds == pair
    assert ledger.pairs_kept == pytest.approx(stats.pairs_kept)


def test_a_method_that_looks_ahead_says_so():
    with pytest.warns(UserWarning, match="later tokens"), use_baseline(tiny_model(), make_baseline("vertical_slash")):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with use_baseline(tiny_model(), Full()):
            pass


@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"linformer", "routing_transformer", "magicpig", "loki"}))
def test_gradients_reach_the_model(name):
    model, ids = tiny_model(), tokens(1, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with use_baseline(model, make_baseline(name)):
            model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


LENGTH = 512
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def wide_model():
    return tiny_model(**WIDE)


@pytest.mark.parametrize("name", MEETS)
@pytest.mark.filterwarnings("ignore:vertical_slash")
def test_budgets_are_met_and_used_up(name, wide_model):
    options = {"magicpig": {"bits": 4, "window": 8}, "h2o": {"chunk": 16}, "bigbird": {"block_size": 8}}.get(name, {})
    options = {"moba": {"block_size": 8}}.get(name, options)
    method = make_baseline(name, budget=0.4, length=LENGTH, model=wide_model, **options)
    if isinstance(method, FittedBaseline):
        method.fit(wide_model, tokens(2, LENGTH, seed=4))
    with use_baseline(wide_model, method) as ledger:
        logits(wide_model, tokens(1, LENGTH, seed=4))
    assert 0.36 < ledger.share <= 0.402


def test_what_cannot_be_reached_is_said():
    for name, options in {"bigbird": {"block_size": 64}, "sparq": {"components": 32}, "magicpig": {}}.items():
        with pytest.raises(ValueError, match=rf"{name} cannot go as low as 2.0%"):
            make_baseline(name, budget=0.02, length=256, **options)
    with pytest.raises(ValueError, match="vertical_slash cannot go as low"):
        make_baseline("vertical_slash", budget=0.02, length=256)
    with pytest.raises(ValueError, match="routing_transformer cannot go as low"):
        make_baseline("routing_transformer", budget=0.02, length=256)


def test_bad_requests_are_answered():
    with pytest.raises(ValueError, match="no baseline 'bigbrid'; there are bigbird"):
        make_baseline("bigbrid")
    with pytest.raises(ValueError, match="has no knob"):
        make_baseline("full", budget=0.2, length=512)
    with pytest.raises(ValueError, match=r"in \(0, 1\], got 20"):
        make_baseline("window", budget=20, length=512)
    with pytest.raises(ValueError, match="needs the `length`"):
        make_baseline("window", budget=0.2)
    for name in ("routing_transformer", "loki", "magicpig"):
        model = tiny_model()
        with use_baseline(model, make_baseline(name)), pytest.raises(ValueError, match=r"call `fit\("):
            logits(model, tokens())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "deepseek_v3", "gemma3_text"])
def test_shapes_are_read_off_the_model(architecture):
    shapes: set[Shape] = set()
    model = tiny_model(architecture)
    watch_layers(model, tokens(1, 48), lambda call: shapes.add(call.shape))
    assert shapes == {attention_shape(model, 48)}


def test_loki_finds_the_principal_axes():
    model, blocks, method = tiny_model(), tokens(3, 32), Loki()
    method.fit(model, blocks)
    keys: list[torch.Tensor] = []
    watch_layers(model, blocks, lambda call: keys.append(call.k[0, 0]) if call.layer_idx == 1 else None)
    seen = torch.cat(keys)  # of one KV head, [96, 8]
    _, _, axes = torch.linalg.svd(seen - seen.mean(0), full_matrices=False)
    torch.testing.assert_close((axes @ method.axes[1][0]).abs(), torch.eye(8), atol=1e-2, rtol=0)


def test_routing_transformer_learns_clusters():
    """Queries and keys lie nearer to the centroids learned than to those the fit began with."""
    model, blocks = tiny_model(), tokens(12, 64)
    distances = {}
    for decay in (1.0, 0.7):  # 1: nothing is learned
        method = RoutingTransformer(num_clusters=4, decay=decay)
        method.fit(model, blocks)
        total = 0.0

        def add(call, method=method):
            nonlocal total
            near = method.directions(call) @ method.centroids[call.layer_idx].transpose(-1, -2)
            total += (1 - near.amax(-1)).mean().item()

        watch_layers(model, blocks, add)
        distances[decay] = total
    assert distances[0.7] < 0.9 * distances[1.0]


def test_routing_transformer_brings_queries_and_keys_together():
    """Queries that all lie on one side and keys on the other still meet: each side is centred on its mean."""
    model, blocks = tiny_model("gpt2"), tokens(4, 64)  # no rotary positions, which would turn what is added here
    width = model.config.n_embd
    for layer in model.transformer.h:
        layer.attn.c_attn.bias.data[:width] += 5
        layer.attn.c_attn.bias.data[width : 2 * width] -= 5
    method = RoutingTransformer(num_clusters=4, window=0)
    method.fit(model, blocks)
    with use_baseline(model, method) as ledger:
        logits(model, blocks)
    assert ledger.pairs_kept > 0.2


def test_routing_transformer_leaves_room_for_the_usual_window():
    method = make_baseline("routing_transformer", budget=0.2, length=8192)
    assert (method.window, method.num_clusters) == (128, 6)  # 3 % and a sixth of the rest
    assert make_baseline("routing_transformer", budget=0.3, length=256).window == 0  # where it would take too much


def test_routing_transformer_adds_clusters_until_they_fit():
    model, blocks = tiny_model(**WIDE), tokens(2, 256, seed=4)
    method = RoutingTransformer(num_clusters=1, budget=0.5)
    method.fit(model, blocks)
    assert method.num_clusters > 1
    with use_baseline(model, method) as ledger:
        logits(model, blocks)
    assert ledger.share <= 0.5


def test_magicpig_centres_on_the_mean_key():
    model, blocks, method = tiny_model(), tokens(2, 32), MagicPIG()
    method.fit(model, blocks)
    keys: list[torch.Tensor] = []
    watch_layers(model, blocks, lambda call: keys.append(call.k[0]) if call.layer_idx == 0 else None)
    torch.testing.assert_close(method.centres[0][:, 0], torch.cat(keys, dim=1).mean(1), atol=1e-5, rtol=1e-5)
