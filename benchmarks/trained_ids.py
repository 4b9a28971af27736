"""The ids that an adapter's routers give to a text, for `focus bench attention --skew FILE.json`: groups of real skew.

python benchmarks/trained_ids.py --adapter k8 --text book.txt --json results/ids_k8_books.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from focus_attn import load_default_model
from focus_attn.bench.record import write_json
from focus_attn.evaluation import observe_routing, token_blocks
from focus_attn.text import read_text

ROUTERS = 9  # spread over layers and heads: the bench takes them in turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", default="k8")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    model, tokenizer = load_default_model(adapter=options.adapter)
    block = token_blocks(tokenizer, read_text(options.text), options.length, 1)
    routings = observe_routing(model, block)
    sides = {
        name: torch.cat([getattr(routing, name)[0] for _, routing in sorted(routings.items())])
        for name in ("query_groups", "key_groups")
    }  # [layers * R, T, k]
    count = len(sides["key_groups"])
    chosen = [index * count // ROUTERS + index % 3 for index in range(ROUTERS)]
    write_json(
        options.json,
        {
            "adapter": options.adapter,
            "length": options.length,
            "routers": chosen,  # of the layers' routers laid end to end
            **{name: side[chosen].tolist() for name, side in sides.items()},
        },
    )


if __name__ == "__main__":
    main()
