"""The model, with Focus on it, and the text that `focus bench prefill` times."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.adapters import adapter_digest
from focus_attn.evaluation import token_blocks
from focus_attn.hf import text_config
from focus_attn.model import FocusModel, get_focus_model
from focus_attn.pretrained import load_with_adapter
from focus_attn.text import default_text
from focus_attn.zoo import find_adapter

DEFAULT_LENGTHS = {"cuda": (4096, 8192, 16384, 32768, 65536), "cpu": (1024, 2048, 4096)}
MOST_TEXT = 16384  # tokens: longer lengths repeat it


class Loaded(NamedTuple):
    model: FocusModel
    token_ids: Tensor  # [N]
    title: str
    adapter_digest: str | None  # None: random routers


def load_for_prefill(
    name: str | None, adapter: str | None, dtype: torch.dtype, device: torch.device, longest: int
) -> Loaded:
    folder = None if adapter is None else find_adapter(adapter)
    base, tokenizer = load_with_adapter(name, folder, dtype)
    model = base if isinstance(base, FocusModel) else get_focus_model(base)
    model = model.to(device).eval()
    with model.disable_focus():
        config = text_config(model.base_model)
        dense = config._attn_implementation
    _check_positions(config, longest)
    token_ids = token_blocks(tokenizer, default_text().train, min(longest, MOST_TEXT), 1).flatten()
    focus = model.focus_config
    routers = f"adapter {adapter}" if adapter else "random routers"
    precision = str(dtype).removeprefix("torch.")
    title = (
        f"Prefill of {name or config._name_or_path}, {precision}, batch 1 on {device.type}; dense attention {dense}; "
        f"Focus with {routers}, K = {focus.num_groups}, query_k {focus.query_top_k}, "
        f"key_k {focus.key_top_k}, window {focus.window}, {focus.num_sinks} sinks"
    )
    return Loaded(model, token_ids, title, None if folder is None else adapter_digest(folder))


def _check_positions(config: object, longest: int) -> None:
    """Rotary positions go on beyond what a model was trained for, which is enough to measure speed; a table ends."""
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and longest > most and getattr(config, "rope_parameters", None) is None:
        raise ValueError(f"--lengths: this model has {most:,} positions, got {longest:,}: choose shorter ones")
