"""Models by name: what `find_pretrained` knows, or a tiny random one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from focus_attn.pretrained import DEFAULT, GEMMA, find_pretrained
from focus_attn.zoo import cast_parameters, tiny_random_model

TINY = "tiny"
TINY_TITLE = "a tiny random model"


def load_model(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """A causal LM in eval mode and its tokenizer.

    Args:
        name: "default" (SmolLM2-135M-Instruct), "gemma3-270m", "tiny" (random weights, bytes), a hub name or a folder.
    """
    model: Any
    if name == TINY:
        model, tokenizer = tiny_random_model()
        cast_parameters(model.parameters(), dtype)
        return model.to(device).eval(), tokenizer
    pretrained = find_pretrained(name)
    if device.type == "cuda" and torch.cuda.device_count() > 1 and not pretrained.in_wheel:  # it may need them all
        return pretrained.load(dtype, device_map="auto")
    model, tokenizer = pretrained.load(dtype)
    return model.to(device), tokenizer


def load_tokenizer(name: str) -> tuple[Any, int]:
    """The tokenizer of such a model, and how many ids the model has: its weights are not read."""
    if name == TINY:
        model, tokenizer = tiny_random_model()
        return tokenizer, model.config.vocab_size
    pretrained = find_pretrained(name)
    return pretrained.tokenizer(), pretrained.config().get_text_config().vocab_size


def describe_model(name: str) -> str:
    known = {DEFAULT: "SmolLM2-135M-Instruct", GEMMA: "Gemma-3-270M", TINY: TINY_TITLE}
    return known.get(name) or (Path(name).name if Path(name).is_dir() else name)
