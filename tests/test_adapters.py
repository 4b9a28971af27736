"""The life of an adapter: made, counted, saved, loaded, switched, deleted; bad files leave the base model untouched."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import SPARSE, VOCAB, focus, opened, tiny_model, tokens
from transformers import GPT2Config, GPT2LMHeadModel

from focus_attn import FocusConfig, FocusModel, get_focus_model
from focus_attn.adapters import CONFIG_FILE, FORMAT_VERSION, WEIGHTS_FILE, read_adapter
from focus_attn.base_sample import sample_of
from focus_attn.version import __version__

pytestmark = pytest.mark.filterwarnings("ignore:this input of")
LORA = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def trained_like(model, seed=3):
    """Routers with values of their own, bias included."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.focus_layers():
        if layer.router is not None:
            for tensor in layer.router.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


@pytest.fixture
def saved(tmp_path):
    model = trained_like(get_focus_model(tiny_model(), SPARSE))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_gpt2_under_the_papers_setting_has_148224_parameters(capsys):
    with torch.device("meta"):
        base = GPT2LMHeadModel(GPT2Config())
    model = get_focus_model(base, FocusConfig.paper(num_groups=4))
    trainable, total = model.get_nb_trainable_parameters()
    assert trainable == 148_224
    model.print_trainable_parameters()
    share = f"{100 * trainable / total:.4f}"
    assert capsys.readouterr().out == f"trainable params: 148,224 || all params: {total:,} || trainable%: {share}\n"


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "falcon"])
def test_save_and_load_are_exact(architecture, tmp_path):
    ids = tokens()
    model = trained_like(get_focus_model(tiny_model(architecture), SPARSE))
    model.save_pretrained(tmp_path / "a")
    loaded = FocusModel.from_pretrained(tiny_model(architecture), tmp_path / "a")
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert loaded.focus_config == SPARSE
    assert loaded.active_adapter == "default"
    again = tmp_path / "b"
    loaded.save_pretrained(again)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert (again / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


def test_only_routers_are_saved_and_the_config_says_what_they_are_for(saved):
    assert sorted(os.listdir(saved)) == [CONFIG_FILE, WEIGHTS_FILE]
    assert set(load_file(saved / WEIGHTS_FILE)) == {
        f"layers.{i}.{name}" for i in (0, 1) for name in ("projection", "centroids", "bias")
    }
    described = json.loads((saved / CONFIG_FILE).read_text())
    assert described["format_version"] == FORMAT_VERSION
    assert described["library_version"] == __version__
    assert described["base_model"] == {"name": "", "model_type": "llama", "hidden_size": 32, "num_layers": 2}
    assert FocusConfig.from_dict(described["config"]) == SPARSE


def test_saving_twice_replaces_and_leaves_no_rubbish(saved):
    model = trained_like(get_focus_model(tiny_model(), SPARSE), seed=8)
    model.save_pretrained(saved)
    assert sorted(os.listdir(saved)) == [CONFIG_FILE, WEIGHTS_FILE]
    loaded = FocusModel.from_pretrained(tiny_model(), saved)
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


def test_saving_onto_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="into a folder"):
        get_focus_model(tiny_model(), SPARSE).save_pretrained(tmp_path / "file")


def edit(**changes):
    def change(folder):
        described = json.loads((folder / CONFIG_FILE).read_text())
        for path, value in changes.items():
            place = described
            *parents, last = path.split("__")
            for parent in parents:
                place = place[parent]
            place[last] = value
        (folder / CONFIG_FILE).write_text(json.dumps(described))

    return change


def rewrite(change):
    """Other tensors under a config that vouches for them."""

    def write(folder):
        import hashlib

        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)
        edit(weights_sha256=hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest())(folder)

    return write


