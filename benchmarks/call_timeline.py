"""One long call, kernel by kernel, and what it takes among others: after a dense call, and after calls of its own kind.

    python benchmarks/call_timeline.py --length 65536 --json results/attention_h200/timeline_64k.json

Ids are drawn anew before every call. A device that has just run dense attention for 60 ms stands at its power limit,
so that the same kernels take longer there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from focus_attn import focus_attention
from focus_attn.bench.record import write_json

GROUPS, WINDOW = 8, 128


def milliseconds(call: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def spread(times: list[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}


def kernels_of(call: Callable[[], object], after: Callable[[], object] | None = None) -> list[dict[str, Any]]:
    """after: a call with one kernel that takes longer than any of the other's, to come first and not to be listed."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for each in (after, call):
            if each is not None:
                each()
            torch.cuda.synchronize()
    found = sorted(
        (event for event in record.events() if event.device_type == DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    if after is not None:
        found = found[1 + max(range(len(found)), key=lambda i: found[i].time_range.elapsed_us()) :]
    rows: list[dict[str, Any]] = []
    for before, event in zip([None, *found], found, strict=False):
        gap = 0.0 if before is None else event.time_range.start - before.time_range.end
        rows.append({"kernel": event.name[:60], "us": event.time_range.elapsed_us(), "gap_us": gap})
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")

    shape = 1, options.heads, options.length, options.width
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def ours(ids: Tensor) -> object:
        return focus_attention(q, k, v, ids, ids, num_groups=GROUPS, window=WINDOW)

    def dense(_: Tensor) -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def timed(attend: Callable[[Tensor], object]) -> float:
        ids = torch.randint(GROUPS, (1, 1, options.length, 1), device="cuda")
        return milliseconds(lambda: attend(ids))

    for _ in range(8):
        timed(ours)
        timed(dense)
    in_turns: dict[str, list[float]] = {"focus": [], "dense": []}
    for _ in range(options.repeats):
        in_turns["focus"].append(timed(ours))
        in_turns["dense"].append(timed(dense))
    apart = {
        "focus": [timed(ours) for _ in range(options.repeats)],
        "dense": [timed(dense) for _ in range(options.repeats)],
    }
    ids = torch.randint(GROUPS, (1, 1, options.length, 1), device="cuda")
    kernels = kernels_of(lambda: ours(ids))
    for _ in range(4):  # to the power limit
        timed(dense)
    after_dense = kernels_of(lambda: ours(ids), after=lambda: dense(ids))
    record: dict[str, Any] = {
        "length": options.length,
        "in_turns": {name: spread(times) for name, times in in_turns.items()},
        "apart": {name: spread(times) for name, times in apart.items()},
        "kernels_ms": sum(row["us"] for row in kernels) / 1e3,
        "kernels": kernels,
        "kernels_ms_after_dense": sum(row["us"] for row in after_dense) / 1e3,
        "kernels_after_dense": after_dense,
    }
    for row, then in zip(kernels, after_dense, strict=True):
        print(f"{row['gap_us']:8.1f} {row['us']:9.1f} us, {then['us']:9.1f} after a dense call  {row['kernel']}")
    for name in ("in_turns", "apart"):
        focus, other = (record[name][side]["median_ms"] for side in ("focus", "dense"))
        print(f"{name}: {focus:.2f} ms, dense {other:.2f}: {other / focus:.2f}x")
    write_json(options.json, record)


if __name__ == "__main__":
    main()
