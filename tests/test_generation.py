"""Generation with a cache: same tokens as without one, whatever transformers does to the cache on the way."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from tiny import EXACT, SPARSE, focus, tiny_model, tokens
from transformers import DynamicCache, GenerationConfig, QuantizedCache, StaticCache, cache_utils

from focus_attn import FocusConfig, FocusModel, get_focus_model
from focus_attn.cache import append_group_ids

pytestmark = pytest.mark.filterwarnings("ignore:this input of")
MODELS = ["gpt2", "llama", "gemma2", "falcon", "deepseek_v3"]
models = pytest.mark.parametrize("architecture", MODELS)


def generate(model, ids, **kwargs):
    torch.manual_seed(0)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **settings, **kwargs})


@models
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"do_sample": True, "top_k": 20}, id="sampling"),
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"num_beams": 2, "do_sample": True, "num_return_sequences": 2}, id="beam-sampling"),
        pytest.param({"cache_implementation": "static"}, id="static"),
        pytest.param({"prefill_chunk_size": 7}, id="chunked-prefill"),
        pytest.param({"prefill_chunk_size": 7, "cache_implementation": "static"}, id="chunked-prefill-static"),
        pytest.param({"prompt_lookup_num_tokens": 3}, id="prompt-lookup"),
    ],
)
def test_cached_generation_equals_recomputed(architecture, settings):
    model, ids = focus(architecture), tokens(batch=1 if "prompt_lookup_num_tokens" in settings else 2, length=24)
    plain = {k: v for k, v in settings.items() if k in ("do_sample", "top_k", "num_beams", "num_return_sequences")}
    expected = generate(model, ids, use_cache=False, **plain)
    assert torch.equal(generate(model, ids, **settings), expected)


@models
def test_generation_is_not_that_of_the_dense_model(architecture):
    model, ids = focus(architecture), tokens(length=40)
    sparse = generate(model, ids)
    with model.disable_focus():
        assert not torch.equal(generate(model, ids), sparse)


@models
def test_assisted_generation(architecture):
    model, ids = focus(architecture), tokens(batch=1, length=24)
    assistant = copy.deepcopy(tiny_model(architecture))
    with torch.no_grad():  # an assistant that is right now and then, so that drafts are both kept and cropped
        for parameter in assistant.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    assert torch.equal(generate(model, ids, assistant_model=assistant), generate(model, ids))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "deepseek_v3"])  # others cannot without Focus either
def test_a_model_drafts_with_its_first_layers(architecture):
    model, ids = focus(architecture), tokens(batch=1, length=24)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, assistant_early_exit=1), expected)
    assert torch.equal(generate(model, ids), expected)


@models
def test_left_padded_batch_generates_what_each_row_does_alone(architecture):
    model, ids = focus(architecture), tokens(length=24)
    alone = [generate(model, ids[:1, 6:])[:, -12:], generate(model, ids[1:])[:, -12:]]
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :6], mask[0, :6] = 0, 0
    for settings in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        together = generate(model, padded, attention_mask=mask, **settings)[:, -12:]
        assert torch.equal(together, torch.cat(alone))


@models
def test_a_prefix_cache_can_be_reused(architecture):
    model, ids = focus(architecture), tokens(batch=1, length=40)
    prefix = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=prefix)
    for seed in (1, 2):
        continued = torch.cat([ids[:, :20], tokens(batch=1, length=15, seed=seed)], 1)
        actual = generate(model, continued, past_key_values=copy.deepcopy(prefix))
        assert torch.equal(actual, generate(model, continued, use_cache=False))


def cached(model, ids, cache):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_what_is_done_to_the_cache_is_done_to_the_ids(architecture, lazy):
    model, ids = focus(architecture, FocusConfig(num_groups=4, window=2, sliding_layers="intersect")), tokens(length=30)
    new = tokens(length=3, seed=9)

    def filled(rows=ids):
        cache = DynamicCache() if lazy else DynamicCache(config=model.config)
        cached(model, rows, cache)
        return cache

    def expect(rows, cache, new=new):
        whole = cached(model, torch.cat([rows, new], 1), None)[:, rows.shape[1] :]
        torch.testing.assert_close(cached(model, new, cache), whole, **EXACT)

    cache = filled()
    cache.reorder_cache(torch.tensor([1, 0]))
    expect(ids[[1, 0]], cache)

    cache = filled()
    cache.batch_select_indices(torch.tensor([1]))
    expect(ids[1:], cache, new[:1])

    cache = filled(ids[:1])
    cache.batch_repeat_interleave(2)
    expect(ids[[0, 0]], cache)

    cache = filled(ids[:, :24])
    cache.activate_past_recording()
    cached(model, ids[:, 24:], cache)
    cache.crop(-4)
    expect(ids[:, :-4], cache)

    cache = filled(tokens(length=25, seed=5))
    cache.reset()
    if isinstance(cache.layers[0].keys, torch.Tensor):
        return  # before transformers 5.22 a dynamic cache is zeroed, not emptied
    cached(model, ids, cache)
    expect(ids, cache)


def test_a_static_cache_can_be_reset():
    model, ids = focus(), tokens(length=30)
    cache = StaticCache(config=model.config, max_cache_len=40)
    cached(model, tokens(length=30, seed=3), cache)
    cache.reset()
    torch.testing.assert_close(cached(model, ids, cache), cached(model, ids, None), **EXACT)


def test_id_layers_stand_behind_the_layers_of_the_model():
    model, ids = focus("gemma2"), tokens(length=30)
    dense = DynamicCache(config=model.config)
    with model.disable_focus():
        cached(model, ids, dense)
    cache = DynamicCache(config=model.config)
    cached(model, ids, cache)
    layers = model.config.num_hidden_layers
    assert cache.is_sliding[:layers] == dense.is_sliding
    assert len(cache) == layers + 2  # two of the four layers are routed
    assert cache.get_seq_length() == dense.get_seq_length() == 30
    assert [cache.get_mask_sizes(1, i) for i in range(layers)] == [dense.get_mask_sizes(1, i) for i in range(layers)]
    assert cache.layers[layers].keys.dtype == torch.int64
    assert cache.layers[layers].keys.shape == (2, 2, 30, 1)


@pytest.mark.parametrize("make", [DynamicCache, lambda: None], ids=["lazy", "default"])
def test_a_cache_of_the_dense_model_is_refused(make):
    model, ids = focus(), tokens(length=20)
    with torch.no_grad(), model.disable_focus():
        cache = model(ids, past_key_values=make(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"filled without Focus.*empty cache"):
        cached(model, ids[:, :1], cache)


def test_a_static_cache_of_the_dense_model_is_refused():
    model, ids = focus(), tokens(length=20)
    cache = StaticCache(config=model.config, max_cache_len=30)
    with model.disable_focus():
        cached(model, ids, cache)
    with pytest.raises(ValueError, match="filled without Focus"):
        cached(model, ids[:, :1], cache)


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_that_went_on_without_focus_is_refused(static):
    model, ids = focus(), tokens(length=20)
    cache = StaticCache(config=model.config, max_cache_len=40) if static else DynamicCache(config=model.config)
    cached(model, ids, cache)
    with model.disable_focus():
        cached(model, ids[:, :4], cache)
    with pytest.raises(ValueError, match="in part without Focus"):
        cached(model, ids[:, :1], cache)


@pytest.mark.parametrize(
    "other",
    [SPARSE, FocusConfig(num_groups=4, key_top_k=2, window=3), FocusConfig(window=3, dense_layers=(0,))],
    ids=["same-shape", "more-ids", "other-layers"],
)
def test_a_cache_of_another_adapter_is_refused(other):
    model, ids = focus(), tokens(length=20)
    cache = DynamicCache(config=model.config)
    cached(model, ids, cache)
    model.add_adapter("other", other)
    model.set_adapter("other")
    with pytest.raises(ValueError, match=r"another Focus adapter.*'other'"):
        cached(model, ids[:, :1], cache)


def test_a_cache_of_another_adapter_of_the_same_name_is_refused(tmp_path):
    ids, model = tokens(1, 20), focus()
    model.save_pretrained(tmp_path)
    model, cache = FocusModel.from_pretrained(model.unload(), tmp_path), DynamicCache(config=model.config)
    cached(model, ids, cache)
    again = FocusModel.from_pretrained(model.unload(), tmp_path)  # the same routers: the cache is theirs
    cached(again, ids[:, :1], cache)
    other = get_focus_model(again.unload(), SPARSE)
    with pytest.raises(ValueError, match="another Focus adapter"):
        cached(other, ids[:, :1], cache)


def test_an_offloaded_cache_fetches_the_models_first_layer_after_its_last(monkeypatch):
    """Where transformers would fetch ids, which stay where they are. Its streams are CUDA's: stood in for."""
    model, cache, fetched = focus(), DynamicCache(), []
    monkeypatch.setattr(cache_utils.DynamicLayer, "prefetch", lambda layer: fetched.append(layer))
    cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, True, contextlib.nullcontext()
    layers = model.config.num_hidden_layers
    append_group_ids(cache, model._state.tags["default"], 0, layers, torch.zeros(1, 2, 5, 1, dtype=torch.int64))
    assert len(cache.layers) == 2 * layers
    cache = copy.deepcopy(cache)
    for number in range(layers):
        cache.prefetch(number + 1)
    assert [cache.layers.index(layer) for layer in fetched] == [*range(1, layers), 0]


