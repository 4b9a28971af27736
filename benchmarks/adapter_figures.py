"""Train a recipe and measure it on text it has not seen: the figures of the shipped adapters.

    python benchmarks/adapter_figures.py recipes/k8.yaml --train books/train --train docs --test books/test \
        --elsewhere wiki.test.raw --seed 0 --save runs/k8 --json results/k8.json

Texts are files, folders, or token ids (`NAME.npy` beside `NAME_len.npy`: its documents' lengths; to train on, perhaps
with `NAME_completion_mask.npy` of base_answers.py). Perplexity is as in `block_perplexity`: non-overlapping blocks
inside a document, predictions past the window, against the frozen model without Focus on the same blocks.
`--go-on-from` trains an adapter further instead of starting a new one; with `--measure-alone` it is measured as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from focus_attn import FocusModel, load_default_model
from focus_attn.bench.options import read_device
from focus_attn.bench.record import write_json
from focus_attn.evaluation import Perplexity, block_perplexity, group_shares, perplexity_ratio
from focus_attn.evaluation.perplexity import first_token
from focus_attn.training import Recipe, probe_groups, train
from focus_attn.training.blocks import Blocks, cut_blocks
from focus_attn.training.checkpoint import base_parameters
from focus_attn.training.data import Sources, open_tokens
from focus_attn.training.documents import read_documents
from focus_attn.training.recipe import Data
from focus_attn.training.token_file import read_tokens
from focus_attn.zoo import cast_parameters, find_adapter


def load_default_on(asked: str | None) -> tuple[Any, Any]:
    """The embedded default and its tokenizer on a device, in the dtype that this one is quick in."""
    device = read_device(asked)
    return load_default_model(dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)


def documents(path: Path, tokenizer: Any) -> list[torch.Tensor]:
    if path.suffix == ".npy":
        return read_tokens(path)
    texts = list(read_documents(path, "text"))
    return [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]


def blocks(texts: list[torch.Tensor], length: int, most: int, tokenizer: Any = None) -> torch.Tensor:
    """At most this many blocks [n, length], evenly spread. tokenizer: they begin as it begins a text."""
    return _cut(texts, length, tokenizer).rows(most)


def _cut(texts: list[torch.Tensor], length: int, tokenizer: Any = None) -> Blocks:
    store = open_tokens(texts, tokenizer, Data())
    if tokenizer is not None:  # ids are taken as they are: they do not say how a text begins
        store = dataclasses.replace(store, begin=tuple(first_token(tokenizer)))
    return cut_blocks(store, length, packing=False, shortest=length)


def compared(focus: Perplexity, base: Perplexity, documents: list[int] | None = None) -> dict[str, Any]:
    """documents: which one each block is of; blocks of one are drawn together."""
    return {
        "base_ppl": base.ppl,
        "ppl": focus.ppl,
        "ratio": perplexity_ratio(base.block_losses, focus.block_losses, together=documents).to_dict(),
        "last_half_ratio": focus.ppl_last_half / base.ppl_last_half,
        "pairs_kept": focus.pairs_kept,
        "length": focus.length,
        "tokens": focus.tokens,
    }


def largest_groups(model: FocusModel, held_out: torch.Tensor) -> dict[str, float]:
    """Share of the keys in a router's largest group, over the layers and key/value heads that are not dense."""
    config, groups = model.focus_config, probe_groups(model, held_out).values()
    largest = torch.cat([group_shares(ids, config.num_groups).amax(-1) for ids in groups]) / config.key_top_k
    return {"mean": largest.mean().item(), "worst": largest.max().item(), "tokens": held_out.numel()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--train", type=Path, action="append", default=[], help="may be given several times")
    parser.add_argument("--test", type=Path, required=True, help="measured at 8,192 and 2,048 tokens")
    parser.add_argument("--elsewhere", type=Path, help="text of another kind, measured at 2,048 tokens")
    parser.add_argument("--blocks", type=int, default=48, help="of 8,192 tokens; twice as many of 2,048")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--go-on-from", help="a folder, or the name of a shipped adapter")
    parser.add_argument("--measure-alone", action="store_true", help="train nothing: needs --go-on-from")
    parser.add_argument("--save", type=Path, help="where the adapter and its checkpoints go")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if not (options.go_on_from if options.measure_alone else options.save and options.train):
        parser.error("give --train TEXT and --save DIR to train, or --go-on-from ADAPTER --measure-alone")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_default_model(dtype=torch.bfloat16, device=device)
    read = {path: documents(path, tokenizer) for path in (options.test, options.elsewhere) if path}
    asked = {"8192": (options.test, 8192, options.blocks), "2048": (options.test, 2048, 2 * options.blocks)}
    if options.elsewhere:
        asked["elsewhere"] = (options.elsewhere, 2048, 1 << 30)
    cut = {name: _cut(read[text], length) for name, (text, length, _) in asked.items()}
    held_out = {name: cut[name].rows(most) for name, (_, _, most) in asked.items()}
    of = {name: cut[name].documents(most) for name, (_, _, most) in asked.items()}
    base = {name: block_perplexity(model, ids) for name, ids in held_out.items()}

    recipe = dataclasses.replace(Recipe.from_yaml(options.recipe), seed=options.seed, evaluate_every=0)
    if options.go_on_from:
        model = FocusModel.from_pretrained(model, find_adapter(options.go_on_from))
        recipe = dataclasses.replace(recipe, start=None, focus=model.focus_config)
    training: dict[str, Any] = {"trained": "nothing"}
    if not options.measure_alone:
        text = Sources([str(path) for path in options.train])
        result = train(model, text, recipe, tokenizer=tokenizer, output=options.save, device=device)
        if not result.finished:
            raise SystemExit(128 + (result.signal or 0))  # the same command goes on; there is nothing to measure yet
        most = max(stage.tokens for stage in recipe.stages)
        tokens = open_tokens(text, tokenizer, recipe.data, limit=most).tokens
        training = {"recipe": recipe.to_dict(), "train_tokens": tokens, "seconds": result.seconds}
        model = result.model
    cast_parameters(base_parameters(model).values(), torch.bfloat16)  # one that was trained is in fp32
    figures = {name: compared(block_perplexity(model, ids), base[name], of[name]) for name, ids in held_out.items()}
    largest = largest_groups(model, held_out["8192"][:8])
    begun = {"go_on_from": Path(options.go_on_from).name} if options.go_on_from else {}
    write_json(options.json, {**begun, **training, "largest_group": largest, **figures})


if __name__ == "__main__":
    main()
