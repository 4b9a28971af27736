"""Which dtype this machine is quick in."""

from __future__ import annotations

import statistics
import time
import warnings

import torch


def fastest_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """bf16 where a matrix product in it is clearly faster than in fp32 here, else fp32.

    CPUs differ: some have units for bf16, others emulate it at a tenth of the speed, so it is measured.
    """
    # Where a CPU has none, PyTorch says so at length and turns oneDNN off, for fp32 too and for good.
    as_it_is = torch.backends.mkldnn.enabled
    with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=as_it_is):
        seconds = {dtype: _seconds_a_product(dtype, device) for dtype in (torch.float32, torch.bfloat16)}
    return torch.bfloat16 if seconds[torch.bfloat16] * 1.3 < seconds[torch.float32] else torch.float32


def _seconds_a_product(dtype: torch.dtype, device: torch.device | str) -> float:
    a = torch.ones(1024, 512, dtype=dtype, device=device)
    b = torch.ones(512, 1024, dtype=dtype, device=device)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        float((a @ b)[0, 0])  # reading a value waits for the device
        times.append(time.perf_counter() - start)
    return statistics.median(times)
