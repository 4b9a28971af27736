"""Triton's interpreter, made to look where kernels read and write: every address must lie in a tensor that was given.

The interpreter itself reads whatever stands there, as a GPU may.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def bounded() -> Iterator[list[str]]:
    """-> the names of the kernels that ran inside."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    ranges: list[tuple[int, int]] = []
    ran: list[str] = []
    take_arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    update, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

    def note(x: Any) -> None:
        if isinstance(x, tuple):
            for part in x:
                note(part)
        elif isinstance(x, torch.Tensor) and x.numel():
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            ranges.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()))

    def arguments(self: Any, given: Any, named: Any) -> Any:
        taken = take_arguments(self, given, named)
        ran.append(self.fn.__name__)
        ranges.clear()
        note((*taken[0], *taken[1].values()))
        return taken

    def check(what: str, pointers: Any, mask: Any) -> None:
        chosen = np.broadcast_to(True if mask is None else mask.data, pointers.data.shape).astype(bool)
        used = np.asarray(pointers.data)[chosen].astype(np.int64)
        last = used + pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(used.shape, bool)
        for begin, end in ranges:
            inside |= (used >= begin) & (last <= end)
        if not inside.all():
            raise IndexError(f"{ran[-1]} {what} outside of its tensors, {(~inside).sum()} addresses of {inside.size}")

    def checked_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        check("reads", pointers, mask)
        return load(self, pointers, mask, *more)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        check("writes", pointers, mask)
        return store(self, pointers, value, mask, *more)

    def checked_update(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        check("adds", pointers, mask)
        return update(self, operation, pointers, value, mask, *more)

    def checked_exchange(self: Any, pointers: Any, *more: Any) -> Any:
        check("exchanges", pointers, None)
        return exchange(self, pointers, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_atomic_rmw", checked_update)
        patch.setattr(builder, "create_atomic_cas", checked_exchange)
        patch.setattr(executor, "_init_args_hst", arguments)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        yield ran
