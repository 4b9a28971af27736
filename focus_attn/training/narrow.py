"""Hidden states that were only widened are kept for the backward as narrow as they came.

The norms of most models widen half-precision hidden states to fp32 and compute with the wide copy, which autograd then
keeps: twice a layer, more than attention keeps in all. The copy holds nothing that half of its bytes do not. It is
narrowed when it is kept and widened when the backward asks for it, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

WIDENING = "ToCopyBackward0"
HALVES = (torch.bfloat16, torch.float16)


class Narrow(NamedTuple):
    """Stands for its tensor in fp32."""

    tensor: Tensor


def narrow_activations() -> saved_tensors_hooks:
    """A context for a forward. Gradient checkpointing, which keeps nothing of the kind, goes its own way inside it."""
    return saved_tensors_hooks(*narrowing())


def narrowing() -> tuple[Callable[[Tensor], Tensor | Narrow], Callable[[Tensor | Narrow], Tensor]]:
    """What to keep instead of a tensor, and how to have it back."""
    kept = WeakTensorKeyDictionary()  # several operators keep the same tensor: all of them get one copy

    def pack(x: Tensor) -> Tensor | Narrow:
        dtype = widened_from(x)
        if dtype is None:
            return x
        narrow = kept.get(x)
        if narrow is None:
            narrow = kept[x] = x.detach().to(dtype)
        return Narrow(narrow)

    def unpack(packed: Tensor | Narrow) -> Tensor:
        return packed.tensor.to(torch.float32) if isinstance(packed, Narrow) else packed

    return pack, unpack


def widened_from(x: Tensor) -> torch.dtype | None:
    """The half precision that x has its values from, if it is nothing but a copy of such a tensor in fp32."""
    if x.dtype != torch.float32 or x.grad_fn is None or type(x) is not Tensor or x.grad_fn.name() != WIDENING:
        return None
    source, output = x.grad_fn.next_functions[0]
    made = getattr(source, "_input_metadata", None)  # of what the operator before gave
    if made is None or made[output].dtype not in HALVES:
        return None
    dtype: torch.dtype = made[output].dtype
    return dtype
