"""The mean of adapters that one start led to: what it is, and what it is refused for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from tiny import SPARSE, tiny_model, tokens
from typer.testing import CliRunner

from focus_attn import FocusModel, get_focus_model
from focus_attn.adapter_mean import mean_of_adapters
from focus_attn.adapters import WEIGHTS_FILE, read_adapter
from focus_attn.cli import app

pytestmark = pytest.mark.filterwarnings("ignore:this input of")


def save(folder, *, start=0, way=None, config=SPARSE, architecture="llama"):
    """An adapter whose routers began by `start` and then went their own `way` a little."""
    model = get_focus_model(tiny_model(architecture), config)
    for seed, size in ((start, 1.0), (way, 0.3)):
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for layer in model.focus_layers():
                if layer.router is not None:
                    for tensor in layer.router.state_dict().values():
                        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=size)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def pair(tmp_path):
    return save(tmp_path / "a", way=1), save(tmp_path / "b", way=2)


def average(*arguments):
    return CliRunner().invoke(app, ["average", *map(str, arguments)])


def test_the_mean_is_that_of_every_tensor(pair, tmp_path):
    result = average(*pair, "--output", tmp_path / "mean")
    assert result.exit_code == 0, result.output
    a, b, mean = (load_file(folder / WEIGHTS_FILE) for folder in (*pair, tmp_path / "mean"))
    assert set(mean) == set(a) and {name.rsplit(".", 1)[1] for name in mean} == {"projection", "centroids", "bias"}
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (a[name] + b[name]) / 2)


def test_weights_count_by_their_share(pair, tmp_path):
    assert average(*pair, "--weights", "3,1", "--output", tmp_path / "mean").exit_code == 0
    a, b, mean = (load_file(folder / WEIGHTS_FILE) for folder in (*pair, tmp_path / "mean"))
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, 0.75 * a[name] + 0.25 * b[name])


def test_the_mean_is_an_adapter_and_of_one_with_itself_the_same(pair, tmp_path):
    assert average(pair[0], pair[0], "--output", tmp_path / "mean").exit_code == 0
    ids = tokens()
    with torch.no_grad():
        same, mean = (FocusModel.from_pretrained(tiny_model(), at)(ids).logits for at in (pair[0], tmp_path / "mean"))
    assert torch.equal(same, mean)


def test_routers_of_different_starts_have_no_mean(pair, tmp_path):
    other = save(tmp_path / "other", start=7)
    result = average(pair[0], other, "--output", tmp_path / "mean")
    assert result.exit_code == 1 and "different starts" in result.output
    assert not (tmp_path / "mean").exists()


def changed(adapter, change):
    """Its tensors by name, those of layer 1 through `change(kind, tensor)`."""
    tensors = {
        name: change(name.rsplit(".", 1)[1], tensor.clone()) if name.startswith("layers.1.") else tensor
        for name, tensor in adapter.tensors.items()
    }
    return dataclasses.replace(adapter, tensors=tensors)


def test_one_layer_that_numbers_its_groups_differently_is_enough(pair):
    adapter = read_adapter(pair[0])
    rolled = {"centroids": -2, "bias": -1}
    other = changed(adapter, lambda kind, tensor: tensor.roll(1, rolled[kind]) if kind in rolled else tensor)
    with pytest.raises(ValueError, match="different starts"):
        mean_of_adapters([adapter, other])


def test_what_is_not_a_number_spreads_no_further(pair):
    adapter = read_adapter(pair[0])
    other = changed(adapter, lambda kind, tensor: tensor.fill_(float("nan")) if kind == "bias" else tensor)
    with pytest.raises(ValueError, match="NaN"):
        mean_of_adapters([adapter, other])


def test_what_differs_is_named(pair, tmp_path):
    other = save(tmp_path / "other", config=dataclasses.replace(SPARSE, window=SPARSE.window + 1))
    result = average(pair[0], other, "--output", tmp_path / "mean")
    assert result.exit_code == 1 and f"`window`: {SPARSE.window}, {SPARSE.window + 1}" in result.output
    result = average(pair[0], save(tmp_path / "gpt2", architecture="gpt2"), "--output", tmp_path / "mean")
    assert result.exit_code == 1 and "`model_type`: 'llama', 'gpt2'" in result.output


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("1", "1 weight for 2 adapters"),
        ("1,0", "above 0"),
        ("1,-1", "above 0"),
        ("1,x", "numbers"),
        ("1,nan", "above 0"),
        ("1e308,1e308", "above 0"),
    ],
)
def test_bad_weights(pair, tmp_path, weights, said):
    result = average(*pair, "--weights", weights, "--output", tmp_path / "mean")
    assert result.exit_code == 1 and said in result.output and not (tmp_path / "mean").exists()


def test_one_adapter_is_no_mean_and_nothing_is_written_over(pair, tmp_path):
    assert "two adapters or more" in average(pair[0], "--output", tmp_path / "mean").output
    before = (pair[0] / WEIGHTS_FILE).read_bytes()
    result = average(*pair, "--output", pair[0])
    assert result.exit_code == 1 and "choose another folder" in result.output
    assert (pair[0] / WEIGHTS_FILE).read_bytes() == before
    (pair[1] / "base_model").mkdir()
    assert "trained together with its model" in average(*pair, "--output", tmp_path / "mean").output


def test_it_says_how_far_apart_they_are(pair, tmp_path):
    """0.3 of the way each, in directions that have nothing in common: 0.3 * sqrt(2) of 1.04, and somewhat more."""
    assert mean_of_adapters([read_adapter(at) for at in pair]).apart == pytest.approx(0.45, abs=0.1)
    assert "at most 0.4" in average(*pair, "--output", tmp_path / "mean").output
