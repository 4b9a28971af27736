"""Kernels in place of PyTorch's operators: on the GPU where there is one, otherwise in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from kernel_bounds import bounded

from focus_attn import kernel_use

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@contextmanager
def kernels_everywhere(within_bounds: bool = True) -> Iterator[None]:
    """within_bounds: whatever the interpreter reads and writes must lie in tensors that were given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_use, "DEVICES", (DEVICE,))
        if not ON_GPU:
            teach_interpreter_bf16(patch)
        # `torch.empty` gives NaN, so that an element nobody wrote is found.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with bounded() if within_bounds and not ON_GPU else nullcontext():
                yield
        finally:
            torch.use_deterministic_algorithms(False)


def teach_interpreter_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies the bits of bf16 as if they were integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def in_fp32(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: object, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return multiply(self, in_fp32(a), in_fp32(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
