"""Where an adapter's answers part from the base model's: how likely each token of those is by both.

    python benchmarks/where_answers_part.py --adapter k8 --requests requests.jsonl.xz --task variables@2048 \
        --scores runs/scores/base.jsonl --json parting.json

Of a task whose answers are generated, what the base model wrote (its file in the folder of `focus eval --output`) is
read again token by token, with Focus and without, up to the last string that was asked for; items where it found none
are left out. Greedy decoding leaves such an answer at the first token that is not the likeliest: there it is said how
likely it was by each. Where even the base model gives it little, an adapter has little to change for another answer.
How far the two are apart over the whole answer is the divergence of Focus's predictions from the base model's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dense_layers import up_to_the_last, with_answers
from torch import Tensor

from focus_attn import FocusModel
from focus_attn.bench.options import read_device
from focus_attn.bench.record import write_json
from focus_attn.evaluation.models import load_compared
from focus_attn.evaluation.requests import Requests
from focus_attn.evaluation.score_file import read_scores


class Read(NamedTuple):
    """What a model makes of an answer's tokens."""

    log_probabilities: Tensor  # [tokens, vocabulary]
    probabilities: Tensor  # [tokens], of the answer's own
    likeliest: Tensor  # [tokens], ids

    @classmethod
    @torch.no_grad()
    def of(cls, model: FocusModel, context: list[int], answer: list[int]) -> Read:
        device = model.get_input_embeddings().weight.device  # type: ignore
        ids = torch.tensor([context + answer], device=device)
        logits = model(input_ids=ids, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
        predicted = logits.log_softmax(-1)
        own = predicted.gather(-1, ids[0, -len(answer) :, None]).squeeze(-1)
        return cls(predicted, own.exp(), predicted.argmax(-1))

    def divergence(self, other: Read) -> float:
        """Of the other's predictions from these, KL, nats a token."""
        apart = torch.nn.functional.kl_div(
            other.log_probabilities, self.log_probabilities, log_target=True, reduction="none"
        )
        return apart.sum(-1).mean().item()


def parting(answer: list[int], read: Read) -> int | None:
    """The first token that greedy decoding would not write."""
    other = [number for number, token in enumerate(answer) if read.likeliest[number] != token]
    return other[0] if other else None


def compare(model: FocusModel, context: list[int], answer: list[int], tokenizer: Any) -> dict[str, Any]:
    with model.disable_focus():
        base = Read.of(model, context, answer)
    focus = Read.of(model, context, answer)
    parts = parting(answer, focus)
    found: dict[str, Any] = {
        "tokens": [tokenizer.decode([token]) for token in answer],
        "base": [round(p, 4) for p in base.probabilities.tolist()],
        "focus": [round(p, 4) for p in focus.probabilities.tolist()],
        "divergence": round(base.divergence(focus), 5),
        "base_parts_at": parting(answer, base),  # other kernels or another precision than wrote it
        "focus_parts_at": parts,
    }
    if parts is not None:
        found["focus_writes"] = tokenizer.decode([int(focus.likeliest[parts])])
    return found


def told(found: dict[str, Any]) -> str:
    answer, at = "".join(found["tokens"]), found["focus_parts_at"]
    if at is None:
        return f"{answer[:60]!r} is what both write"
    return (
        f"{answer[:60]!r}, with Focus up to {found['tokens'][at]!r}, token {at} ({found['base'][at]:.0%} by the base "
        f"model, {found['focus'][at]:.0%} with Focus, which writes {found['focus_writes']!r})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face name or folder; by default the embedded model")
    parser.add_argument("--adapter", required=True, help="a folder, or the name of a shipped adapter")
    parser.add_argument("--requests", type=Path, required=True, help="a file of `focus eval --write-requests`")
    parser.add_argument("--task", required=True, help="of the file")
    parser.add_argument("--scores", type=Path, required=True, help="what the base model wrote: base.jsonl")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    requests = Requests.load(options.requests)
    items = [item for item in requests.items if item.task == options.task and item.kind == "generate"]
    if not items:
        parser.error(f"no generated answers of {options.task!r} in {str(options.requests)!r}")
    written, scores = read_scores(options.scores)
    if written.get("requests") != requests.digest:
        parser.error(f"{str(options.scores)!r} answers other requests than {str(options.requests)!r}")
    items = [item for item in items if item.key in scores]
    answers = {item.key: up_to_the_last(item.answer["strings"], scores[item.key]["text"], 1) for item in items}
    if not any(answers.values()):
        raise SystemExit("the base model found none of the strings: there is no answer to read")
    loaded = load_compared(options.model, [options.adapter], torch.float32, read_device(options.device))
    model, tokenizer = loaded.model.eval(), loaded.tokenizer
    asked = with_answers(items, answers, tokenizer)
    print(f"{options.task}: the base model found something in {len(asked)} of {len(items)} items", flush=True)
    found = []
    for item in asked:
        (answer,) = item.continuations
        one = {"item": item.item, **compare(model, [*requests.whole_context(item)], [*answer], tokenizer)}
        found.append(one)
        print(f"{item.item}: {told(one)}", flush=True)
        divergence = sum(one["divergence"] for one in found) / len(found)
        about = {"adapter": Path(options.adapter).name, "asked": len(items), "divergence": round(divergence, 5)}
        write_json(options.json, {**about, "items": found})
    print(f"divergence from the base model's predictions of its answers: {divergence:.4f} nats a token")


if __name__ == "__main__":
    main()
