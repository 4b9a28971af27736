"""Hidden states that were only widened are kept for the backward as narrow as they came.

The norms of most models widen half-precision hidden states to fp32 and compute with the wide copy, which autograd then
keeps: twice a layer, more than attention keeps in all. The copy holds nothing that half of its bytes do not. It is
narrowed when it is kept and widened when the backward asks for it, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

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


@contextmanager
def narrow_activations(model: nn.Module) -> Iterator[None]:
    """A context for a forward of a model, which does something where that has half precision.

    Only what norms keep is looked at: hooks cost the host some ten microseconds a tensor, and a step of short blocks is
    bound by the host. Where other such hooks are at work (gradient checkpointing, which keeps nothing of the kind, or
    `save_on_cpu`) they go first. Compiled models choose themselves what to keep.
    """
    half = any(parameter.dtype in HALVES for parameter in model.parameters())
    if not half or torch.compiler.is_compiling() or any(map(_is_compiled, model.modules())):
        yield
        return
    pack, unpack = narrowing()
    open_: list[saved_tensors_hooks] = []

    def enter(*_: object) -> None:
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            open_.append(saved_tensors_hooks(pack, unpack))
            open_[-1].__enter__()

    def leave(*_: object) -> None:
        while open_:
            open_.pop().__exit__()

    handles = []
    for norm in norms(model):
        handles += [norm.register_forward_pre_hook(enter), norm.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        leave()  # an interrupt calls no hook
        for handle in handles:
            handle.remove()


def norms(model: nn.Module) -> list[nn.Module]:
    """Modules that look like norms: nothing inside, and no weights but vectors. PyTorch's own widen nothing. Looked for
    once a model."""
    found = _norms.get(model)
    if found is None:
        found = _norms[model] = [module for module in model.modules() if _looks_like_a_norm(module)]
    return found


_norms: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _looks_like_a_norm(module: nn.Module) -> bool:
    if next(module.children(), None) is not None or type(module).__module__.startswith("torch.nn."):
        return False
    dimensions = [parameter.dim() for parameter in module.parameters()]
    return "Norm" in type(module).__name__ or (bool(dimensions) and max(dimensions) == 1)


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
