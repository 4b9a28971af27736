"""What an adapter costs on a model that also has sliding layers: perplexity, and pairs kept in the layers with routers.

    python benchmarks/routed_layers.py --model gemma3-270m --adapter runs/gemma3_270m --test books/test --length 8192 \
        --blocks 12 --json results/train_gemma_cpu.json

Non-overlapping blocks inside a document, evenly spread over the text, predictions past the window, against the same
model without Focus on the same blocks. Losses go beside the JSON (FILE.blocks.jsonl) block by block: the same
command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from adapter_figures import blocks

from focus_attn import FocusModel
from focus_attn.adapters import adapter_digest
from focus_attn.bench.options import read_device
from focus_attn.bench.record import write_json
from focus_attn.compare.models import load_model
from focus_attn.evaluation import perplexity_ratio, token_blocks
from focus_attn.evaluation.perplexity import token_losses
from focus_attn.text import read_text
from focus_attn.training.balance import routed_layers
from focus_attn.training.token_file import read_tokens


@torch.no_grad()
def measure(model: FocusModel, block: torch.Tensor, focus: bool) -> dict[str, Any]:
    """One block [T] with Focus or without: mean losses, and of each layer that has routers what it kept."""
    window = model.focus_config.window
    began = time.perf_counter()
    ids = block[None].to(next(model.parameters()).device)
    kept: dict[str, Any] = {}
    if focus:
        with model.record_stats() as stats:
            losses = token_losses(model.base_model, ids, window)
        routed = [layer for layer in stats.per_layer if layer.group_sizes is not None]
        choosing = {index: router.choosing.tolist() for index, router in routed_layers(model)}
        kept = {
            "pairs_kept": stats.pairs_kept,
            "routed": {layer.layer_idx: layer.pairs_kept for layer in routed},
            "group_sizes": [(layer.group_sizes or [])[i] for layer in routed for i in choosing[layer.layer_idx]],
        }
    else:
        with model.observe_attention(lambda inputs: None):  # the base model's function, in Focus's own seam
            losses = token_losses(model.base_model, ids, window)
    last_half = losses[max(window + 1, len(block) // 2) - window - 1 :]
    seconds = time.perf_counter() - began
    means = {"loss": losses.mean().item(), "last_half": last_half.mean().item(), "predictions": len(losses)}
    return {**means, "seconds": seconds, **kept}


def summary(base: list[dict[str, Any]], focus: list[dict[str, Any]], length: int) -> dict[str, Any]:
    def mean(rows: list[dict[str, Any]], name: str) -> float:
        return sum(row[name] for row in rows) / len(rows)

    def ratio(name: str) -> dict[str, Any]:
        return perplexity_ratio([row[name] for row in base], [row[name] for row in focus]).to_dict()

    per_layer = {layer: sum(row["routed"][layer] for row in focus) / len(focus) for layer in focus[0]["routed"]}
    sizes = torch.tensor([row["group_sizes"] for row in focus]).sum(0)
    largest = sizes.amax(-1) / sizes.sum(-1)
    return {
        "length": length,
        "blocks": len(base),
        "tokens": sum(row["predictions"] for row in base),
        "base_ppl": float(torch.tensor(mean(base, "loss")).exp()),
        "ppl": float(torch.tensor(mean(focus, "loss")).exp()),
        "ratio": ratio("loss"),
        "last_half_ratio": ratio("last_half"),
        "routed_pairs_kept": {"mean": sum(per_layer.values()) / len(per_layer), "by_layer": per_layer},
        "pairs_kept": mean(focus, "pairs_kept"),
        "largest_group": {"mean": largest.mean().item(), "worst": largest.max().item()},
        "seconds_a_block": {"base": mean(base, "seconds"), "focus": mean(focus, "seconds")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="gemma3-270m, default, a hub name or a folder")
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True, help="a text file, a folder of them, or NAME.npy")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()

    base_model, tokenizer = load_model(options.model, torch.bfloat16, read_device(options.device))
    model = FocusModel.from_pretrained(base_model, str(options.adapter))
    text = held_out(options.test, tokenizer, options.length, options.blocks)
    file, adapter = Path(f"{options.json}.blocks.jsonl"), adapter_digest(options.adapter)
    lines = file.read_text().splitlines() if file.exists() else []
    done = {tuple(entry["key"]): entry["row"] for entry in map(json.loads, lines)}

    def row(index: int, focus: bool) -> dict[str, Any]:
        key = (options.model, options.length, hash_of(text[index]), adapter if focus else "base")
        if key not in done:
            done[key] = json.loads(json.dumps(measure(model, text[index], focus)))
            with file.open("a") as out:
                out.write(json.dumps({"key": key, "row": done[key]}) + "\n")
            print(f"block {index + 1} of {len(text)}, {key[-1]}: {done[key]['loss']:.4f}", flush=True)
        return done[key]

    rows = [(row(index, False), row(index, True)) for index in range(len(text))]
    base, focus = map(list, zip(*rows, strict=True))
    trained = options.adapter / "run.json"
    record = json.loads(trained.read_text()) if trained.is_file() else None
    write_json(options.json, {"model": options.model, "training": record, **summary(base, focus, options.length)})


def held_out(path: Path, tokenizer: Any, length: int, count: int) -> torch.Tensor:
    if path.suffix != ".npy":
        return token_blocks(tokenizer, read_text(path), length, count)
    return blocks(read_tokens(path), length, count, tokenizer)


def hash_of(block: torch.Tensor) -> str:
    return hashlib.sha256(block.numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
