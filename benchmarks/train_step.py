"""A training step on long text: routers through sparse attention, against the same step through dense attention.

    python benchmarks/train_step.py --text books/test --lengths 8192,32768 --json results/train_h200/step.json

Both sides run the model forward, predict the next token past the window, and go back through every layer; the base is
frozen. Focus has its routers, their terms and 512 probes on top (`recipes/k8.yaml`). The dense side has none of that:
its gradients end at the embeddings.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from adapter_figures import blocks, documents
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from focus_attn import load_default_model
from focus_attn.bench.peers import SDPA
from focus_attn.bench.record import write_json
from focus_attn.bench.timing import Contender, Measured, race
from focus_attn.model import FocusModel
from focus_attn.training.checkpoint import base_parameters
from focus_attn.training.loss_gradients import grad_from_embeddings
from focus_attn.training.step import StepOptions, training_step
from focus_attn.training.token_losses import Head, next_token_loss
from focus_attn.zoo import cast_parameters

OPTIONS = StepOptions(budget=0.195, largest_group=0.22, probes=512)
DENSE = {f"dense, {name}": kind for name, kind in (SDPA["cudnn"], SDPA["flash"])}


def focus_step(model: FocusModel, ids: Tensor) -> None:
    model.zero_grad()
    training_step(model, ids, options=OPTIONS).loss.backward()


def dense_step(model: FocusModel, ids: Tensor) -> None:
    with grad_from_embeddings(model.base_model), model.disable_focus():
        answer = model.base_model.get_decoder()(input_ids=ids, use_cache=False)  # type: ignore[operator]
        window = model.focus_config.window
        hidden, targets = answer.last_hidden_state[:, window:-1].flatten(0, 1), ids[:, window + 1 :].flatten()
        next_token_loss(Head(model.base_model, answer), hidden, targets).backward()


def contenders(model: FocusModel, ids: Tensor) -> list[Contender]:
    dense = [Contender("dense", partial(dense_step, model, ids))]
    if ids.device.type == "cuda":
        dense = [dense[0]._replace(name=name, context=partial(sdpa_kernel, kind)) for name, kind in DENSE.items()]
    return [*dense, Contender("Focus", partial(focus_step, model, ids))]


def row(length: int, measured: dict[str, Measured]) -> dict[str, Any]:
    times: dict[str, dict[str, Any]] = {
        name: {"ms": 1e3 * one.seconds, "min_ms": 1e3 * min(one.times), "max_ms": 1e3 * max(one.times)}
        | {"peak_GiB": None if one.peak_bytes is None else one.peak_bytes / 2**30}
        for name, one in measured.items()
        if one.times
    }
    fastest = min((name for name in times if name != "Focus"), key=lambda name: times[name]["ms"], default=None)
    speedup = times[fastest]["ms"] / times["Focus"]["ms"] if fastest is not None and "Focus" in times else None
    failed = {name: one.failed for name, one in measured.items() if one.failed}
    return {"length": length, "baseline": fastest, "speedup": speedup, "steps": times, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a file, a folder, or NAME.npy beside NAME_len.npy")
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--adapter", default="k8")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_default_model(adapter=options.adapter, dtype=torch.bfloat16, device=device)
    cast_parameters(base_parameters(model).values(), torch.bfloat16)
    model.train()
    text = documents(options.text, tokenizer)
    rows = []
    for length in map(int, options.lengths.split(",")):
        ids = blocks(text, length, 1).to(device)
        rows.append(row(length, race(contenders(model, ids), options.repeats, device=device)))
        one = rows[-1]
        speedup = "no speed-up to tell" if one["speedup"] is None else f"{one['speedup']:.2f}x over {one['baseline']}"
        print(f"{length:,} tokens: {speedup}; {one['steps']} {one['failed'] or ''}", flush=True)
    write_json(options.json, {"options": str(OPTIONS), "adapter": options.adapter, "rows": rows})


if __name__ == "__main__":
    main()
