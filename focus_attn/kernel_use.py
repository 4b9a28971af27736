"""What every use of a Triton kernel in place of PyTorch's operators has to ask."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DEVICES: tuple[str, ...] = ("cuda",)


def kernels(module: str, device: torch.device) -> ModuleType | None:
    """A module of kernels, where the device has them."""
    return _imported(module) if device.type in DEVICES else None


@functools.cache
def _imported(module: str) -> ModuleType | None:
    """At its first use: Triton is optional and takes a moment to import."""
    return None if importlib.util.find_spec("triton") is None else importlib.import_module(module)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device; the layers of a model spread over several lie on others too."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def is_transformed() -> bool:
    """Whether a compiler, a tracer or a functional transform runs, which want to see PyTorch's operators."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def needs_operators(*tensors: Tensor | None) -> bool:
    """Whether PyTorch must see its operators: for a transform, a dispatch mode, or a tensor of a class of its own."""
    if is_transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(x is not None and type(x) is not Tensor and type(x) is not nn.Parameter for x in tensors)
