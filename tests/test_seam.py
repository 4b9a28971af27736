"""The seam with transformers: what is refused and how, what is said, masks, layers that are left alone."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from tiny import EXACT, SPARSE, focus, logits, tiny_config, tiny_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from focus_attn import FocusConfig, get_focus_model
from focus_attn.mask import focus_mask, read_mask

quiet = pytest.mark.filterwarnings("ignore:this input of")


# What is refused


def refuse(model, match):
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=match):
        get_focus_model(model, SPARSE)
    assert list(model.state_dict()) == names
    assert all(p.requires_grad for p in model.parameters())


def test_an_encoder_is_refused():
    refuse(AutoModelForMaskedLM.from_config(tiny_config("bert", tie_word_embeddings=True)), "is an encoder")


def test_an_encoder_decoder_is_refused():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    refuse(AutoModelForSeq2SeqLM.from_config(tiny_config("t5", tie_word_embeddings=True, **sizes)), "encoder-decoder")


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("falcon", {"alibi": True}),
        ("bloom", {"n_head": 4}),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    ],
)
def test_alibi_is_refused(architecture, changes):
    refuse(AutoModelForCausalLM.from_config(tiny_config(architecture, **changes)), "ALiBi")


def test_a_model_that_does_not_use_the_interface_is_refused():
    model = AutoModelForCausalLM.from_config(tiny_config("gptj", n_embd=32, n_head=4, n_layer=2, rotary_dim=4))
    refuse(model, "does not use transformers' attention interface")


def test_a_model_without_attention_is_refused():
    model = AutoModelForCausalLM.from_config(tiny_config("mamba", state_size=4, tie_word_embeddings=True))
    refuse(model, "no attention modules")


def test_a_model_that_chooses_its_keys_itself_is_refused():
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    config = tiny_config("deepseek_v32", first_k_dense_replace=2, **sizes, **experts)
    refuse(AutoModelForCausalLM.from_config(config), "chooses by itself which keys")


def test_cross_attention_is_refused():
    refuse(AutoModelForCausalLM.from_config(tiny_config("gpt2", add_cross_attention=True)), "cross-attention")


@pytest.mark.parametrize("thing", [None, nn.Linear(2, 2), "gpt2"])
def test_something_that_is_no_model_is_refused(thing):
    with pytest.raises(TypeError, match="causal LM"):
        get_focus_model(thing, SPARSE)


def test_a_wrong_config_or_name_is_refused_and_the_model_untouched():
    model = tiny_model()
    with pytest.raises(TypeError, match="FocusConfig"):
        get_focus_model(model, {"window": 3})
    with pytest.raises(ValueError, match="without dots"):
        get_focus_model(model, SPARSE, adapter_name="a.b")
    with pytest.raises(ValueError, match=r"dense_layers.*7.*2"):
        get_focus_model(model, FocusConfig(dense_layers=(0, 7)))
    assert all(p.requires_grad for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_focus_twice_is_refused():
    model = tiny_model()
    focus_model = get_focus_model(model, SPARSE)
    for target in (model, focus_model):
        with pytest.raises(ValueError, match="already has Focus"):
            get_focus_model(target, SPARSE)
    get_focus_model(focus_model.unload(), SPARSE)


def test_models_that_share_a_config_object_are_told_so():
    first = tiny_model()
    second = type(first)(first.config).eval()
    model = get_focus_model(first, SPARSE)
    with pytest.raises(ValueError, match="a config of its own"):
        second(tokens())
    with pytest.raises(ValueError, match="another model with Focus on it shares this model's config"):
        get_focus_model(second, SPARSE)
    assert not hasattr(second.model.layers[0].self_attn, "focus")
    model.unload()
    assert torch.isfinite(logits(second, tokens())).all()


def test_attention_that_is_given_more_than_focus_knows_is_refused(monkeypatch):
    model, ids = focus(), tokens()
    real = model.base_model.model.layers[1].self_attn
    forward = type(real).forward

    def biased(self, *args, **kwargs):
        return forward(self, *args, **{**kwargs, "position_bias": torch.ones(1)})

    monkeypatch.setattr(type(real), "forward", biased)
    with pytest.raises(ValueError, match="position_bias"):
        model(ids)


def test_a_config_that_was_taken_from_a_model_with_focus_is_as_good_as_any():
    first = get_focus_model(tiny_model(), SPARSE)
    second = type(first.base_model)(copy.deepcopy(first.config)).eval()
    model = get_focus_model(second, SPARSE)
    with model.disable_focus():
        assert model.config._attn_implementation == "sdpa"
    assert torch.isfinite(logits(model.unload(), tokens())).all()
    config = first.config
    del first
    gc.collect()
    get_focus_model(type(second)(config), SPARSE)


@quiet
def test_a_custom_mask_is_refused():
    model, ids = focus(), tokens(length=12)
    for mask in (torch.ones(2, 1, 12, 12, dtype=torch.bool), torch.zeros(2, 1, 12, 12)):
        with pytest.raises(ValueError, match=r"custom attention mask.*2-D"):
            logits(model, ids, attention_mask=mask)


def test_a_prefix_lm_is_refused():
    config, embeddings = copy.copy(tiny_model().config), torch.zeros(1, 8, 32)
    config._attn_implementation_internal = "focus"
    focus("llama")  # registers the mask function

    def make(**kwargs):
        return create_causal_mask(config, embeddings, None, None, **kwargs)

    def prefix(batch, head, query, key):
        return key < 4

    with pytest.raises(ValueError, match="not plainly causal"):
        make(or_mask_function=prefix)
    with pytest.raises(ValueError, match="not plainly causal"):
        make(block_sequence_ids=torch.tensor([[-1, 0, 0, 0, -1, -1, -1, -1]]))
    config.is_causal = False
    with pytest.raises(ValueError, match="not plainly causal"):
        make()


@quiet
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon"])
def test_attention_dropout_is_refused_and_focus_keeps_it_away(architecture):
    model, ids = focus(architecture, attention_dropout=0.1, attn_pdrop=0.1), tokens()
    model.train()
    assert not model.base_model.training
    model(ids, labels=ids).loss.backward()
    if architecture != "falcon":  # whose rotary attention knows no dropout
        model.base_model.train()
        with pytest.raises(ValueError, match=r"dropout of 0.1.*eval"):
            model(ids)


def test_output_attentions_is_refused_in_generation():
    model, ids = focus(), tokens(length=8)
    with pytest.raises(ValueError, match="output_attentions"):
        model.generate(ids, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2)


@quiet
def test_changing_the_attention_implementation_under_focus_is_refused():
    model, ids = focus(), tokens()
    dense = logits(tiny_model(), ids)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"'sdpa' under Focus.*disable_focus"):
        logits(model, ids)
    model.set_attn_implementation("focus")
    with model.disable_focus():
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(logits(model, ids), dense, **EXACT)
    assert (logits(model, ids) - dense).abs().max() > 0.1
    assert model.unload().config._attn_implementation == "sdpa"


def test_the_implementation_without_routers_is_refused():
    focus()  # registers it
    model = tiny_model()
    model.set_attn_implementation("focus")
    with pytest.raises(ValueError, match="get_focus_model"):
        logits(model, tokens())


# What is said


def test_a_tested_architecture_is_silent_and_an_untested_one_says_so_once():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        focus("llama")
        logits(focus("llama"), tokens())
    ids = tokens()
    base = tiny_model("starcoder2", num_key_value_heads=2, sliding_window=None)
    expected = logits(base, ids)
    with pytest.warns(UserWarning, match="not been tested on Starcoder2ForCausalLM") as caught:
        model = get_focus_model(base, FocusConfig(num_groups=4, query_top_k=4, window=3))
        torch.testing.assert_close(logits(model, ids), expected, **EXACT)
    assert len(caught) == 1


def test_a_short_input_is_hinted_at_once():
    model = focus(config=FocusConfig(window=32))
    with pytest.warns(UserWarning, match=r"20 tokens.*window \(32\)") as caught:
        logits(model, tokens(length=20))
        logits(model, tokens(length=20))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(focus(config=FocusConfig(window=32)), tokens(length=34))
        focus(config=FocusConfig(window=32)).generate(tokens(length=5), max_new_tokens=2, pad_token_id=0)


def test_a_leak_is_announced_once_and_real():
    config = FocusConfig(num_groups=4, window=3, num_sinks=0, routing="paper_leaky")
    model, ids = focus(config=config), tokens(length=64)
    other = ids.clone()
    other[:, 40:] = tokens(length=24, seed=7)
    with pytest.warns(UserWarning, match=r"paper_leaky.*later tokens") as caught:
        before, after = logits(model, ids), logits(model, other)
    assert len(caught) == 1
    assert not torch.equal(before[:, :40], after[:, :40])


def test_a_soft_gate_from_sinkhorn_leaks_in_training_only():
    model, ids = focus(config=FocusConfig(num_groups=4, window=3, gate="additive")), tokens(length=48)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hard = logits(model, ids)
    model.train()
    with pytest.warns(UserWarning, match="Sinkhorn lets"):
        soft = model(ids).logits
    assert (soft - hard).abs().max() > 0.1
    model.eval()
    assert torch.equal(logits(model, ids), hard)


def test_leaky_routing_ignores_padding():
    config = FocusConfig(num_groups=4, window=3, num_sinks=0, routing="paper_leaky")
    model, ids = focus(config=config), tokens(length=40)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with pytest.warns(UserWarning, match="later"):
        alone = logits(model, ids[:1, 9:])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    torch.testing.assert_close(logits(model, ids, attention_mask=mask, position_ids=positions)[:1, 9:], alone, **EXACT)


# Masks


def test_the_mask_counts_real_tokens():
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    where = read_mask(focus_mask(2, 5, 5, attention_mask=padding), 5, 5)
    assert where.key_positions.tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert torch.equal(where.query_positions, where.key_positions)
    assert where.query_segments is None


def test_the_mask_of_a_static_cache_leaves_unwritten_slots_out():
    for past in (3, torch.tensor(3)):
        where = read_mask(focus_mask(1, 2, 8, q_offset=past), 2, 8)
        assert where.key_positions.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]]
        assert where.query_positions.tolist() == [[3, 4]]


def test_the_mask_of_a_sliding_cache_counts_from_the_beginning():
    padding = torch.tensor([[0] + [1] * 11], dtype=torch.bool)
    where = read_mask(focus_mask(1, 2, 5, q_offset=10, kv_offset=7, attention_mask=padding), 2, 5)
    assert where.key_positions.tolist() == [[6, 7, 8, 9, 10]]
    assert where.query_positions.tolist() == [[9, 10]]


@pytest.mark.parametrize("sliding", [False, True])
def test_the_mask_tells_packed_sequences_apart(sliding):
    config = copy.copy(tiny_model().config)
    config._attn_implementation_internal, config.sliding_window = "focus", 3
    focus()
    make = create_sliding_window_causal_mask if sliding else create_causal_mask
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    where = read_mask(make(config, torch.zeros(2, 7, 32), None, None, position_ids=positions), 7, 7)
    assert where.key_segments.tolist() == [[0, 0, 0, 1, 1, 1, 1], [0] * 7]
    assert torch.equal(where.key_positions.long(), positions)
    plain = make(config, torch.zeros(2, 7, 32), None, None, position_ids=torch.arange(7)[None])
    assert read_mask(plain, 7, 7).key_segments is None


# Layers that are left alone


def test_dense_and_sliding_layers_own_no_router_and_attend_as_before():
    ids = tokens(length=60)
    base = tiny_model("gemma2")
    expected = logits(base, ids)
    everything = FocusConfig(num_groups=4, query_top_k=4, key_top_k=4, window=2, dense_layers=(1,))
    model = get_focus_model(base, everything)
    assert [layer.router is None for layer in model.focus_layers()] == [True, True, True, False]
    torch.testing.assert_close(logits(model, ids), expected, **EXACT)


@pytest.mark.parametrize(("window", "routed"), [(2, True), (3, False), (128, False)])
def test_short_sliding_windows_are_left_alone(window, routed):
    """The tiny model slides over 24 tokens: more than 8 windows of 2, not more than 8 windows of 3."""
    model = focus("gemma2", FocusConfig(num_groups=4, window=window, sliding_layers="intersect"))
    assert [layer.router is not None for layer in model.focus_layers()] == [routed, True] * 2


def test_intersect_keeps_the_sliding_window():
    """With k = K nothing is pruned, so an intersected layer is the sliding layer it was."""
    ids = tokens(length=60)
    base = tiny_model("mistral", sliding_window=24)
    expected = logits(base, ids)
    config = FocusConfig(num_groups=4, query_top_k=4, window=2, sliding_layers="intersect")
    torch.testing.assert_close(logits(get_focus_model(base, config), ids), expected, **EXACT)


@pytest.mark.parametrize("name", ["a.b", ""])
def test_an_impossible_adapter_name_leaves_the_base_model_as_it_was(name):
    model, ids = tiny_model(), tokens()
    before = logits(model, ids)
    with pytest.raises(ValueError, match="adapter"):
        get_focus_model(model, SPARSE, name)
    assert torch.equal(logits(model, ids), before)


def test_a_failure_while_attaching_leaves_the_base_model_as_it_was(monkeypatch):
    model, ids = tiny_model(), tokens()
    before = logits(model, ids)
    monkeypatch.setattr("focus_attn.router.Router.reset_parameters", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        get_focus_model(model, SPARSE)
    assert torch.equal(logits(model, ids), before)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_with_nothing_to_route_is_refused_with_the_cure():
    with pytest.raises(ValueError, match="sliding_layers"):
        get_focus_model(tiny_model("mistral", sliding_window=8), SPARSE)


@quiet
@pytest.mark.parametrize("name", ["eval", "keys", "default", "of_default"])
def test_any_other_adapter_name_will_do(name):
    model = get_focus_model(tiny_model(), SPARSE, name)
    model.add_adapter("more", SPARSE)
    model.set_adapter("more")
    model.delete_adapter(name)
    assert list(model.adapters) == ["more"] and all(list(x.routers.by_name()) == ["more"] for x in model.focus_layers())


@quiet
def test_fields_of_a_config_that_its_model_does_not_read_change_nothing():
    model, ids = tiny_model(sliding_window=30), tokens(length=40)
    base = logits(model, ids)
    config = FocusConfig(num_groups=4, query_top_k=4, window=3, sliding_layers="intersect")
    torch.testing.assert_close(logits(get_focus_model(model, config), ids), base, **EXACT)
    stray = tiny_model("biogpt", num_key_value_heads=2)
    with pytest.warns(UserWarning, match="not been tested"):
        focused = get_focus_model(stray, SPARSE)
    assert {layer.spec.num_kv_heads for layer in focused.focus_layers()} == {4}
    logits(focused, ids)
