"""Which dtype this machine is quick in."""

from __future__ import annotations

import functools
import time
import warnings

import torch

CLEARLY, HOPELESSLY = 1.3, 10  # times as fast, times as slow


def fastest_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """bf16 where a matrix product in it is clearly faster than in fp32 here, else fp32.

    CPUs differ: some have units for bf16, others emulate it, at a tenth of the speed or a thousandth, so it is
    measured; on a small product first, since a large one can take ten seconds.
    """
    return _fastest(torch.device(device), torch.get_num_threads())


@functools.cache
def _fastest(device: torch.device, threads: int) -> torch.dtype:
    # Where a CPU has none, PyTorch says so at length and turns oneDNN off, for fp32 too and for good.
    as_it_is = torch.backends.mkldnn.enabled
    with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=as_it_is):
        if _seconds_a_product(torch.bfloat16, device, 64) > HOPELESSLY * _seconds_a_product(torch.float32, device, 64):
            return torch.float32
        half, full = (_seconds_a_product(dtype, device, 1024) for dtype in (torch.bfloat16, torch.float32))
    return torch.bfloat16 if half * CLEARLY < full else torch.float32


def _seconds_a_product(dtype: torch.dtype, device: torch.device, size: int) -> float:
    a = torch.ones(size, 512, dtype=dtype, device=device)
    b = torch.ones(512, size, dtype=dtype, device=device)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        float((a @ b)[0, 0])  # reading a value waits for the device
        times.append(time.perf_counter() - start)
    return min(times)  # others may want the processor too
