"""Every architecture through the same checks: exact where nothing is pruned, causal, cached = recomputed, removable."""

from __future__ import annotations

import pytest
import torch
from tiny import ARCHITECTURES, EXACT, SPARSE, logits, tiny_model, tokens
from transformers import DynamicCache, StaticCache

from focus_attn import FocusConfig, get_focus_model
from focus_attn.hf import TESTED_MODEL_TYPES

pytestmark = pytest.mark.filterwarnings("ignore:this input of")
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
LENGTH = 48


def test_the_list_of_tested_architectures_is_the_list_tested():
    assert set(ARCHITECTURES) == TESTED_MODEL_TYPES


@architectures
def test_k_equals_K(architecture):
    """Every query looks into every group: plain attention, through routers and caches."""
    base, ids = tiny_model(architecture), tokens(length=LENGTH)
    expected = logits(base, ids)
    model = get_focus_model(base, FocusConfig(num_groups=4, query_top_k=4, window=2, num_sinks=0))
    torch.testing.assert_close(logits(model, ids), expected, **EXACT)


@architectures
def test_window_covers_everything(architecture):
    base, ids = tiny_model(architecture), tokens(length=LENGTH)
    expected = logits(base, ids)
    model = get_focus_model(base, FocusConfig(window=LENGTH - 1, num_sinks=0))
    torch.testing.assert_close(logits(model, ids), expected, **EXACT)


@architectures
def test_sparse_attention_differs_from_dense(architecture):
    base, ids = tiny_model(architecture), tokens(length=LENGTH)
    expected = logits(base, ids)
    actual = logits(get_focus_model(base, SPARSE), ids)
    assert (actual - expected).abs().max() > 0.05 * expected.abs().max()
    # Inside the window and the sink nothing is pruned.
    torch.testing.assert_close(actual[:, : SPARSE.window + 2], expected[:, : SPARSE.window + 2], **EXACT)


@architectures
def test_left_padding_changes_nothing(architecture):
    model, ids = get_focus_model(tiny_model(architecture), SPARSE), tokens(length=LENGTH)
    expected = logits(model, ids[:1, 10:])
    padded = ids.clone()
    padded[0, :10] = 0
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
    extra = {} if architecture == "opt" else {"position_ids": position_ids}  # opt counts them itself
    actual = logits(model, padded, attention_mask=mask, **extra)
    torch.testing.assert_close(actual[:1, 10:], expected, **EXACT)


@architectures
def test_disable_focus_is_the_base_model_bit_for_bit(architecture):
    for implementation in ("eager",) if architecture in ("gpt_oss", "gemma2") else ("eager", "sdpa"):
        base, ids = tiny_model(architecture, implementation), tokens(length=LENGTH)
        expected = logits(base, ids)
        model = get_focus_model(base, SPARSE)
        sparse = logits(model, ids)
        with model.disable_focus():
            assert torch.equal(logits(model, ids), expected)
            with model.disable_focus():
                assert torch.equal(logits(model, ids), expected)
            assert torch.equal(logits(model, ids), expected)
        assert torch.equal(logits(model, ids), sparse)
        with pytest.raises(RuntimeError, match="mine"), model.disable_focus():
            raise RuntimeError("mine")
        assert torch.equal(logits(model, ids), sparse)


@architectures
def test_unload_is_the_base_model_bit_for_bit(architecture):
    base, ids = tiny_model(architecture), tokens(length=LENGTH)
    expected, names = logits(base, ids), list(base.state_dict())
    modules, implementation = dict(base.named_modules()), base.config._attn_implementation
    frozen = next(base.parameters())
    frozen.requires_grad_(False)
    model = get_focus_model(base, SPARSE)
    logits(model, ids)
    assert not any(p.requires_grad for name, p in base.named_parameters() if ".focus." not in name)
    unloaded = model.unload()
    assert unloaded is base
    assert torch.equal(logits(unloaded, ids), expected)
    assert list(base.state_dict()) == names
    assert dict(base.named_modules()) == modules
    assert base.config._attn_implementation == implementation
    assert not any(module._forward_pre_hooks for module in modules.values())
    assert not any("focus" in name for module in modules.values() for name in vars(module))
    assert [p.requires_grad for p in base.parameters()].count(False) == 1
    assert not frozen.requires_grad


@architectures
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_no_leak(architecture, mode):
    """Changing token t + 1 changes no logit up to t, also in a forward that trains through hard routing."""
    model = get_focus_model(tiny_model(architecture), SPARSE)
    model.train(mode == "train")
    changed_at = 30
    ids = tokens(length=LENGTH)
    other = ids.clone()
    other[:, changed_at] = (other[:, changed_at] + 1) % 90 + 3
    before, after = model(ids).logits, model(other).logits  # with gradients, so that train mode takes its own path
    # A backend may sum in another order when later tokens move its blocks: rounding, a thousand times below a leak.
    torch.testing.assert_close(before[:, :changed_at], after[:, :changed_at], **EXACT)
    assert (before[:, changed_at:] - after[:, changed_at:]).abs().max() > 0.01


