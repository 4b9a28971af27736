"""`stock` on the CPU against full causal SDPA: time over length, and the memory of 64K tokens.

    python benchmarks/stock_cpu.py --json results/stock_cpu.json

8 heads x 64, batch 1. Ids are redrawn before every timed call; sorting and planning are inside the timing. Dense and
Focus calls alternate, so that a slow moment of the machine falls on both.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from focus_attn import focus_attention
from focus_attn.bench.record import write_json

HEADS, WIDTH, GROUPS, WINDOW = 8, 64, 8, 128
SETTINGS = {
    "published (shared ids, no sinks)": {"shared": True, "routers": 1, "num_sinks": 0},
    "asymmetric ids, 4 sinks": {"shared": False, "routers": 1, "num_sinks": 4},
    "asymmetric ids per head, 4 sinks": {"shared": False, "routers": HEADS, "num_sinks": 4},
}


def draw(length: int, dtype: torch.dtype, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, length, WIDTH).to(dtype).requires_grad_(grad) for _ in range(3)]


def focus(qkv: list[torch.Tensor], setting: dict[str, Any], backend: str = "stock") -> torch.Tensor:
    shape = 1, setting["routers"], qkv[0].shape[2], 1
    query_groups = torch.randint(0, GROUPS, shape)
    key_groups = query_groups if setting["shared"] else torch.randint(0, GROUPS, shape)
    q, k, v = qkv
    out = focus_attention(
        q,
        k,
        v,
        query_groups,
        key_groups,
        num_groups=GROUPS,
        window=WINDOW,
        num_sinks=setting["num_sinks"],
        backend=backend,
    )
    assert isinstance(out, torch.Tensor)
    return out


def dense(qkv: list[torch.Tensor]) -> torch.Tensor:
    q, k, v = qkv
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def timed(call: Callable[[], torch.Tensor], grad: torch.Tensor | None) -> float:
    start = time.perf_counter()
    out = call()
    if grad is not None:
        out.backward(grad)
    return time.perf_counter() - start


def check_parity(setting: dict[str, Any]) -> float:
    """The same ids through `stock` and the oracle: no speed is reported for a wrong answer."""
    qkv = draw(1500, torch.float32)
    outs = []
    for backend in ("stock", "reference"):
        torch.manual_seed(7)
        outs.append(focus(qkv, setting, backend))
    error = float((outs[0] - outs[1]).abs().max())
    if error > 1e-5:
        raise SystemExit(f"stock differs from the oracle by {error:.1e}: no timing of a wrong answer")
    return error


def measure(length: int, dtype: torch.dtype, backward: bool, repeats: int) -> dict[str, Any]:
    qkv = draw(length, dtype, backward)
    grad = torch.randn(1, HEADS, length, WIDTH).to(dtype) if backward else None
    calls = {"dense": lambda: dense(qkv)} | {
        name: (lambda setting=setting: focus(qkv, setting)) for name, setting in SETTINGS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            seconds = timed(call, grad)
            if repeat:  # the first is warm-up
                times[name].append(seconds)
    medians = {name: statistics.median(t) for name, t in times.items()}
    flops = 4 * HEADS * WIDTH * length * length / 2 * (3.5 if backward else 1)
    return {
        "length": length,
        "dtype": str(dtype).removeprefix("torch."),
        "pass": "forward + backward" if backward else "forward",
        "dense_ms": round(1e3 * medians["dense"], 2),
        "dense_gflops": round(flops / medians["dense"] / 1e9, 1),
        "settings": {
            name: {
                "ms": round(1e3 * medians[name], 2),
                "spread_ms": [round(1e3 * min(times[name]), 2), round(1e3 * max(times[name]), 2)],
                "speedup": round(medians["dense"] / medians[name], 2),
            }
            for name in SETTINGS
        },
    }


def extra_memory(length: int) -> float:
    """GiB that a forward of `length` tokens needs above its inputs: the peak of a process of its own."""
    code = f"from benchmarks.stock_cpu import print_peak; print_peak({length})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(answer.stdout)


def print_peak(length: int) -> None:
    qkv = draw(length, torch.float32)
    focus(draw(2048, torch.float32), SETTINGS["asymmetric ids, 4 sinks"])  # libraries loaded, pools made
    before = peak_memory()
    focus(qkv, SETTINGS["asymmetric ids, 4 sinks"])
    print(peak_memory() - before)


def peak_memory() -> float:
    """GiB. Not ru_maxrss: that starts at the size of the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--backward-lengths", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-length", type=int, default=65536)
    parser.add_argument("--json")
    args = parser.parse_args()
    results: dict[str, Any] = {"shape": f"{HEADS} heads x {WIDTH}, K = {GROUPS}, k = 1, window {WINDOW}, batch 1"}
    results["parity_error"] = max(check_parity(setting) for setting in SETTINGS.values())
    rows = results["rows"] = []
    plan = [(length, dtype, False) for dtype in (torch.float32, torch.bfloat16) for length in args.lengths]
    plan += [(length, torch.float32, True) for length in args.backward_lengths]
    for length, dtype, backward in plan:
        row = measure(length, dtype, backward, args.repeats)
        rows.append(row)
        speedups = "  ".join(f"{name}: {s['speedup']:.2f}x" for name, s in row["settings"].items())
        print(f"{length:6d} {row['dtype']:9s}{row['pass']:19s}dense {row['dense_ms']:9.1f} ms  {speedups}", flush=True)
    if args.memory_length:
        results["extra_memory"] = {"length": args.memory_length, "GiB": round(extra_memory(args.memory_length), 2)}
        print(f"{args.memory_length} tokens: {results['extra_memory']['GiB']} GiB above the inputs")
    if args.json:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
