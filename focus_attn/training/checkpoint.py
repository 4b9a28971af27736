"""Checkpoints of a run: what was trained, the optimiser, the position in the data. The frozen base is not among it.

A checkpoint is written beside its place, forced to the disk and renamed at the end, so that whatever bears the name of
one is whole. Random numbers need no state of their own: every step draws from a seed made of the run's and its number.

    output/checkpoints/step-0000250/
        focus_config.json, focus_model.safetensors   the adapter, loadable as it is
        base_model.safetensors                       only where the run trains the base
        optimizer.pt                                 optimiser, learning-rate schedule, means of steps and stages
        trainer_state.json                           transformers' own account of the stage
        progress.json                                stage, step, recipe, digest of the data, sample of the base
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from focus_attn.adapters import check_fits, describe_base, read_adapter
from focus_attn.base_sample import Sample
from focus_attn.model import FocusModel
from focus_attn.training.distributed import like
from focus_attn.training.recipe import Recipe

FOLDER, PROGRESS, OPTIMIZER, BASE = "checkpoints", "progress.json", "optimizer.pt", "base_model.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    stage: int = 0
    step: int = 0  # inside the stage
    total: int = 0  # over all stages


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    position: Position
    recipe: Recipe
    data_digest: str
    base_sample: Sample | None = None  # None: of before it was kept

    @property
    def holds_base(self) -> bool:
        return (self.folder / BASE).is_file()


def checkpoints(output: Path) -> list[Checkpoint]:
    """Those of a run, the oldest first."""
    found = [read_checkpoint(file.parent) for file in (output / FOLDER).glob(f"step-*/{PROGRESS}")]
    return sorted(found, key=lambda one: (one.position.total, one.position.stage))


def read_checkpoint(folder: Path) -> Checkpoint:
    try:
        described = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        if described["format"] != FORMAT:
            raise ValueError(f"format {described['format']}, this version reads {FORMAT}")
        recipe = Recipe.from_dict(described["recipe"])
        position = Position(**described["position"])
        return Checkpoint(folder, position, recipe, described["data"], described.get("base"))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the checkpoint {str(folder)!r} cannot be read ({error}): remove it to go on from an older one, or start "
            "anew with `resume=False` (--no-resume)"
        ) from None


def write_checkpoint(
    output: Path,
    position: Position,
    recipe: Recipe,
    data_digest: str,
    fill: Callable[[Path], None],
    base_sample: Sample | None = None,
) -> Checkpoint:
    """Write one by `fill(folder)`, whole or not at all, then remove those that are too many."""
    parent = output / FOLDER
    target = parent / f"step-{position.total:07d}"
    draft, outdated = parent / f".writing-{target.name}", parent / f".outdated-{target.name}"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        fill(draft)
        described = {
            "format": FORMAT,
            "position": asdict(position),
            "recipe": recipe.to_dict(),
            "data": data_digest,
            "base": base_sample,
        }
        (draft / PROGRESS).write_text(json.dumps(described, indent=2), encoding="utf-8")
        for file in draft.iterdir():
            _to_disk(file)
        _to_disk(draft)
        if target.exists():  # of a run that was stopped right after it: out of the way first, then gone
            shutil.rmtree(outdated, ignore_errors=True)
            os.replace(target, outdated)
        os.replace(draft, target)
        _to_disk(parent)
        shutil.rmtree(outdated, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        last = checkpoints(output)
        kept = f"the last good one is {str(last[-1].folder)!r}" if last else "there is none yet"
        raise OSError(
            f"cannot write the checkpoint of step {position.total} into {str(parent)!r} ({error.strerror or error}); "
            f"{kept}. Make room and start the same command again: it goes on from there"
        ) from error
    for old in checkpoints(output)[: -recipe.keep_checkpoints]:
        shutil.rmtree(old.folder, ignore_errors=True)
    return Checkpoint(target, position, recipe, data_digest, base_sample)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def base_parameters(model: FocusModel) -> dict[str, torch.nn.Parameter]:
    """The base model's own parameters by name, without the routers."""
    routers = {id(p) for layer in model.focus_layers() for p in layer.parameters()}
    return {name: p for name, p in model.base_model.named_parameters() if id(p) not in routers}


def persistent_buffers(model: FocusModel) -> dict[str, Tensor]:
    """The base model's own that its files hold beside the parameters."""
    routers = {id(buffer) for layer in model.focus_layers() for buffer in layer.buffers()}
    saved = model.base_model.state_dict().keys()
    return {name: b for name, b in model.base_model.named_buffers() if name in saved and id(b) not in routers}


def save_base(tensors: dict[str, Tensor], folder: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / BASE)


@torch.no_grad()
def load_weights(model: FocusModel, folder: Path) -> None:
    """Put a checkpoint's routers, and its base where it has one, into the model."""
    adapter = read_adapter(folder)
    check_fits(adapter, describe_base(model.base_model), [layer.spec for layer in model.focus_layers()])
    model._copy_tensors(adapter, model.active_adapter)
    if (folder / BASE).is_file():
        saved = load_file(folder / BASE)
        for name, parameter in base_parameters(model).items():
            parameter.copy_(like(saved[name].to(parameter.device), parameter))


def read_optimizer(folder: Path) -> dict[str, Any]:
    return torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


def load_optimizer(folder: Path, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """-> all that was saved with them."""
    saved = read_optimizer(folder)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = saved["optimizer"]
    state["state"] = {
        index: {key: like(x, parameters[index]) if isinstance(x, Tensor) else x for key, x in one.items()}
        for index, one in state["state"].items()
    }
    optimizer.load_state_dict(state)
    scheduler.load_state_dict(saved["scheduler"])
    return saved