def truncate(name, keep):
    def cut(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return cut


BAD = {
    "no-config": (lambda folder: (folder / CONFIG_FILE).unlink(), "focus_config.json is missing"),
    "no-weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "focus_model.safetensors is missing"),
    "truncated-config": (truncate(CONFIG_FILE, 0.5), "not valid JSON"),
    "truncated-weights": (truncate(WEIGHTS_FILE, 0.9), "not a whole safetensors file"),
    "empty-weights": (truncate(WEIGHTS_FILE, 0), "not a whole safetensors file"),
    "binary-config": (lambda folder: (folder / CONFIG_FILE).write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
    "list-config": (lambda folder: (folder / CONFIG_FILE).write_text("[]"), "expected a JSON object"),
    "peft-config": (lambda folder: (folder / CONFIG_FILE).write_text('{"peft_type": "LORA"}'), "format_version"),
    "newer-format": (edit(format_version=FORMAT_VERSION + 1), "pip install -U focus-attn"),
    "unknown-field": (edit(config__warp=9), "'warp'"),
    "bad-field": (edit(config__window=-1), "`window` must be at least 0"),
    "no-base": (edit(base_model=None), "not a valid Focus config"),
    "other-type": (edit(base_model__model_type="gpt2"), "`model_type` 'gpt2'; this one has 'llama'"),
    "other-width": (edit(base_model__hidden_size=64), "`hidden_size` 64"),
    "other-depth": (edit(base_model__num_layers=3), "`num_layers` 3"),
    "other-weights": (edit(weights_sha256="0" * 64), "copy both again"),
    "other-groups": (edit(config__num_groups=5), r"has shape \[2, 2, 4, 16\], this model needs \[2, 2, 5, 16\]"),
    "missing-tensor": (rewrite(lambda t: t.pop("layers.1.bias")), r"missing \['layers.1.bias'\]"),
    "foreign-tensor": (rewrite(lambda t: t.update(lm_head=torch.zeros(2))), r"unexpected \['lm_head'\]"),
    "wrong-dtype": (rewrite(lambda t: t.update({"layers.0.bias": t["layers.0.bias"].half()})), "float32"),
    "nan": (rewrite(lambda t: t["layers.0.bias"].fill_(torch.nan)), "NaN"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_file_is_a_clear_error_and_the_base_model_untouched(bad, saved):
    spoil, message = BAD[bad]
    spoil(saved)
    base, ids = tiny_model(), tokens()
    before, names = logits(base, ids), list(base.state_dict())
    with pytest.raises(ValueError, match=message):
        FocusModel.from_pretrained(base, saved)
    assert list(base.state_dict()) == names
    assert all(p.requires_grad for p in base.parameters())
    assert base.config._attn_implementation == "eager"
    assert torch.equal(logits(base, ids), before)

    model = get_focus_model(base, SPARSE)
    with pytest.raises(ValueError, match=message):
        model.load_adapter(saved, "bad")
    assert list(model.adapters) == ["default"]
    assert not any("bad" in name for name in model.state_dict())


@pytest.mark.parametrize("source", ["nowhere", "./no/where", "/no/where", "a/b/c"])
def test_a_source_that_is_not_there(source):
    with pytest.raises(ValueError, match="no adapter folder"):
        FocusModel.from_pretrained(tiny_model(), source)


def test_a_hub_name_is_asked_of_the_hub(saved, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repo_id, filename, **options):
        asked.append((repo_id, filename, options))
        return str(saved / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model = FocusModel.from_pretrained(tiny_model(), "someone/adapter", revision="v2")
    assert asked == [("someone/adapter", name, {"revision": "v2"}) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    assert model.focus_config == SPARSE

    def fail(*args, **kwargs):
        raise OSError("the network is down")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match="the network is down"):
        FocusModel.from_pretrained(tiny_model(), "someone/adapter")
    with pytest.raises(TypeError, match="got LlamaForCausalLM"):
        FocusModel.from_pretrained("someone/adapter", tiny_model())


def test_an_adapter_that_could_not_be_pushed_is_saved(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the network is down")

    monkeypatch.setattr(FocusModel, "push_to_hub", fail)
    with pytest.raises(RuntimeError, match=r"is saved in .*was not pushed to 'me/mine': the network is down"):
        focus().save_pretrained(tmp_path, push_to_hub=True, repo_id="me/mine")
    assert read_adapter(tmp_path).config == SPARSE


def test_push_to_hub_uploads_the_two_files(monkeypatch):
    from transformers.utils import hub

    pushed = {}

    def upload(self, folder, repo_id, files_timestamps, **options):
        pushed.update(repo_id=repo_id, files=sorted(os.listdir(folder)))
        return "done"

    class Card:
        def save(self, path):
            Path(path).write_text("a card")

    class Api:
        def create_repo(self, repo_id, **options):
            return type("Repo", (), {"repo_id": repo_id})

    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    monkeypatch.setattr(hub, "hf_api" if hasattr(hub, "hf_api") else "create_repo", lambda *a, **k: Api())
    if not hasattr(hub, "hf_api"):
        monkeypatch.setattr(hub, "create_repo", Api().create_repo)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **options: Card())
    assert get_focus_model(tiny_model(), SPARSE).push_to_hub("someone/adapter") == "done"
    assert pushed == {"repo_id": "someone/adapter", "files": ["README.md", CONFIG_FILE, WEIGHTS_FILE]}


@pytest.mark.parametrize(
    "wrap", [lambda model: model, lambda model: get_peft_model(model, LORA)], ids=["plain", "peft"]
)
def test_an_adapter_trained_with_its_model_fits_that_one_alone(wrap, saved):
    own, other = tiny_model(), tiny_model()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    own.register_buffer("one_number", torch.tensor(0.5))  # files may hold such
    own.save_pretrained(saved / "base_model")
    for same in (own, copy.deepcopy(own).bfloat16()):
        FocusModel.from_pretrained(wrap(copy.deepcopy(same)), saved)
    with pytest.raises(ValueError, match="trained together with its model"):
        FocusModel.from_pretrained(wrap(copy.deepcopy(other)), saved)
    focus = get_focus_model(wrap(other), SPARSE)
    with pytest.raises(ValueError, match="trained together with its model"):
        focus.load_adapter(saved, "another")
    assert focus.active_adapter == "default"


def test_what_is_quantised_says_nothing_of_a_model():
    packed = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    small = torch.nn.Parameter(torch.zeros(8).to(torch.float8_e4m3fn), requires_grad=False)
    assert sample_of([("packed", packed), ("small", small), ("plain", torch.nn.Parameter(torch.ones(2)))]) == {
        "plain": [1.0, 1.0]
    }


def test_several_adapters_on_one_base_model(saved):
    ids, law = tokens(), FocusConfig(num_groups=2, window=5, router_scope="layer")
    model = get_focus_model(tiny_model(), SPARSE)
    default = logits(model, ids)
    model.add_adapter("law", law)
    assert model.active_adapter == "default"
    assert torch.equal(logits(model, ids), default)
    model.set_adapter("law")
    assert (model.active_adapter, model.focus_config) == ("law", law)
    assert not torch.equal(logits(model, ids), default)
    model.load_adapter(saved, "saved")
    model.set_adapter("saved")
    assert torch.equal(logits(model, ids), logits(FocusModel.from_pretrained(tiny_model(), saved), ids))
    model.set_adapter("default")
    assert torch.equal(logits(model, ids), default)
    assert list(model.adapters) == ["default", "law", "saved"]


def test_an_adapter_may_be_served_otherwise(saved, tmp_path):
    ids = tokens(length=40)
    model = FocusModel.from_pretrained(tiny_model(), saved, changes={"window": 5})
    assert model.focus_config == dataclasses.replace(SPARSE, window=5)
    by_hand = trained_like(get_focus_model(tiny_model(), model.focus_config))
    assert torch.equal(logits(model, ids), logits(by_hand, ids)), "the saved routers under the other config"
    model.load_adapter(saved, "plain")
    model.load_adapter(saved, "opened", changes={"dense_heads": [[0, 1]]})
    model.set_adapter("plain")
    plain = logits(model, ids)
    with opened(model, layer=0, head=1):
        expected = logits(model, ids)
    model.set_adapter("opened")
    assert torch.allclose(logits(model, ids), expected, atol=1e-5) and not torch.allclose(plain, expected, atol=1e-3)
    model.save_pretrained(tmp_path / "opened")
    again = FocusModel.from_pretrained(tiny_model(), tmp_path / "opened")
    assert torch.equal(logits(again, ids), logits(model, ids)), "what was changed is saved with it"
    same = FocusModel.from_pretrained(tiny_model(), saved, changes={"router_scope": "kv_head"})
    assert same.focus_config.router_scope == "kv_head", "what `auto` was"


def test_layers_may_be_left_dense_later_and_not_the_other_way(saved, tmp_path):
    opened = FocusModel.from_pretrained(tiny_model(), saved, changes={"dense_heads": [[0, 1], [1, 0]]})
    opened.save_pretrained(tmp_path / "opened")
    model = FocusModel.from_pretrained(tiny_model(), tmp_path / "opened", changes={"dense_layers": [-1]})
    assert model.focus_config.dense_heads == ((0, 1),), "heads of a dense layer need no mention"
    assert [layer.router is None for layer in model.focus_layers()] == [False, True]
    was = load_file(saved / WEIGHTS_FILE)
    now = {f"layers.0.{key}": tensor for key, tensor in model.focus_layers()[0].router.state_dict().items()}
    assert all(torch.equal(was[name], tensor) for name, tensor in now.items())
    model.save_pretrained(tmp_path / "half")
    with pytest.raises(ValueError, match=r"would route layer 1, where this adapter has no router"):
        FocusModel.from_pretrained(tiny_model(), tmp_path / "half", changes={"dense_layers": []})
    with pytest.raises(ValueError, match=r"cannot take \[0, 1\] out of `dense_heads`"):
        FocusModel.from_pretrained(tiny_model(), tmp_path / "opened", changes={"dense_heads": [[1, 0]]})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"windw": 3}, ValueError, "unknown FocusConfig field"),
        ({"window": -1}, ValueError, "window"),
        ({"num_groups": 99}, ValueError, "`changes`.*num_groups.*train"),
        ({"shared_router": True}, ValueError, "`changes`.*shared_router.*train"),
        ({"router_scope": "layer"}, ValueError, "`changes`.*router_scope.*train"),
        ({"dense_heads": [[0, 7]]}, ValueError, "`dense_heads` names head 7 of layer 0"),
        ({"dense_layers": [0, 1]}, ValueError, "would do nothing"),
        ("window", TypeError, "`changes` are fields"),
    ],
)
def test_changes_that_an_adapter_cannot_take(changes, error, words, saved):
    base, ids = tiny_model(), tokens()
    before = logits(base, ids)
    with pytest.raises(error, match=words):
        FocusModel.from_pretrained(base, saved, changes=changes)
    assert torch.equal(logits(base, ids), before) and not hasattr(base.model.layers[0].self_attn, "focus")
    model = FocusModel.from_pretrained(base, saved)
    before = logits(model, ids)
    with pytest.raises(error, match=words):
        model.load_adapter(saved, "more", changes=changes)
    assert set(model.adapters) == {"default"} and torch.equal(logits(model, ids), before)


def test_changes_of_a_bad_file_say_what_is_bad(saved):
    save_file({**load_file(saved / WEIGHTS_FILE), "extra": torch.zeros(1)}, saved / "bad")
    (saved / "bad").replace(saved / WEIGHTS_FILE)
    described = json.loads((saved / CONFIG_FILE).read_text())
    described["weights_sha256"] = hashlib.sha256((saved / WEIGHTS_FILE).read_bytes()).hexdigest()
    (saved / CONFIG_FILE).write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"unexpected \['extra'\]"):
        FocusModel.from_pretrained(tiny_model(), saved, changes={"dense_layers": [1]})