@architectures
def test_train_mode_computes_the_same_function_and_trains_the_routers(architecture):
    model, ids = get_focus_model(tiny_model(architecture), SPARSE), tokens(length=LENGTH)
    expected = logits(model, ids)
    output = model.train()(ids, labels=ids)
    torch.testing.assert_close(output.logits, expected, **EXACT)
    output.loss.backward()
    for layer in model.focus_layers():
        if layer.router is not None:
            assert layer.router.projection.grad.abs().sum() > 0
            assert layer.router.centroids.grad.abs().sum() > 0
    assert all(p.grad is None for name, p in model.named_parameters() if ".focus." not in name)


@architectures
def test_gradient_checkpointing_gives_the_same_gradients(architecture):
    model, ids = get_focus_model(tiny_model(architecture), SPARSE), tokens(length=LENGTH)
    model.train()
    expected = router_gradients(model, ids)
    model.gradient_checkpointing_enable()
    assert all(not module.training for name, module in model.base_model.named_modules() if name.endswith("attn"))
    actual = router_gradients(model, ids)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def router_gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


@architectures
@pytest.mark.parametrize("sliding_layers", ["keep", "intersect"])
def test_cached_equals_recomputed(architecture, sliding_layers):
    """Prefill = chunked prefill = step by step = static cache, with padding."""
    config = FocusConfig(num_groups=4, query_top_k=2, window=2, num_sinks=1, sliding_layers=sliding_layers)
    model, ids = get_focus_model(tiny_model(architecture), config), tokens(length=LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    expected = logits(model, ids, attention_mask=mask)

    def through(cache, *lengths):
        outputs, start = [], 0
        for length in lengths:
            stop = start + length
            out = logits(model, ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            outputs.append(out)
            start = stop
        assert start == LENGTH
        return torch.cat(outputs, 1)

    real = mask.bool()
    for cache, lengths in [
        (DynamicCache(config=model.config), [LENGTH]),
        (DynamicCache(config=model.config), [20, 13, 1, 14]),
        (DynamicCache(config=model.config), [30] + [1] * 18),
        (DynamicCache(), [1] * LENGTH),
        (StaticCache(config=model.config, max_cache_len=LENGTH + 8), [LENGTH]),
        (StaticCache(config=model.config, max_cache_len=LENGTH + 8), [9, 17] + [1] * 22),
    ]:
        torch.testing.assert_close(through(cache, *lengths)[real], expected[real], **EXACT)


@architectures
def test_bf16_flips_few_ids(architecture, capsys):
    """In bf16 a cached forward may round a hidden state otherwise, and an id flips where two groups are level."""
    model, ids = get_focus_model(tiny_model(architecture).to(torch.bfloat16), SPARSE), tokens(length=LENGTH)
    whole = collect_ids(model, lambda: logits(model, ids))
    cache = DynamicCache(config=model.config)
    steps = collect_ids(model, lambda: [logits(model, ids[:, t : t + 1], past_key_values=cache) for t in range(LENGTH)])
    same = torch.cat([(whole[layer] == steps[layer]).flatten() for layer in whole])
    with capsys.disabled():
        flipped = 100 * (1 - same.float().mean().item())
        print(f"\nbf16, {architecture}: {flipped:.2f} % of key ids flip between prefill and decode")
    assert same.float().mean() > 0.9


def collect_ids(model, run):
    """Key ids by layer, [B, R, T, k], of all forwards together."""
    seen: dict[int, list[torch.Tensor]] = {}

    def watch(layer_idx, routing):
        seen.setdefault(layer_idx, []).append(routing.key_groups)
        return routing

    with model.override_routing(watch):
        run()
    return {layer_idx: torch.cat(parts, 2) for layer_idx, parts in seen.items()}


@architectures
def test_packed_sequences_do_not_meet(architecture):
    """Two sequences in one row, told apart by position ids that restart."""
    if architecture in ("opt", "falcon", "gpt_oss"):
        pytest.skip("transformers does not separate packed sequences in this architecture either")
    model, ids = get_focus_model(tiny_model(architecture), SPARSE), tokens(batch=1, length=LENGTH)
    position_ids = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None]
    packed = logits(model, ids, position_ids=position_ids, use_cache=False)
    first, second = logits(model, ids[:, :20]), logits(model, ids[:, 20:])
    torch.testing.assert_close(packed, torch.cat([first, second], 1), **EXACT)


@architectures
def test_output_attentions_is_refused(architecture):
    model, ids = get_focus_model(tiny_model(architecture), SPARSE), tokens()
    with pytest.raises(ValueError, match="output_attentions"):
        logits(model, ids, output_attentions=True)


@architectures
def test_stats_count_every_layer(architecture):
    model, ids = get_focus_model(tiny_model(architecture), SPARSE), tokens(length=LENGTH)
    with model.record_stats() as stats:
        logits(model, ids)
    assert [layer.layer_idx for layer in stats.per_layer] == list(range(model.config.num_hidden_layers))
    for layer, kind in zip(stats.per_layer, model.focus_layers(), strict=True):
        assert (layer.dominance is None) == (kind.router is None)
    assert 0.2 < stats.pairs_kept < 0.9
