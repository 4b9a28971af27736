"""Tables of speed alone: the rows of `focus bench attention`, written and skipped like every other cell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from focus_attn.bench.attention import Sweep
from focus_attn.bench.options import read_numbers, read_options
from focus_attn.compare.store import CellStore
from focus_attn.compare.subject import OutOfTimeError, digest

DEFAULTS = {"lengths": "4096,16384", "groups": "8"}


def bench_cells(
    bench: Mapping[str, Any], store: CellStore, deadline: float, log: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A cell for each K and length. `bench` holds options of `focus bench attention` by their names."""
    options = {**DEFAULTS, **bench}
    lengths, groups = (read_numbers(name, str(options.pop(name))) for name in ("lengths", "groups"))
    for num_groups in groups:
        setting = read_options(lengths=str(lengths[0]), groups=str(num_groups), **options).to_dict()
        keys = {length: digest([setting, options, num_groups, length]) for length in sorted(lengths)}
        missing = [length for length, key in keys.items() if key not in store]
        if missing:
            left = max(1.0, deadline - time.monotonic())
            wanted = read_options(
                lengths=",".join(map(str, missing)), groups=str(num_groups), **{**options, "seconds": min(left, 1e6)}
            )
            for row in Sweep(wanted).rows():
                name = f"K = {num_groups}"
                cell = {"row": name, "length": row.length, "setting": setting, "bench": row.to_dict()}
                store.put(keys[row.length], cell)
                log(f"{name}, {row.length:,} tokens: " + (f"{row.timing.speedup:.2f}x" if row.timing else "no timing"))
        for key in keys.values():
            if key not in store:
                raise OutOfTimeError
            yield store[key]