def test_only_the_active_adapter_is_trainable():
    model = get_focus_model(tiny_model(), SPARSE)
    model.add_adapter("law", SPARSE)

    def trainable():
        return {re.search(r"routers\.of_(\w+)", name)[1] for name, p in model.named_parameters() if p.requires_grad}

    assert trainable() == {"default"}
    model.set_adapter("law")
    assert trainable() == {"law"}


def test_a_named_adapter_can_be_saved(tmp_path):
    model = get_focus_model(tiny_model(), SPARSE)
    model.add_adapter("law", FocusConfig(window=7))
    model.save_pretrained(tmp_path, adapter_name="law")
    assert FocusModel.from_pretrained(tiny_model(), tmp_path, "law").adapters == {"law": FocusConfig(window=7)}


def test_a_misspelled_option_of_saving_is_no_other_adapter(tmp_path):
    model = focus()
    model.add_adapter("law", dataclasses.replace(SPARSE, num_groups=2))
    with pytest.raises(TypeError, match=r"'adaptor_name'.*`adapter_name`"):
        model.save_pretrained(tmp_path, adaptor_name="law")
    model.save_pretrained(tmp_path, state_dict=None, safe_serialization=True)  # as trainers do
    with pytest.raises(ValueError, match="safetensors alone"):
        model.save_pretrained(tmp_path, safe_serialization=False)


