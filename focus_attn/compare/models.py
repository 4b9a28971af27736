"""Models by name: the two that come in wheels, a tiny random one, or whatever transformers can load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from focus_attn.zoo import cast_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT, GEMMA, TINY = "default", "gemma3-270m", "tiny"
TINY_TITLE = "a tiny random model"


def load_model(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """A causal LM in eval mode and its tokenizer.

    Args:
        name: "default" (SmolLM2-135M-Instruct), "gemma3-270m", "tiny" (random weights, bytes), a hub name or a folder.
    """
    loaders: dict[str, Callable[[], tuple[Any, Any]]] = {DEFAULT: _default, GEMMA: _gemma, TINY: _tiny}
    if name not in loaders:
        return _from_transformers(name, dtype, device)
    model, tokenizer = loaders[name]()
    cast_parameters(model.parameters(), dtype)
    return model.to(device).eval(), tokenizer


def describe_model(name: str) -> str:
    known = {DEFAULT: "SmolLM2-135M-Instruct", GEMMA: "Gemma-3-270M", TINY: TINY_TITLE}
    return known.get(name) or (Path(name).name if Path(name).is_dir() else name)


def _default() -> tuple[Any, Any]:
    from focus_attn.zoo import load_default_model

    return load_default_model()


def _gemma() -> tuple[Any, Any]:
    from focus_attn.compare.gemma import load_gemma

    return load_gemma()


def _tiny() -> tuple[Any, Any]:
    from focus_attn.zoo import tiny_random_model

    return tiny_random_model()


def _from_transformers(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from focus_attn.zoo import naming, quiet_transformers

    local = {"local_files_only": Path(name).is_dir()}
    with quiet_transformers(), naming(name):
        tokenizer = AutoTokenizer.from_pretrained(name, **local)
        if device.type == "cuda" and torch.cuda.device_count() > 1:  # a model may need them all
            return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map="auto", **local).eval(), tokenizer
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **local)
        return model.to(device).eval(), tokenizer
