"""A state dict that names every tensor once, where a model ties some: `Trainer` and safetensors refuse two names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def _other_names(module: nn.Module) -> dict[str, str]:
    """The further names of tied parameters -> the first."""
    first: dict[Tensor, str] = {}
    names = ((name, first.setdefault(p, name)) for name, p in module.named_parameters(remove_duplicate=False))
    return {name: known for name, known in names if name != known}


def name_once(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook behind `state_dict`."""
    for other in _other_names(module):
        state_dict.pop(prefix + other, None)


def name_again(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before `load_state_dict`, which asks for all of them."""
    for other, first in _other_names(module).items():
        if prefix + first in state_dict:
            state_dict.setdefault(prefix + other, state_dict[prefix + first])
