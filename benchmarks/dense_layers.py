"""What each layer costs an adapter: the loss that comes back when it alone sees everything, and each of its KV heads.

    python benchmarks/dense_layers.py --adapter runs/k8_distill --text books/train --json dense_layers.json
    python benchmarks/dense_layers.py --adapter runs/k8 --text books/train --retrieval multi_key --length 1024 \
        --json needle_layers.json
    python benchmarks/dense_layers.py --adapter runs/k8 --requests requests.jsonl.xz --items 64 \
        --task "lambada_openai@4096 shots" --json lambada_layers.json

The loss is that of the text, or with --retrieval that of answers to what was hidden in it, as in `focus eval`, or with
--requests that of the right answers of a task that `focus eval --write-requests` has written; where those are several
strings in any order, that of what the base model writes up to the last right one. It is a choice that comes of this,
`dense_layers` or `dense_heads` of a recipe, so ask what the adapter is not judged by.
What they give back one by one does not add up: the last rows open the best ones together.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from adapter_figures import blocks, documents
from transformers import PreTrainedTokenizerBase

from focus_attn import FocusModel
from focus_attn.bench.options import read_device
from focus_attn.bench.record import write_json
from focus_attn.evaluation.models import load_compared
from focus_attn.evaluation.perplexity import block_perplexity
from focus_attn.evaluation.requests import Item, Requests
from focus_attn.evaluation.retrieval import KINDS, retrieval
from focus_attn.evaluation.scoring import Scorer
from focus_attn.evaluation.tasks import evenly
from focus_attn.router import Routing
from focus_attn.text import read_text
from focus_attn.training.balance import routed_layers

ALL = slice(None)
TOGETHER = 6  # layers, and twice as many heads
DEPTHS = (0.0, 0.25, 0.5, 0.75)  # of hidden facts; at 1 they lie inside the window
ASKABLE = ("choice", "last_word", "exact_continuation", "found_strings")  # measures of tasks with right answers

Loss = Callable[[FocusModel], float]
Opened = Mapping[int, "list[int] | slice"]  # layers, and which of their heads see everything


def text_loss(ids: torch.Tensor) -> Loss:
    """Mean over the predictions past the window of blocks [n, T]."""
    return lambda model: math.log(block_perplexity(model, ids).ppl)


def answer_loss(asked: Requests) -> Loss:
    """Of the answer to each item, all of its tokens; mean over the items."""

    @torch.no_grad()
    def of(model: FocusModel) -> float:
        scorer = Scorer(model, asked)
        scorer.check()
        found = [score["scores"][0][0] for batch in scorer.run(asked.items) for _, score in batch]
        return -sum(found) / len(found)

    return of


@torch.no_grad()
def right_answers(
    model: FocusModel,
    asked: Requests,
    tokenizer: PreTrainedTokenizerBase,
    true: bool = False,
    given: str | None = None,
) -> Requests:
    """Items whose answers are generated, as those with one answer: what the model writes without Focus, up to the last
    string that was asked for. Those where it finds fewer than two are left out: there is nothing to lose. Items with
    an answer stay as they are.

    true: the answer is the strings themselves, one after the other. Where the model seldom finds them they are still
    more or less likely.
    given: the answer of every item, whatever was asked.
    """
    scorer = Scorer(model, asked, tokenizer)
    scorer.check()
    if given is not None:
        answers = {item.key: given for item in asked.items}
    elif asked.items[0].kind != "generate":
        return asked
    elif true:
        answers = {item.key: ", ".join(item.answer["strings"]) for item in asked.items}
    else:
        with model.disable_focus():
            written = {key: score["text"] for batch in scorer.run(asked.items) for key, score in batch}
        answers = {item.key: up_to_the_last(item.answer["strings"], written[item.key], 2) for item in asked.items}
    items = with_answers(asked.items, answers, tokenizer)
    if not items:
        raise SystemExit("the base model finds nothing to compare with: ask for more --items, or for shorter texts")
    return Requests(asked.tasks, items, asked.prefixes)


def up_to_the_last(strings: Sequence[str], text: str, fewest: int) -> str:
    """Nothing where fewer than so many of them are in it."""
    ends = [at + len(one) for one in strings if (at := text.find(one)) >= 0]
    return text[: max(ends)] if len(ends) >= fewest else ""


def with_answers(
    items: Sequence[Item], answers: Mapping[tuple[str, str], str], tokenizer: PreTrainedTokenizerBase
) -> list[Item]:
    """Items whose answers are generated, as those with one answer, where there is one."""
    found = []
    for item in items:
        if answer := answers[item.key].lstrip():
            # The space: some tokenizers drop it from what is written, where a text begins.
            ids = tokenizer.encode(" " + answer, add_special_tokens=False)
            found.append(replace(item, kind="loglikelihood", continuations=[ids], options={}))
    return found


def of_task(requests: Requests, name: str, most: int) -> Requests:
    """Items of one task, spread over it, each with the right answer alone."""
    items = evenly([item for item in requests.items if item.task == name], most)
    if not items or requests.tasks[name].measure not in ASKABLE:
        tasks = ", ".join(repr(task) for task, of in requests.tasks.items() if of.measure in ASKABLE)
        raise SystemExit(f"{name!r} is no task with a right answer to take the loss of; the file has {tasks}")
    right = [
        replace(item, continuations=[item.continuations[item.answer.get("gold", 0)]]) if item.continuations else item
        for item in items
    ]
    prefixes = {item.prefix: requests.prefixes[item.prefix] for item in items if item.prefix is not None}
    return Requests({name: requests.tasks[name]}, right, prefixes)


def measure(model: FocusModel, ask: Loss) -> dict[str, Any]:
    def loss(opened: Opened) -> float:
        def choose(layer: int, routing: Routing) -> Routing:
            heads = opened.get(layer)
            if heads is None:
                return routing
            query, key = routing.query_groups.clone(), routing.key_groups.clone()
            query[:, heads] = key[:, heads] = 0  # all in one group
            return routing._replace(query_groups=query, key_groups=key)

        with model.override_routing(choose):
            return ask(model)

    with model.disable_focus():
        base = ask(model)
    adapter = ask(model)
    print(f"loss {base:.4f} without Focus, {adapter:.4f} with it", flush=True)
    rows: list[dict[str, Any]] = []
    for layer, router in routed_layers(model):
        each = [adapter - loss({layer: [head]}) for head in range(router.num_routers)]
        back = adapter - loss({layer: ALL})
        rows.append({"layer": layer, "gives_back": back, "heads": each})
        print(f"layer {layer:2d} {back:+.4f}   heads {' '.join(f'{x:+.4f}' for x in each)}", flush=True)

    together: list[dict[str, Any]] = []
    best = [row["layer"] for row in sorted(rows, key=lambda row: -row["gives_back"])]
    for count in range(1, min(TOGETHER, len(best)) + 1):
        back = adapter - loss(dict.fromkeys(best[:count], ALL))
        together.append({"layers": best[:count], "gives_back": back})
        print(f"layers {', '.join(map(str, best[:count]))} {back:+.4f}", flush=True)

    heads = sorted(((back, row["layer"], head) for row in rows for head, back in enumerate(row["heads"])), reverse=True)
    heads_together: list[dict[str, Any]] = []
    for count in range(1, min(2 * TOGETHER, len(heads)) + 1):
        chosen = [(layer, head) for _, layer, head in heads[:count]]
        opened = {at: [head for layer, head in chosen if layer == at] for at, _ in chosen}
        back = adapter - loss(opened)
        heads_together.append({"heads": chosen, "gives_back": back})
        print(f"heads {', '.join(f'{layer}.{head}' for layer, head in chosen)} {back:+.4f}", flush=True)
    base_and_adapter = {"base_loss": base, "adapter_loss": adapter}
    return {**base_and_adapter, "layers": rows, "together": together, "heads_together": heads_together}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face name or folder; by default the embedded model")
    parser.add_argument("--adapter", required=True, help="a folder, or the name of a shipped adapter")
    parser.add_argument("--text", type=Path, help="a file, a folder of them, or, of ids, NAME.npy")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--retrieval", choices=KINDS, help="ask for facts hidden in the text")
    parser.add_argument("--requests", type=Path, help="a file of `focus eval --write-requests`: ask its --task")
    parser.add_argument("--task", help="as in 'lambada_openai@4096 shots'")
    parser.add_argument("--items", type=int, default=10, help="with --requests; with --retrieval: a quarter of them")
    parser.add_argument("--seed", type=int, default=3000, help="of those items")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if (options.text is None) == (options.requests is None) or bool(options.requests) != bool(options.task):
        parser.error("give --text, or --requests and --task")
    if options.requests and options.retrieval:
        parser.error("--retrieval hides facts in --text: with --requests name a --task of the file")
    device = read_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = load_compared(options.model, [options.adapter], dtype, device)
    model, tokenizer = loaded.model, loaded.tokenizer
    asked: dict[str, Any] = {"adapter": Path(options.adapter).name}
    if options.requests or options.retrieval:
        if options.requests:
            questions = of_task(Requests.load(options.requests), options.task, options.items)
            asked |= {"task": options.task}
        else:
            texts, lengths = read_text(options.text), [options.length]
            questions = retrieval(tokenizer, options.retrieval, texts, lengths, DEPTHS, options.items, options.seed)
            asked |= {"length": options.length, "retrieval": options.retrieval, "seed": options.seed}
        questions = right_answers(model, questions, tokenizer)
        asked |= {"items": len(questions.items)}
        ask = answer_loss(questions)
    else:
        begins = None if options.text.suffix == ".npy" else tokenizer
        ids = blocks(documents(options.text, tokenizer), options.length, options.blocks, begins)
        asked |= {"length": options.length, "blocks": len(ids)}
        ask = text_loss(ids)
    write_json(options.json, {**asked, **measure(model, ask)})


if __name__ == "__main__":
    main()
