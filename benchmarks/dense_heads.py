"""What it buys to leave layers or single heads dense, at the same pairs: a coverage fit of each choice, measured.

    python benchmarks/dense_heads.py --train books/train --test books/valid --dense none --dense 18,20 \
        --dense 18.2,20.1,20.2 --json results/dense_heads_cpu.json

A choice names layers (18) and KV heads (18.2). What they take of the budget the others do without. No step goes through
the model, so it runs on a CPU, in about eight minutes a choice on two cores. `benchmarks/dense_layers.py` says which
layers and heads are worth asking about.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from adapter_figures import blocks, compared, documents, load_default_on

from focus_attn import FocusConfig, get_focus_model
from focus_attn.bench.record import write_json
from focus_attn.evaluation.perplexity import block_perplexity
from focus_attn.training import fit_coverage


def read_choice(text: str) -> dict[str, Any]:
    """`18,20.1` as fields of a FocusConfig."""
    named = [] if text == "none" else [tuple(map(int, one.split("."))) for one in text.split(",")]
    layers, heads = [one[0] for one in named if len(one) == 1], [one for one in named if len(one) == 2]
    return {"dense_layers": tuple(layers), "dense_heads": tuple(heads)}


def budget_of_others(budget: float, choice: dict[str, Any], layers: int, kv_heads: int) -> float:
    """What the heads that are not dense may keep so that all of them together keep `budget`."""
    dense, everyone = len(choice["dense_layers"]) * kv_heads + len(choice["dense_heads"]), layers * kv_heads
    return (budget * everyone - dense) / (everyone - dense)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--dense", action="append", required=True, help="may be given several times")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=12, help="that the routers are fitted to")
    parser.add_argument("--test-blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--budget", type=float, default=0.285)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    model, tokenizer = load_default_on(options.device)
    lessons = blocks(documents(options.train, tokenizer), options.length, options.blocks)
    held_out = blocks(documents(options.test, tokenizer), options.length, options.test_blocks)
    base = block_perplexity(model, held_out)
    sizes = model.config.num_hidden_layers, model.config.num_key_value_heads

    rows: list[dict[str, Any]] = []
    for text in options.dense:
        began, choice = time.perf_counter(), read_choice(text)
        focus = get_focus_model(model, FocusConfig(normalization="softmax", **choice))
        own = budget_of_others(options.budget, choice, *sizes)
        fit = fit_coverage(focus, lessons, steps=options.steps, budget=own, seed=options.seed)
        figures = compared(block_perplexity(focus, held_out), base)
        model = focus.unload()
        fitted = {"dense": text, "start_budget": own, "covered": fit.covered, "seconds": time.perf_counter() - began}
        rows.append({**fitted, **figures})
        ratio = figures["ratio"]["estimate"]
        print(f"dense {text}: {ratio:.4f} of the base's perplexity at {figures['pairs_kept']:.1%}", flush=True)
        write_json(options.json, {"budget": options.budget, "steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
