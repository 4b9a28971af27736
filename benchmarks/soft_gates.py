"""One layer's attention under the soft gates of training, forward and backward: formula, kernels, dense beside them.

    python benchmarks/soft_gates.py --lengths 1024,2048,4096,8192 --json results/soft_gates_h200.json

Shapes are those of SmolLM2-135M by default, one router a layer. The formula keeps numbers for every pair and head;
where it finds no room it says so. TFLOP/s count the products of causal pairs that any attention needs (two forward,
five backward), the same for all, so that they are to be compared, not to be set against a machine's peak.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from focus_attn.attention import multiplicative
from focus_attn.attention.soft import soft_gated_attention
from focus_attn.bench.record import write_json
from focus_attn.bench.timing import Contender, race
from focus_attn.visibility import Pattern, Tokens

PRODUCTS = 7  # of width D for every causal pair: two forward, five backward
FORMULA, KERNELS, ADDITIVE, DENSE = "multiplicative, by its formula", "multiplicative", "additive", "dense (SDPA)"


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    found, multiplicative.kernels_for = multiplicative.kernels_for, lambda *_: None
    try:
        yield
    finally:
        multiplicative.kernels_for = found


def contenders(options: argparse.Namespace, length: int, device: str) -> list[Contender]:
    def make(heads: int) -> Tensor:
        shape = options.batch, length, heads, options.width
        return torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    q, k, v = make(options.heads), make(options.kv_heads), make(options.kv_heads)
    gates = [
        torch.randn(options.batch, 1, length, options.groups, device=device).log_softmax(-1).requires_grad_()
        for _ in range(2)
    ]
    at = torch.arange(length, device=device).expand(options.batch, -1)
    tokens, pattern = Tokens(at, at, plain=True), Pattern(options.groups, window=128)
    grad = torch.randn_like(q)

    def soft(gate: str) -> None:
        out = soft_gated_attention(
            q, k, v, *gates, gate=gate, sharpness=10.0, tokens=tokens, pattern=pattern, scale=options.width**-0.5
        )
        torch.autograd.grad(out, (q, k, v, *gates), grad)

    def dense() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), grad)

    def run(gate: str) -> Callable[[], None]:
        return lambda: soft(gate)

    return [
        Contender(FORMULA, run("multiplicative"), context=without_kernels),
        Contender(KERNELS, run("multiplicative")),
        Contender(ADDITIVE, run("additive")),
        Contender(DENSE, dense),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed: without one there are no kernels, and the formula would race itself")
    device = "cuda"
    rows = []
    for length in map(int, options.lengths.split(",")):
        pairs = options.batch * options.heads * length * (length + 1) / 2
        ways: dict[str, dict[str, Any]] = {}
        for name, one in race(contenders(options, length, device), options.repeats, device=device).items():
            if not one.times:
                ways[name] = {"failed": one.failed}
                continue
            ways[name] = {
                "ms": 1e3 * one.seconds,
                "min_ms": 1e3 * min(one.times),
                "max_ms": 1e3 * max(one.times),
                "tflops": PRODUCTS * 2 * options.width * pairs / one.seconds / 1e12,
                "peak_GiB": None if one.peak_bytes is None else one.peak_bytes / 2**30,
            }
            print(f"{length:,} tokens, {name}: {ways[name]}", flush=True)
        rows.append({"length": length, "ways": ways})
    shape = {name: value for name, value in vars(options).items() if name not in ("json", "lengths")}
    write_json(options.json, {"shape": shape, "rows": rows})


if __name__ == "__main__":
    main()
