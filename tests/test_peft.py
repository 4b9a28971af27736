"""peft's LoRA and Focus on one model, in both orders."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import SPARSE, tiny_model, tokens

from focus_attn import FocusModel, get_focus_model

pytestmark = pytest.mark.filterwarnings("ignore:this input of")
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def with_live_lora(model):
    """LoRA starts as the identity; make it count."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return model


def trainable(model):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return {"focus" if ".focus." in name else "lora" if "lora_" in name else "base" for name in names}


def train_once(model, ids):
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    return {"focus" if ".focus." in name else "lora" for name, p in model.named_parameters() if p.grad is not None}


def test_focus_on_a_peft_model_trains_both():
    ids = tokens()
    lora = with_live_lora(get_peft_model(tiny_model(), LoraConfig(**LORA)))
    dense = logits(lora, ids)
    model = get_focus_model(lora, SPARSE)
    assert trainable(model) == {"focus", "lora"}
    assert train_once(model, ids) == {"focus", "lora"}
    with model.disable_focus():
        assert torch.equal(logits(model.eval(), ids), dense)
    assert model.unload() is lora
    assert trainable(lora) == {"lora"}
    assert torch.equal(logits(lora.eval(), ids), dense)


def test_peft_on_a_focus_model_freezes_the_routers_and_says_so():
    ids = tokens()
    focus = get_focus_model(tiny_model(), SPARSE)
    sparse = logits(focus, ids)
    model = get_peft_model(focus, LoraConfig(**LORA))
    assert torch.equal(logits(model.eval(), ids), sparse)
    assert trainable(model) == {"lora"}
    with pytest.warns(UserWarning, match=r"unfreeze_routers\(\).*modules_to_save=\[\"focus\"\]"):
        assert train_once(model, ids) == {"lora"}
    model.unfreeze_routers()
    assert trainable(model) == {"focus", "lora"}
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train_once(model, ids) == {"focus", "lora"}


def test_peft_can_train_the_routers_as_modules_to_save(tmp_path):
    ids = tokens()
    focus = get_focus_model(tiny_model(), SPARSE)
    sparse = logits(focus, ids)
    model = get_peft_model(focus, LoraConfig(**LORA, modules_to_save=["focus"]))
    assert torch.equal(logits(model.eval(), ids), sparse)
    assert trainable(model) == {"focus", "lora"}
    assert train_once(model, ids) == {"focus", "lora"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ".focus." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    changed = logits(model.eval(), ids)
    assert not torch.equal(changed, sparse)
    focus.save_pretrained(tmp_path)  # what peft trained is what is saved
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), sparse)
    assert torch.equal(logits(FocusModel.from_pretrained(tiny_model(), tmp_path), ids), changed)
    with focus.disable_focus():
        assert torch.equal(logits(model, ids), logits(tiny_model(), ids))


def test_all_linear_leaves_the_routers_alone():
    focus = get_focus_model(tiny_model(), SPARSE)
    model = get_peft_model(focus, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert not any("lora" in name and ".focus." in name for name, _ in model.named_parameters())


def test_lora_dropout_is_alive_in_training_and_the_base_is_not():
    lora = get_peft_model(tiny_model(attention_dropout=0.5), LoraConfig(**LORA, lora_dropout=0.5))
    model, ids = get_focus_model(with_live_lora(lora), SPARSE), tokens()
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    model.eval()
    assert torch.equal(logits(model, ids), logits(model, ids))


@pytest.mark.parametrize("order", ["focus-first", "peft-first"])
def test_generation(order):
    ids = tokens(length=30)
    if order == "focus-first":
        model = get_peft_model(get_focus_model(tiny_model(), SPARSE), LoraConfig(**LORA))
    else:
        model = get_focus_model(get_peft_model(tiny_model(), LoraConfig(**LORA)), SPARSE)
    with_live_lora(model).eval()
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(input_ids=ids, **settings)
    assert torch.equal(cached, model.generate(input_ids=ids, use_cache=False, **settings))


@pytest.mark.parametrize("name", ["default", "mine"])
def test_peft_reads_back_the_routers_that_it_saved(tmp_path, name):
    ids = tokens()
    focus = get_focus_model(tiny_model(), SPARSE, name)
    model = get_peft_model(focus, LoraConfig(**LORA, modules_to_save=["focus"]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(get_focus_model(tiny_model(), SPARSE, name), tmp_path)
    assert torch.equal(logits(again.eval(), ids), logits(model.eval(), ids))