def test_a_gathered_state_dict_is_what_is_saved_by_one_process(tmp_path):
    model = focus()
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not (tmp_path / "second").exists()
    gathered = {name: torch.full_like(tensor, 0.5) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "first", state_dict=gathered)
    assert all(bool((x == 0.5).all()) for x in read_adapter(tmp_path / "first").tensors.values())
    with pytest.raises(ValueError, match="saved once more, without `state_dict`"):
        model.save_pretrained(tmp_path / "third", state_dict=gathered, push_to_hub=True)
    with pytest.raises(ValueError, match="`state_dict` holds no"):
        model.save_pretrained(tmp_path / "third", state_dict={})
    assert not (tmp_path / "third").exists()


def test_what_was_frozen_is_unfrozen_where_it_was_replaced_too():
    model = focus()
    model.resize_token_embeddings(VOCAB + 6)
    base = model.unload()
    assert all(p.requires_grad for p in base.parameters())


def test_adapter_names_that_are_wrong():
    model = get_focus_model(tiny_model(), SPARSE)
    with pytest.raises(ValueError, match="an adapter 'default' already"):
        model.add_adapter("default", SPARSE)
    for name in ("", "a.b", None):
        with pytest.raises(ValueError, match="without dots"):
            model.add_adapter(name, SPARSE)
    for act in (model.set_adapter, model.delete_adapter, lambda name: model.save_pretrained("x", adapter_name=name)):
        with pytest.raises(ValueError, match=r"no adapter 'law'; there are 'default'"):
            act("law")
    with pytest.raises(ValueError, match="is the active one"):
        model.delete_adapter("default")


def test_a_deleted_adapter_is_gone():
    model = get_focus_model(tiny_model(), SPARSE)
    names = list(model.state_dict())
    model.add_adapter("law", SPARSE)
    model.delete_adapter("law")
    assert list(model.state_dict()) == names
    model.add_adapter("law", FocusConfig(window=9))
    assert model.adapters["law"].window == 9


def test_adapters_that_leave_layers_alone_have_no_tensors_there(tmp_path):
    model = get_focus_model(tiny_model("gemma2"), FocusConfig(window=3, dense_layers=(-1,)))
    model.save_pretrained(tmp_path)
    assert {name.split(".")[1] for name in load_file(tmp_path / WEIGHTS_FILE)} == {"1"}
    FocusModel.from_pretrained(tiny_model("gemma2"), tmp_path)
