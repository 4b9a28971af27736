"""`triton` on a CUDA GPU against the dense kernels of PyTorch, in one run.

    python benchmarks/triton_cuda.py --json results/triton_h200.json

bf16, batch 1, 32 query heads x 128, window 128. Ids are redrawn before every timed call; sorting, planning and
launching are inside the timing. The baseline is the fastest dense kernel of the run at each length.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from focus_attn import focus_attention
from focus_attn.attention.plan import count_pairs
from focus_attn.bench.record import write_json
from focus_attn.visibility import Pattern, Tokens

HEADS, WIDTH, WINDOW = 32, 128, 128
DENSE = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "Flash": SDPBackend.FLASH_ATTENTION}
SETTINGS = {
    "shared ids, 32 KV heads, no sinks": {"shared": True, "kv_heads": 32, "routers": 1, "num_sinks": 0},
    "ids per KV head, 8 KV heads, 4 sinks": {"shared": False, "kv_heads": 8, "routers": 8, "num_sinks": 4},
}


def draw_ids(length: int, groups: int, setting: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    shape = 1, setting["routers"], length, 1
    query = torch.randint(0, groups, shape, device="cuda")
    return query, query if setting["shared"] else torch.randint(0, groups, shape, device="cuda")


def milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for repeat in range(repeats + 2):  # two to warm up
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if repeat > 1:
            times.append(start.elapsed_time(stop))
    return times


def measure(length: int, groups: int, name: str, backward: bool, repeats: int) -> dict[str, Any]:
    setting = SETTINGS[name]
    heads = HEADS, setting["kv_heads"], setting["kv_heads"]
    qkv = [torch.randn(1, h, length, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for h in heads]
    grad = torch.randn(1, HEADS, length, WIDTH, device="cuda", dtype=torch.bfloat16)

    def run(attention: Callable[[], torch.Tensor]) -> None:
        out = attention()
        if backward:
            torch.autograd.grad(out, qkv, grad)

    def focus(backend: str = "triton", *ids: torch.Tensor) -> torch.Tensor:
        chosen = ids or draw_ids(length, groups, setting)
        options = {"num_groups": groups, "window": WINDOW, "num_sinks": setting["num_sinks"]}
        return focus_attention(*qkv, *chosen, backend=backend, **options)

    def dense(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=setting["kv_heads"] != HEADS)

    rivals = {peer: milliseconds(lambda b=b: run(lambda: dense(b)), repeats) for peer, b in DENSE.items()}
    fastest = min(rivals, key=lambda peer: statistics.median(rivals[peer]))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = milliseconds(lambda: run(focus), repeats)
    peak = torch.cuda.max_memory_allocated() - before
    at = torch.arange(length, device="cuda")[None]
    kept = count_pairs(
        *draw_ids(length, groups, setting), Tokens(at, at), Pattern(groups, WINDOW, setting["num_sinks"])
    )
    pairs, causal = float(kept.double().mean()), length * (length + 1) / 2
    flops = 4 * WIDTH * HEADS * (3.5 if backward else 1) / 1e9
    dense_ms, focus_ms = statistics.median(rivals[fastest]), statistics.median(times)
    return {
        "length": length,
        "K": groups,
        "setting": name,
        "pass": "forward + backward" if backward else "forward",
        "dense": fastest,
        "dense_ms": {peer: round(statistics.median(t), 3) for peer, t in rivals.items()},
        "dense_tflops": round(flops * causal / dense_ms, 1),
        "focus_ms": round(focus_ms, 3),
        "focus_spread_ms": [round(min(times), 3), round(max(times), 3)],
        "focus_tflops": round(flops * pairs / focus_ms, 1),
        "pairs_kept": round(pairs / causal, 4),
        "speedup": round(dense_ms / focus_ms, 2),
        "focus_peak_MiB": round(peak / 2**20, 1),
    }


def parity() -> float:
    """Against the oracle at a small length, bf16: no speed is reported for a wrong answer."""
    worst = 0.0
    for setting in SETTINGS.values():
        q = torch.randn(1, HEADS, 1500, WIDTH, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, setting["kv_heads"], 1500, WIDTH, device="cuda", dtype=torch.bfloat16)
        ids = draw_ids(1500, 8, setting)
        options = {"num_groups": 8, "window": WINDOW, "num_sinks": setting["num_sinks"]}
        got, want = (focus_attention(q, k, k, *ids, backend=name, **options) for name in ("triton", "reference"))
        worst = max(worst, float((got.float() - want.float()).abs().max()))
    if worst > 0.02:
        raise SystemExit(f"triton differs from the oracle by {worst:.1e}: no timing of a wrong answer")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 65536, 262144])
    parser.add_argument("--backward-lengths", type=int, nargs="*", default=[16384, 65536])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    results: dict[str, Any] = {"shape": f"{HEADS} heads x {WIDTH}, bf16, batch 1, window {WINDOW}"}
    results["parity_error"] = parity()
    rows = results["rows"] = []
    plan = [(length, name, False) for name in SETTINGS for length in args.lengths]
    plan += [(length, name, True) for name in SETTINGS for length in args.backward_lengths]
    for length, name, backward in plan:
        row = measure(length, 8, name, backward, args.repeats if length < 200_000 else 2)
        rows.append(row)
        print(
            f"{length:7d} {row['pass']:19s}{name:38s}{row['dense']} {min(row['dense_ms'].values()):9.3f} ms "
            f"({row['dense_tflops']:.0f} TFLOP/s)  Focus {row['focus_ms']:9.3f} ms ({row['focus_tflops']:.0f} TFLOP/s) "
            f"{row['speedup']:.2f}x at {row['pairs_kept']:.1%} of pairs",
            flush=True,
        )
    if args.json:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
