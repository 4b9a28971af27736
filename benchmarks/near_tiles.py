"""The near kernel alone, tile by tile: which rows, keys, warps and stages are fastest on this GPU.

    python benchmarks/near_tiles.py --json results/attention_h200/near_tiles.json

bf16, K = 8, window 128, random ids. `shared`: ids of queries and keys alike, the kernel goes on from what cuDNN saw in
the groups; `per KV head`: other ids for queries and keys and for each KV head, 4 sinks. Times are the profiler's, of
the kernel and of all kernels of a call; outputs are compared with those of the tile that is in use.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from call_timeline import kernels_of

from focus_attn import focus_attention
from focus_attn.attention import call, launch, near_far, recorded
from focus_attn.attention.launch import Tile
from focus_attn.bench.record import write_json

TILES = [
    *(Tile(64, 32, 4, 3), Tile(64, 32, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(64, 16, 4, 4)),
    *(Tile(128, 32, 4, 2), Tile(128, 32, 8, 3), Tile(128, 64, 8, 2)),
]
SHAPES = [("shared", 32, 32, 128), ("shared", 32, 8, 128), ("per KV head", 32, 8, 128), ("per KV head", 9, 3, 64)]
MOST_ERROR = 0.02  # half precision, another order of sums


def milliseconds(attend: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(the near kernel's, all kernels') a call."""
    kernels = kernels_of(lambda: [attend() for _ in range(repeats)])
    near, total = (
        sum(row["us"] for row in kernels if name in row["kernel"]) / repeats / 1e3 for name in ("near_kernel", "")
    )
    return near, total


def measure(kind: str, heads: int, kv_heads: int, width: int, length: int) -> list[dict[str, Any]]:
    q, k, v = (
        torch.randn(1, count, length, width, device="cuda", dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    )
    shared = kind == "shared"
    ids = [torch.randint(8, (1, 1 if shared else kv_heads, length, 1), device="cuda") for _ in range(2)]
    query_ids, key_ids = (ids[0], ids[0]) if shared else ids

    def attend() -> torch.Tensor:
        out = focus_attention(
            q, k, v, query_ids, key_ids, num_groups=8, window=128, num_sinks=0 if shared else 4, backend="triton"
        )
        assert isinstance(out, torch.Tensor)
        return out

    rows, wanted, own_tile = [], attend(), near_far.tile_for
    for tile in TILES:
        launch._setups.clear()
        call._passed.clear()
        with mock.patch.object(
            near_far, "tile_for", lambda kernel, call, tile=tile: tile if kernel == "near" else own_tile(kernel, call)
        ):
            error = (attend() - wanted).abs().max().item()
            if error > MOST_ERROR:
                raise RuntimeError(f"{tile} gives another output: {error}")
            near, total = milliseconds(attend, 20 if length < 32768 else 4)
        setting = {"ids": kind, "heads": heads, "kv_heads": kv_heads, "width": width, "length": length}
        rows.append({**setting, "tile": tile._asdict(), "near_ms": round(near, 4), "all_ms": round(total, 4)})
        print(
            f"{kind}, {heads}/{kv_heads} x {width}, {length:,}: {tuple(tile)} {near:.4f} of {total:.3f} ms", flush=True
        )
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 65536, 262144])
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    rows: list[dict[str, Any]] = []
    with mock.patch.object(recorded, "LONGEST", 0):  # kernel by kernel
        for shape in SHAPES:
            for length in options.lengths:
                rows += measure(*shape, length)
                write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
