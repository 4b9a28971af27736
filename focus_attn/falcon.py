"""Falcon's way in: its attention looks no function up by name, so its forward is replaced while Focus is on."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb


def is_attention(module: nn.Module) -> bool:
    return isinstance(module, FalconAttention)


def put_on(module: Any) -> None:
    name = _forward_name(module)
    module.focus_own_forward = module.__dict__.get(name)
    setattr(module, name, partial(_forward, module))  # a method of this name could not be pickled


def take_off(module: Any) -> None:
    name, own = _forward_name(module), module.__dict__.pop("focus_own_forward")
    if own is not None:
        setattr(module, name, own)
    elif name == "forward":
        delattr(module, name)
    else:  # accelerate came after Focus and took ours for the true one
        setattr(module, name, partial(type(module).forward, module))


def _forward_name(module: Any) -> str:
    """accelerate wraps a forward and keeps the true one under another name."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """FalconAttention.forward with the attention itself looked up; the cache holds what Falcon's own would."""
    split = self._split_heads(self.query_key_value(hidden_states))  # each [B, T, heads, D]
    query, key, value = (x.transpose(1, 2) for x in split)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    repeats = key.shape[1] // self.num_kv_heads  # the new architecture spreads its KV heads over the query heads
    attend = ALL_ATTENTION_FUNCTIONS["focus"]
    out, _ = attend(
        self, query, key[:, ::repeats], value[:, ::repeats], attention_mask, focus_routing=kwargs["focus_routing"]
    )
    return self.dense(out.flatten(2)), None
