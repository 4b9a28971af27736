"""One eager call taken apart: the kernels it launches, and what it costs beside its attention kernels."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from focus_attn.bench.setting import Setting, run_pass
from focus_attn.bench.timing import clock
from focus_attn.config import FocusConfig
from focus_attn.router import Router

# Names of kernels that compute attention; what copies, sorts or plans for them is overhead.
ATTENTION = re.compile(r"(?:\b|_)(?:near|far)(?:\b|_)|flash|fmha|sdpa|cudnn|attention|attn", re.IGNORECASE)
NOT_ATTENTION = re.compile(r"copy|plan|sort|gather|prepare", re.IGNORECASE)
CALLS = 20
HIDDEN = 4096


class Kernel(NamedTuple):
    name: str
    launches: int
    milliseconds: float  # on the device, all launches
    is_attention: bool


@dataclass(frozen=True)
class Trace:
    """Medians of eager calls, and the kernels of one."""

    length: int
    backward: bool
    call_ms: float  # from an idle device to an idle device
    host_ms: float  # until the call returned
    kernels: list[Kernel]
    router_ms: float

    @property
    def attention_ms(self) -> float:
        return sum(kernel.milliseconds for kernel in self.kernels if kernel.is_attention)

    @property
    def overhead_ms(self) -> float:
        return self.call_ms - self.attention_ms

    def to_dict(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "pass": "forward + backward" if self.backward else "forward",
            "call_ms": round(self.call_ms, 4),
            "host_ms": round(self.host_ms, 4),
            "attention_kernels_ms": round(self.attention_ms, 4),
            "overhead_ms": round(self.overhead_ms, 4),
            "router_ms": round(self.router_ms, 4),
            "kernels": [kernel._asdict() for kernel in self.kernels],
        }


def is_attention(kernel: str) -> bool:
    return bool(ATTENTION.search(kernel)) and not NOT_ATTENTION.search(kernel)


def trace_call(setting: Setting, length: int, backward: bool, generator: torch.Generator) -> Trace:
    """CUDA only. Ids are redrawn before every call here too."""
    device = setting.shape.device
    if device.type != "cuda":
        raise ValueError(
            "--trace reads the kernels of a CUDA device: there is none here, or --device cpu was asked for"
        )
    inputs = setting.shape.draw(length, backward, generator)

    def fresh_call() -> Callable[[], object]:
        return partial(run_pass, setting.attend(setting.draw_groups(length, generator)), inputs)

    fresh_call()()  # compiled and tuned
    call_ms = statistics.median(1e3 * clock(fresh_call(), device) for _ in range(CALLS))
    host_ms = statistics.median(1e3 * _host_seconds(fresh_call(), device) for _ in range(CALLS))
    call = fresh_call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize(device)
    kernels = [
        Kernel(event.key, event.count, event.device_time_total / 1e3, is_attention(event.key))
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and event.device_time_total > 0
    ]
    kernels.sort(key=lambda kernel: -kernel.milliseconds)
    return Trace(length, backward, call_ms, host_ms, kernels, _router_ms(setting, length, generator))


def _host_seconds(call: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()
def _router_ms(setting: Setting, length: int, generator: torch.Generator) -> float:
    """The router that would give such ids, on hidden states of a usual width."""
    ids, shape = setting.ids, setting.shape
    config = FocusConfig(
        num_groups=ids.num_groups, query_top_k=ids.query_k, key_top_k=ids.key_k, shared_router=ids.shared
    )
    router = Router(config, HIDDEN, ids.routers, shape.device).eval()
    sizes = (1, length, HIDDEN)
    hidden = torch.randn(sizes, generator=generator, device=shape.device, dtype=shape.dtype)
    router(hidden)
    return statistics.median(1e3 * clock(partial(router, hidden), shape.device) for _ in range(CALLS))
