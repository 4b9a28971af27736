"""Hidden states that were only widened are kept for the backward as narrow as they came.

The norms of most models widen half-precision hidden states to fp32 and compute with the wide copy, which autograd then
keeps: twice a layer, more than attention keeps in all. The copy holds nothing that half of its bytes do not. It is
narrowed when it is kept and widened when the backward asks for it, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

WIDENING = "ToCopyBackward0"
HALVES = (torch.bfloat16, torch.float16)


class Kept(NamedTuple):
    """What stands for a tensor until the backward asks for it. Not the tensor itself: an operator that keeps its own
    result would then hold on to it for ever."""

    tensor: Tensor
    version: int  # of the tensor's memory: PyTorch looks whether it was written to only where there are no hooks
    narrowed: bool


def narrow_activations(model: nn.Module) -> AbstractContextManager[object]:
    """A context for a forward of a model, which does something where that has half precision. Only the innermost of
    such contexts applies: gradient checkpointing, which keeps nothing of the kind, goes its own way inside this one,
    and hooks outside of it (`save_on_cpu`) rest meanwhile."""
    if not any(parameter.dtype in HALVES for parameter in model.parameters()):
        return nullcontext()
    return saved_tensors_hooks(*narrowing())


def narrowing() -> tuple[Callable[[Tensor], Kept], Callable[[Kept], Tensor]]:
    """What to keep instead of a tensor, and how to have it back."""
    narrow = WeakTensorKeyDictionary()  # several operators keep the same tensor: all of them get one copy

    def pack(x: Tensor) -> Kept:
        dtype = widened_from(x)
        if dtype is None:
            return Kept(x.detach(), x._version, narrowed=False)
        copy = narrow.get(x)
        if copy is None:
            copy = narrow[x] = x.detach().to(dtype)
        return Kept(copy, copy._version, narrowed=True)

    def unpack(kept: Kept) -> Tensor:
        if kept.tensor._version != kept.version:
            raise RuntimeError(
                "a tensor that the backward needs was written to in place after the forward (version "
                f"{kept.tensor._version}, kept was {kept.version}): {list(kept.tensor.shape)}, {kept.tensor.dtype}"
            )
        return kept.tensor.to(torch.float32) if kept.narrowed else kept.tensor

    return pack, unpack


def widened_from(x: Tensor) -> torch.dtype | None:
    """The half precision that x has its values from, if it is nothing but a copy of such a tensor in fp32."""
    if x.dtype != torch.float32 or x.grad_fn is None or type(x) is not Tensor or x.grad_fn.name() != WIDENING:
        return None
    if x._version:  # written to since
        return None
    source, output = x.grad_fn.next_functions[0]
    made = getattr(source, "_input_metadata", None)  # of what the operator before gave
    if made is None or made[output].dtype not in HALVES:
        return None
    dtype: torch.dtype = made[output].dtype
    return dtype