def test_settings_of_generation_are_the_base_models():
    model = focus()
    model.generation_config = GenerationConfig(max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert model.generate(tokens(1, 20)).shape == (1, 23)
    assert model.base_model.generation_config is model.generation_config


def test_leaky_routing_cannot_go_on_from_a_cache():
    model, ids = focus(config=FocusConfig(num_groups=4, window=3, routing="paper_leaky")), tokens(length=20)
    with pytest.warns(UserWarning, match="later tokens"), torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="use_cache=False"):
        cached(model, ids[:, :1], cache)
    assert generate(model, ids, use_cache=False).shape == (2, 32)


def test_a_quantised_cache_keeps_its_ids_exact():
    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no quantised cache that needs no further package")
    model, ids = focus(), tokens(length=30)
    exact, cache = DynamicCache(), QuantizedCache("fp8", model.config)
    for part in (ids[:, :20], ids[:, 20:]):
        cached(model, part, exact)
        cached(model, part, cache)
    assert torch.equal(cache.layers[-2].keys, exact.layers[-2].keys)  # of the first layer, before any rounding


def test_training_on_a_filled_cache_is_refused():
    model, ids = focus(), tokens(length=20)
    cache = DynamicCache(config=model.config)
    cached(model, ids, cache)
    with pytest.raises(ValueError, match=r"whole sequence.*use_cache=False"):
        model.train()(ids, past_key_values=cache)
    with torch.no_grad():  # generating in train mode is not training
        model(ids[:, :1], past_key_values=cached_cache(model, ids))


def cached_cache(model, ids):
    cache = DynamicCache(config=model.config)
    cached(model, ids, cache)
    return cache


def test_a_cache_that_counts_linear_layers_by_its_length_is_refused():
    cache = DynamicCache()
    cache.linear_cache = []  # as MiniMax's
    with pytest.raises(ValueError, match=r"no room for group ids.*use_cache=False"):
        focus()(tokens(), past_key_values=cache)
