"""Where a needle is lost: the heads that read it in the base model, and whether an adapter lets them.

    python benchmarks/needle_heads.py --adapter k8 --adapter runs/mine --text book.txt --length 1024 --items 8 \
        --json results/needle_heads.json

For every head: the attention that the tokens predicting a hidden number pay to it in the base model, and how much of
that lies on keys the adapter's routers make visible.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from focus_attn import FocusModel, load_default_model
from focus_attn.bench.record import write_json
from focus_attn.evaluation.requests import Item
from focus_attn.evaluation.retrieval import retrieval
from focus_attn.layer import AttentionInputs
from focus_attn.text import read_text
from focus_attn.zoo import find_adapter

DEPTHS = (0.0, 0.25, 0.5)  # at 1 a needle lies inside the window


def find(ids: Sequence[int], part: Sequence[int]) -> range:
    """Where `part` first stands in `ids`."""
    for first in range(len(ids) - len(part) + 1):
        if list(ids[first : first + len(part)]) == list(part):
            return range(first, first + len(part))
    raise ValueError("the number is not in the text as it is in the answer: the tokenizer joins it to its neighbours")


@torch.no_grad()
def read_by_heads(model: FocusModel, item: Item, digits: Sequence[int]) -> Tensor:
    """[2, layers, H]: attention to the number, and the visible part of it; mean over the tokens that predict it."""
    answer = list(item.continuations[0])
    needle = find(item.context, digits)
    ids = torch.tensor([[*item.context, *answer[:-1]]], device=next(model.parameters()).device)
    asking = torch.arange(len(item.context) - 1, ids.shape[1], device=ids.device)
    routers = {layer.spec.layer_idx: layer.router for layer in model.focus_layers()}
    found: list[Tensor] = []

    def look(inputs: AttentionInputs) -> None:
        q, k = inputs.q[0, :, asking].float() * inputs.scale, inputs.k[0].float()
        each = len(q) // len(k)
        scores = q @ k.repeat_interleave(each, 0).transpose(-1, -2)
        later = torch.arange(ids.shape[1], device=ids.device) > asking[:, None]
        attention = scores.masked_fill(later, float("-inf")).softmax(-1)[..., needle.start : needle.stop]
        router = routers[inputs.layer_idx]
        assert router is not None and inputs.hidden is not None
        routing = router(inputs.hidden)
        queries = routing.query_groups[0][:, asking, None, :, None]
        keys = routing.key_groups[0][:, None, needle.start : needle.stop, None, :]
        shared = (queries == keys).flatten(-2).any(-1)  # [R, asking, digits]
        shared = shared.repeat_interleave(len(q) // len(shared), 0)
        found.append(torch.stack([attention.sum(-1).mean(-1), (attention * shared).sum(-1).mean(-1)]))

    with model.observe_attention(look):
        model.base_model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return torch.stack(found, 1).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", action="append", default=[], help="may be given several times")
    parser.add_argument("--text", type=Path, required=True, help="what the needles are hidden in")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--items", type=int, default=8, help="at each of three depths")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()

    base, tokenizer = load_default_model(device="cuda" if torch.cuda.is_available() else "cpu")
    asked = retrieval(tokenizer, "needle", read_text(options.text), [options.length], DEPTHS, options.items, seed=2000)
    rows: list[dict[str, Any]] = []
    for name in options.adapter or ["k8"]:
        model = FocusModel.from_pretrained(base, find_adapter(name)).eval()
        seen = torch.stack(
            [
                read_by_heads(model, item, tokenizer(item.answer["strings"][0], add_special_tokens=False).input_ids)
                for item in asked.items
            ]
        ).mean(0)
        attention, visible = seen
        best = attention.flatten().argsort(descending=True)[:16].tolist()
        heads = [
            {
                "layer": index // attention.shape[1],
                "head": index % attention.shape[1],
                "attention": attention.flatten()[index].item(),
                "visible": (visible.flatten()[index] / attention.flatten()[index]).item(),
            }
            for index in best
        ]
        rows.append({"adapter": Path(name).name, "visible": (visible.sum() / attention.sum()).item(), "heads": heads})
        print(f"{rows[-1]['adapter']}: {rows[-1]['visible']:.0%} of the attention to needles is visible", flush=True)
        for head in heads:
            print(
                f"  layer {head['layer']:2} head {head['head']}: {head['attention']:.2f}, visible {head['visible']:.0%}"
            )
        base = model.unload()
    write_json(options.json, {"length": options.length, "items": len(asked.items), "rows": rows})


if __name__ == "__main__":
    main()
