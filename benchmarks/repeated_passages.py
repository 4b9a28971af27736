"""What an adapter costs where a text repeats itself, beside what it costs on the text as it is.

    python benchmarks/repeated_passages.py --adapter k8 --adapter runs/mine --test books/valid --length 1024 \
        --blocks 8 --json results/repeats_cpu.json

Three tenths of each block's tokens are replaced by passages of its own from beyond the window (`training/repeats.py`).
A passage can be foreseen from its fifth token on, by whoever can look back to where it stood: the mean loss there, for
the base model and for each adapter.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from adapter_figures import blocks, documents
from torch import Tensor, nn

from focus_attn import FocusModel, load_default_model
from focus_attn.bench.record import write_json
from focus_attn.evaluation import block_perplexity
from focus_attn.evaluation.perplexity import token_losses
from focus_attn.training.repeats import repeat_passages
from focus_attn.zoo import find_adapter

SHARE, FORESEEN = 0.3, 5


def foreseen(ids: Tensor, repeated: Tensor) -> Tensor:
    """[N, T] whether a token is the fifth or a later one of a passage. A token that happens to be the same as before
    belongs to the passage around it."""
    differs = ids != repeated
    inside = differs | (differs.roll(1, 1) & differs.roll(-1, 1))
    place = torch.zeros(len(ids), dtype=torch.int64)
    late = torch.zeros_like(inside)
    for at in range(ids.shape[1]):
        place = torch.where(inside[:, at], place + 1, 0)
        late[:, at] = place >= FORESEEN
    return late & differs


@torch.no_grad()
def loss_at(model: nn.Module, ids: Tensor, chosen: Tensor) -> float:
    lm = model.base_model if isinstance(model, FocusModel) else model
    device = next(model.parameters()).device
    losses = [
        token_losses(lm, row[None].to(device), 0).cpu()[which[1:]] for row, which in zip(ids, chosen, strict=True)
    ]
    return torch.cat(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--adapter", action="append", default=[], help="a shipped one or a folder; may be given several times"
    )
    parser.add_argument("--test", type=Path, required=True, help="a file, a folder, or NAME.npy beside NAME_len.npy")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, tokenizer = load_default_model(device=device)
    ids = blocks(documents(options.test, tokenizer), options.length, options.blocks)
    window = 128
    repeated = torch.stack(
        [
            repeat_passages(row, None, SHARE, window + 1, torch.Generator().manual_seed(2000 + index))
            for index, row in enumerate(ids)
        ]
    )
    chosen = foreseen(ids, repeated)
    plain = block_perplexity(base, ids, window=window).ppl
    rows: list[dict[str, Any]] = [{"adapter": None, "ppl": plain, "repeated_loss": loss_at(base, repeated, chosen)}]
    for name in options.adapter:
        model = FocusModel.from_pretrained(base, find_adapter(name))
        if model.focus_config.window != window:
            raise SystemExit(f"{name} has a window of {model.focus_config.window}: passages come from beyond {window}")
        found = block_perplexity(model, ids)
        one = {"adapter": Path(name).name, "ppl": found.ppl, "ratio": found.ppl / plain, "pairs_kept": found.pairs_kept}
        rows.append(one | {"repeated_loss": loss_at(model, repeated, chosen)})
        base = model.unload()
        print(rows[-1], flush=True)
    write_json(
        options.json,
        {"length": options.length, "blocks": len(ids), "share": SHARE, "tokens": int(chosen.sum()), "rows": rows},
    )


if __name__ == "__main__":
    main()
