"""The ways that `stock` can go on a GPU, beside dense attention and the Triton kernels: which is fastest where.

    python benchmarks/stock_cuda.py --json results/attention_h200/stock.json

    flash    batches of sequences through PyTorch's Flash attention (attention/flash.py)
    masked   all pairs before a query, masked
    blocks   Python walks over blocks of queries (attention/pieces.py)

32 heads x 128, bf16, K = 8, window 128, batch 1. Ids are drawn anew before every timed call; planning is inside the
timing. Outputs are compared with Triton's first, gradients too: no timing of a wrong answer.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from focus_attn import focus_attention
from focus_attn.attention import flash, stock
from focus_attn.bench.peers import SDPA
from focus_attn.bench.record import write_json
from focus_attn.bench.timing import Contender, race

GROUPS, WIDTH, HEADS = 8, 128, 32
SETTINGS: dict[str, dict[str, Any]] = {
    "published": {"kv_heads": 32, "routers": 1, "shared": True, "num_sinks": 0},
    "per KV head, 4 sinks": {"kv_heads": 8, "routers": 8, "shared": False, "num_sinks": 4},
}
LONGEST = {"masked": 8192, "blocks": 16384}  # slower ways are not waited for


@contextlib.contextmanager
def going(way: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if way != "flash":
            stack.enter_context(mock.patch.object(flash, "has_kernel", lambda device, dtype: False))
        stack.enter_context(mock.patch.object(stock, "_prefers_mask", lambda call: way == "masked"))
        stack.enter_context(mock.patch.object(stock, "FLASH_FROM", 0))
        yield


def draw_ids(setting: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
    shape = 1, setting["routers"], length, 1
    query_groups = torch.randint(0, GROUPS, shape, device="cuda")
    return query_groups, query_groups if setting["shared"] else torch.randint(0, GROUPS, shape, device="cuda")


def measure(name: str, length: int, backward: bool, repeats: int) -> dict[str, Any]:
    setting = SETTINGS[name]
    kv_heads = setting["kv_heads"]
    q, k, v = (
        torch.randn(1, heads, length, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    grad, ids = torch.randn_like(q), [draw_ids(setting, length)]

    def redraw() -> None:
        ids[0] = draw_ids(setting, length)

    def focus(backend: str) -> Tensor:
        options = {"num_groups": GROUPS, "window": 128, "num_sinks": setting["num_sinks"]}
        out = focus_attention(q, k, v, *ids[0], backend=backend, **options)
        assert isinstance(out, Tensor)
        return out

    def dense() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads < HEADS)

    def once(attend: Callable[[], Tensor]) -> list[Tensor]:
        out = attend()
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)] if backward else [out]

    ways = [way for way in ("flash", "masked", "blocks") if length <= LONGEST.get(way, length)]
    contenders = [Contender("triton", lambda: once(lambda: focus("triton")), redraw)]
    for way in ways:
        contenders.append(Contender(way, lambda: once(lambda: focus("stock")), redraw, partial(going, way)))
    for peer in ("flash", "cudnn"):
        context = partial(sdpa_kernel, SDPA[peer][1])
        contenders.append(Contender(f"dense {peer}", lambda: once(dense), context=context))

    want, errors = once(lambda: focus("triton")), {}
    for way in ways:
        with going(way):
            got = once(lambda: focus("stock"))
        errors[way] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
        if not errors[way] < 0.02:
            raise SystemExit(f"{way} differs from Triton by {errors[way]:.1e} at {length}: no timing of a wrong answer")
    measured = race(contenders, repeats, device="cuda")
    row: dict[str, Any] = {"setting": name, "length": length, "pass": "forward + backward" if backward else "forward"}
    row["differs_from_triton_by"] = errors
    for way, one in measured.items():
        row[way] = {"failed": one.failed} if one.failed else {
            "ms": 1e3 * one.seconds, "spread_ms": [1e3 * min(one.times), 1e3 * max(one.times)],
            "peak_gib": (one.peak_bytes or 0) / 2**30,
        }  # fmt: skip
    times = (f"{way} {'failed' if one.failed else f'{1e3 * one.seconds:.2f}'}" for way, one in measured.items())
    print(row["pass"], name, length, "ms:", *times, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 65536, 262144])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for backward, length, name in itertools.product((False, True), options.lengths, SETTINGS):
        if not (backward and length > 65536):
            rows.append(measure(name, length, backward, options.repeats))
            write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
