"""What a start without a step through the model reaches: coverage, and coverage followed by the fit of the outputs.

    python benchmarks/output_fit.py --train books/train --test books/valid --json results/output_fit_cpu.json

The embedded default, K = 8, fitted to a few blocks and measured on others: perplexity over the base model's,
predictions past the window.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from adapter_figures import blocks, compared, documents

from focus_attn import FocusConfig, get_focus_model, load_default_model
from focus_attn.bench.record import write_json
from focus_attn.evaluation import block_perplexity
from focus_attn.training import fit_coverage

CONFIG = FocusConfig(num_groups=8, window=128, num_sinks=4, router_dim=16, normalization="softmax")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="a file, a folder, or NAME.npy beside NAME_len.npy")
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=12, help="to fit to; half as many are measured")
    parser.add_argument("--budget", type=float, default=0.285)
    parser.add_argument("--output-steps", type=int, default=200)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base_model, tokenizer = load_default_model(dtype=torch.bfloat16, device=device)
    seen = blocks(documents(options.train, tokenizer), options.length, options.blocks)
    held_out = blocks(documents(options.test, tokenizer), options.length, options.blocks // 2)
    model = get_focus_model(base_model, CONFIG)
    with model.disable_focus():
        base = block_perplexity(model, held_out)
    rows: list[dict[str, Any]] = []
    for steps in (0, options.output_steps):
        torch.manual_seed(0)
        fit = fit_coverage(model, seen, budget=options.budget, output_steps=steps)
        focus = compared(block_perplexity(model, held_out), base)
        about = {"covered": fit.covered, "largest_group": fit.largest_group, "lost": fit.lost, "seconds": fit.seconds}
        rows.append({"output_steps": steps, **about, **focus})
        print(
            f"{steps} steps by the outputs: {focus['ratio']['estimate']:.4f} at {focus['pairs_kept']:.1%} of the pairs"
        )
    settings = {name: getattr(options, name) for name in ("length", "blocks", "budget")}
    write_json(options.json, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
