"""Focus's attention mask: an O(n) tensor of where the tokens stand, made by transformers in place of an n² mask.

It is [B, 1, rows, Tk] int32. Row 0: positions of the keys. Row 1: positions of the queries, in its last Tq entries.
Row 2, only when sequences are packed: segments of the keys. Positions are -1 for padding and unwritten cache slots.
One row alone says that nothing is padded or packed: a key's position is its slot, and the queries come last.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from focus_attn.visibility import Tokens, count_positions

MaskFunction = Callable[..., Any]  # (row, head, query index, key index) -> may attend, elementwise

NOT_CAUSAL = (
    "this model asks for attention that is not plainly causal (a prefix-LM, bidirectional blocks or its own mask "
    "function), which Focus does not compute: use `disable_focus()` for this input, or leave this model dense"
)


def focus_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> Tensor:
    """Where the queries and keys of this forward stand. Called by transformers' mask interface."""
    if use_vmap:  # set by transformers for mask functions that a model or a user added
        raise ValueError(NOT_CAUSAL)
    total = kv_offset + kv_length
    slots = torch.arange(total, device=device)
    real = (slots < q_offset + q_length).expand(batch_size, total)
    if attention_mask is not None:
        written = attention_mask[:, :total].to(device=device, dtype=torch.bool)
        real = real & torch.nn.functional.pad(written, (0, total - written.shape[1]))
    segments = _segments(mask_function, batch_size, total, device)
    if segments is None and kv_offset == 0 and _is_full(q_offset, q_length, total, attention_mask):
        return slots.int().expand(batch_size, 1, 1, total)
    positions = count_positions(real, segments)

    rows = torch.full((3 if segments is not None else 2, batch_size, kv_length), -1, dtype=torch.int32, device=device)
    rows[0] = positions[:, kv_offset:]
    queries = torch.arange(q_length, device=device) + q_offset
    rows[1, :, kv_length - q_length :] = positions[:, queries]
    if segments is not None:
        rows[2] = segments[:, kv_offset:]
    return rows.permute(1, 0, 2)[:, None]


def read_mask(mask: Tensor | None, num_queries: int, num_keys: int) -> Tokens:
    """The mask back as Tokens; anything that `focus_mask` did not make is refused."""
    if mask is None:
        raise ValueError(
            "no attention mask reached Focus: this model does not build its masks through transformers' mask "
            "interface, so padding would be lost in silence; leave this model dense"
        )
    if mask.dim() != 4 or mask.dtype != torch.int32 or mask.shape[2] not in (1, 2, 3):
        raise ValueError(
            f"Focus got a custom attention mask of shape {list(mask.shape)} and {mask.dtype}: pass the 2-D padding "
            "mask [batch, tokens] (packed sequences: `position_ids` that restart), or use `disable_focus()`. A model "
            "that makes such masks itself can only be left dense"
        )
    if mask.shape[3] != num_keys:
        raise ValueError(f"the attention mask covers {mask.shape[3]} keys, the layer has {num_keys}")
    if mask.shape[2] == 1:
        return Tokens(mask[:, 0, 0, num_keys - num_queries :], mask[:, 0, 0], plain=True)
    query_positions = mask[:, 0, 1, num_keys - num_queries :]
    if mask.shape[2] == 2:
        return Tokens(query_positions, mask[:, 0, 0])
    segments = mask[:, 0, 2]
    return Tokens(query_positions, mask[:, 0, 0], segments[:, num_keys - num_queries :], segments)


def _is_full(q_offset: int | Tensor, q_length: int, total: int, attention_mask: Tensor | None) -> bool:
    """Whether every slot holds a real token and the queries are the last: asked once a forward, for it lets all layers
    plan without looking at positions. Never asked of a device inside a graph."""
    if isinstance(q_offset, Tensor) or torch.compiler.is_compiling() or q_offset + q_length != total:
        return False
    if attention_mask is None:
        return True
    if _is_captured(attention_mask.device):
        return False
    return attention_mask.shape[1] >= total and bool(attention_mask[:, :total].all())


def _segments(function: MaskFunction, batch: int, total: int, device: torch.device | str) -> Tensor | None:
    """Which packed sequence each slot belongs to, [B, total], or None when nothing is packed.

    A mask function that forbids a token its predecessor starts a new sequence there; one that allows it its
    successor is not causal. One made of sizes alone is asked on the CPU, so that nothing waits for the device.
    """
    if function is causal_mask_function or total < 2:
        return None
    if not torch.compiler.is_compiling() and not _holds_tensor(function):
        device = "cpu"
    cannot_look = torch.compiler.is_compiling() or _is_captured(device)
    later = torch.arange(1, total, device=device)[None]
    row, head = torch.arange(batch, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
    if not cannot_look and bool(function(row, head, later - 1, later).any()):
        raise ValueError(NOT_CAUSAL)
    starts = ~function(row, head, later, later - 1)
    if not cannot_look and not bool(starts.any()):
        return None
    return torch.nn.functional.pad(starts.long().cumsum(-1), (1, 0)).expand(batch, total)


def _is_captured(device: torch.device | str) -> bool:
    """Whether a CUDA graph is being made of what the device is told, so that nothing can be read back from it."""
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()


def _holds_tensor(function: Any) -> bool:
    """Whether a mask function closes over a tensor, so that it can tell the tokens of one batch from another's."""
    if isinstance(function, Tensor):
        return True
    if isinstance(function, (tuple, list)):
        return any(map(_holds_tensor, function))
    if not isinstance(function, FunctionType):
        return False
    return any(_holds_tensor(cell.cell_contents) for cell in function.__closure__ or ())
