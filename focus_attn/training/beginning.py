"""What a run begins with: a model that can be trained as the recipe asks, and the checkpoint to go on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from focus_attn.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from focus_attn.base_sample import Sample, is_same
from focus_attn.hf import text_config
from focus_attn.model import FocusModel, get_focus_model
from focus_attn.training.checkpoint import FOLDER, Checkpoint, checkpoints
from focus_attn.training.recipe import Recipe
from focus_attn.training.token_store import TokenStore
from focus_attn.zoo import find_adapter

RECORD = "run.json"  # what a run has written of itself
# What may change between a run and its continuation: it does not change what is learned.
HARMLESS = frozenset(
    "name model text log_every save_every evaluate_every keep_checkpoints sharding micro_batch "
    "gradient_checkpointing".split()
)


def with_focus(model: nn.Module, recipe: Recipe, output: Path) -> FocusModel:
    if recipe.adapter is not None:
        return _with_adapter(model, recipe, find_adapter(recipe.adapter), output)
    if not isinstance(model, FocusModel):
        if any(hasattr(module, "focus_state") for module in model.modules()):
            raise ValueError(
                "this model carries Focus already, from an earlier call perhaps: give the FocusModel itself (the "
                "call's `result.model`), or `unload()` it first"
            )
        torch.manual_seed(recipe.seed)
        return get_focus_model(model, recipe.focus)
    if recipe.focus is not None and (differing := recipe.focus.differences(model.focus_config)):
        raise ValueError(
            f"the recipe's `focus` is not the model's ({'; '.join(differing)}): leave it out of the recipe, or give "
            "the plain model"
        )
    return model


def _with_adapter(model: nn.Module, recipe: Recipe, adapter: Path, output: Path) -> FocusModel:
    if isinstance(model, FocusModel):
        raise ValueError(f"the recipe goes on from the adapter {str(adapter)!r}: give the plain model, no FocusModel")
    if output.resolve() == adapter.resolve():
        raise ValueError(
            f"`output` {str(output)!r} is the adapter to go on from, and would be written over: choose another folder"
        )
    if recipe.focus is not None and (differing := recipe.focus.differences(read_adapter(adapter).config)):
        raise ValueError(
            f"the recipe's `focus` is not that of the adapter {str(adapter)!r} ({'; '.join(differing)}): leave it out "
            "of the recipe"
        )
    return FocusModel.from_pretrained(model, adapter)


def check_positions(recipe: Recipe, model: FocusModel) -> None:
    assert recipe.focus is not None
    recipe.check_lengths(recipe.focus)
    most = getattr(text_config(model.base_model), "max_position_embeddings", None)
    for where, length in recipe.lengths().items():
        if most is not None and length > most:
            raise ValueError(f"`{where}.length` is {length:,}, the model has {most:,} positions: lower it")


def check_trainable(recipe: Recipe, model: FocusModel) -> None:
    """Before anything runs: whether the routers stand together, and the base's weights can be trained and saved, where
    they are to be."""
    base = model.base_model
    places = set(getattr(base, "hf_device_map", {}).values()) - {"cpu", "disk"}  # from where weights are fetched
    if len(places) > 1:
        raise ValueError(
            f"this model's layers are spread over {len(places)} devices (`device_map`), and what a step asks of its "
            "routers needs one: load it onto one, or share it among processes (`sharding: fsdp`)"
        )
    if recipe.trains_base and hasattr(base, "peft_config"):
        raise ValueError(
            "`trains: everything` would train the weights under the peft adapter too, and only the adapter would be "
            "saved: give the model that `merge_and_unload()` returns"
        )
    if recipe.trains_base and getattr(base, "is_quantized", False):
        raise ValueError(
            "`trains: everything` needs weights that have gradients, and this model's are quantised: load them as they "
            "are"
        )
    if recipe.trains_base and any(parameter.is_meta for parameter in base.parameters()):
        raise ValueError(
            "`trains: everything` needs all weights on the device, and some of this model's are offloaded: load it "
            "without `device_map`, or share it among devices (`sharding: fsdp`)"
        )


def find_checkpoint(output: Path, recipe: Recipe, store: TokenStore, base: Sample, resume: bool) -> Checkpoint | None:
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output` must be a folder, but {str(output)!r} is a file")
    output.mkdir(parents=True, exist_ok=True)
    if not resume:
        shutil.rmtree(output / FOLDER, ignore_errors=True)
        for file in (RECORD, CONFIG_FILE, WEIGHTS_FILE):
            (output / file).unlink(missing_ok=True)
        return None
    found = checkpoints(output)
    if not found and (output / CONFIG_FILE).exists() and not (output / RECORD).exists():
        raise ValueError(
            f"{str(output)!r} holds an adapter that no run has left there, and it would be written over: choose "
            "another output, or `resume=False` (--no-resume)"
        )
    if not found:
        return None
    last = found[-1]
    differing = [text for field, text in recipe.differences(last.recipe) if field.split(".")[-1] not in HARMLESS]
    if last.data_digest != store.digest:
        differing.append("the text")
    if not (last.base_sample is None or last.holds_base or is_same(last.base_sample, base)):
        differing.append("the model's weights")
    if bool(recipe.evaluate_every) != bool(last.recipe.evaluate_every) and recipe.takes_held_out:
        differing.append("`evaluate_every` is 0 or not, which changes what is trained on")
    if differing:
        raise ValueError(
            f"{str(output)!r} holds a run of another recipe; different now and there: {'; '.join(differing)}. Choose "
            "another output (going on from that adapter with `adapter`, --adapter), or start anew with `resume=False` "
            "(--no-resume)"
        )
    return last
