"""Which KV heads an adapter misses, found together: what each gives back while all of them are opened.

    python benchmarks/heads_to_open.py --adapter runs/k8_distill --requests requests.jsonl.xz --task multi_value@2048 \
        --task "lambada_openai@4096 shots" --count 5 --json heads_to_open.json

Between an adapter and full attention lies a path along which the pairs that groups hide count more and more, in every
head at once. The loss falls along it, and the gradient by each head's own share of opening says who brought it about:
integrated gradients, which add up to the whole gap but for tokens that change their groups on the way. One backward
pass a step answers for all heads, where `dense_layers.py` asks them one at a time. The loss is that of right answers,
as there, or with `--true` of the hidden facts themselves, where the base model seldom finds them, or with `--answer`
of one text behind every item: where `where_answers_part.py` says that answers part. Half of the items find the heads,
the other half say what opening them gives back, nothing trained.
It is a choice that comes of this, `dense_heads` of a recipe, so ask what the adapter is not judged by. It needs some
six times heads x tokens x tokens x 4 bytes: 4 GB for 9 heads at 4,096 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from dense_layers import of_task, right_answers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from focus_attn import FocusModel
from focus_attn.baselines import Cost, LayerCall, use_baseline
from focus_attn.baselines.full import Full
from focus_attn.baselines.masked import causal_mask, chunk_scores, softmax_with_sinks
from focus_attn.baselines.seam import Kind
from focus_attn.bench.options import read_device
from focus_attn.bench.record import write_json
from focus_attn.evaluation.models import load_compared
from focus_attn.evaluation.requests import Requests
from focus_attn.layer import FocusLayer
from focus_attn.visibility import Pattern, Tokens, visible_mask

STEPS = 5  # of the path, the middle of each
LEAST_GAP = 0.02  # nats: what heads give back of less is noise

Head = tuple[int, int]  # (layer, KV head)


class Question(NamedTuple):
    ids: Tensor  # [T], on the model's device
    answer: int  # the last so many of them


@dataclass(frozen=True)
class PartlyOpen:
    """The adapter's attention, where the pairs that its groups hide count `opened` times in the softmax."""

    layers: Mapping[int, FocusLayer]  # the routed ones
    pattern: Pattern
    opened: Tensor  # [layers, KV heads], 0: the adapter; 1: full attention
    name: ClassVar[str] = "partly open"
    kind: ClassVar[Kind] = "dense"
    causal: ClassVar[bool] = True

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        if call.layer_idx not in self.layers:
            return Full().attend(call)
        opened = self.opened[call.layer_idx]
        out = checkpoint(self._attend, call, opened, use_reentrant=False)  # no [H, T, T] waits for the backward pass
        return out, Cost(call.q.shape[0] * call.shape.dense_multiply_adds, 1.0)

    def _attend(self, call: LayerCall, opened: Tensor) -> Tensor:
        rows, heads, length = call.q.shape[:3]
        at = torch.arange(length, device=call.q.device).expand(rows, length)
        routing = self.layers[call.layer_idx](call.hidden)
        seen = visible_mask(routing.query_groups, routing.key_groups, Tokens(at, at), self.pattern)
        weight = torch.where(seen, 1.0, opened[:, None, None]).log()
        weight = weight.masked_fill(~causal_mask(0, length, call.q.device), -torch.inf)
        scores = chunk_scores(call, 0, length) + weight.repeat_interleave(heads // len(opened), dim=1)
        return softmax_with_sinks(call, scores).to(call.v.dtype) @ call.values


class Opening:
    """The way from an adapter to full attention, and the losses on it."""

    def __init__(self, model: FocusModel) -> None:
        config = model.focus_config
        routed = [layer for layer in model.focus_layers() if layer.router is not None]
        if any(layer.router.num_routers != layer.spec.num_kv_heads for layer in routed):  # type: ignore[union-attr]
            raise SystemExit("this adapter has no router for each KV head, so that single heads cannot be left dense")
        if any(layer.spec.sliding_window is not None for layer in routed):
            raise SystemExit("this adapter routes layers that slide, whose full attention is another: leave those out")
        self.model = model
        self.layers = {layer.spec.layer_idx: layer for layer in routed}
        self.pattern = Pattern(config.num_groups, config.window, config.num_sinks)
        self.heads = max(layer.spec.num_kv_heads for layer in routed)
        self.device = next(model.parameters()).device

    def all_at(self, share: float) -> Tensor:
        return torch.full((max(self.layers) + 1, self.heads), share, device=self.device)

    def only(self, heads: Iterable[Head]) -> Tensor:
        opened = self.all_at(0.0)
        for layer, head in heads:
            opened[layer, head] = 1.0
        return opened

    def loss(self, question: Question, opened: Tensor) -> Tensor:
        with use_baseline(self.model, PartlyOpen(self.layers, self.pattern, opened)):
            logits = self.model(question.ids[None], use_cache=False, logits_to_keep=question.answer + 1).logits[0, :-1]
        return cross_entropy(logits.float(), question.ids[-question.answer :], reduction="sum")

    @torch.no_grad()
    def mean_loss(self, questions: Sequence[Question], opened: Tensor) -> float:
        return sum(self.loss(question, opened).item() for question in questions) / len(questions)

    def gives_back(self, questions: Sequence[Question], steps: int = STEPS) -> Tensor:
        """What each head gives back, in nats, [layers, KV heads]: their sum is about that of opening them all."""
        total = self.all_at(0.0)
        for question in questions:
            for step in range(steps):
                opened = self.all_at((step + 0.5) / steps).requires_grad_()
                (gradient,) = torch.autograd.grad(self.loss(question, opened), opened)
                total -= gradient / steps
        return total / len(questions)


def questions_of(asked: Requests, device: torch.device, last: int | None = None) -> list[Question]:
    """last: the loss is that of so many tokens of an answer, the last ones."""
    found = []
    for item in asked.items:
        (answer,) = item.continuations
        ids = torch.tensor([*asked.whole_context(item), *answer], device=device)
        found.append(Question(ids, min(last or len(answer), len(answer))))
    return found


def find(path: Opening, asked: Mapping[str, Sequence[Question]], count: int) -> dict[str, Any]:
    """The heads that give back most, every task's gap counting alike, and what they give back together elsewhere."""
    shares = path.all_at(0.0)
    tasks: dict[str, Any] = {}
    for name, questions in asked.items():
        finding = questions[::2]
        adapter, full = (path.mean_loss(finding, path.all_at(share)) for share in (0.0, 1.0))
        tasks[name] = {"items": len(finding), "adapter_loss": adapter, "full_loss": full}
        print(f"{name}: {adapter:.3f} with groups, {full:.3f} without", flush=True)
        if adapter - full < LEAST_GAP:
            print(f"{name}: nothing is lost there, so no head can give it back", flush=True)
            continue
        each = path.gives_back(finding)
        shares += each / (adapter - full)
        tasks[name]["heads"] = each.tolist()
        print(f"{name}: {named(best(each, 8))} give back most", flush=True)
    heads = best(shares, count)
    if not heads:
        raise SystemExit(
            "no head gives anything back: the adapter loses nothing on these items, or ask for more --items"
        )
    print(f"over all of them: {named(heads)}", flush=True)
    for name, questions in asked.items():
        rest = questions[1::2]
        adapter, full, opened = (
            path.mean_loss(rest, share) for share in (path.all_at(0.0), path.all_at(1.0), path.only(heads))
        )
        others = {"items": len(rest), "adapter_loss": adapter, "full_loss": full, "loss_with_heads_open": opened}
        tasks[name]["others"] = others
        print(f"{name}, other items: {adapter:.3f}, {full:.3f}; {opened:.3f} with these heads open", flush=True)
    return {"heads": heads, "tasks": tasks}


def best(each: Tensor, count: int) -> list[Head]:
    """Those that give back something, the most first. A head that is dense already gives back nothing."""
    flat = each.flatten()
    order = flat.argsort(descending=True).tolist()[:count]
    return [divmod(index, each.shape[1]) for index in order if flat[index] > 0]


def named(heads: Iterable[Head]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face name or folder; by default the embedded model")
    parser.add_argument("--adapter", required=True, help="a folder, or the name of a shipped adapter")
    parser.add_argument("--requests", type=Path, required=True, help="a file of `focus eval --write-requests`")
    parser.add_argument("--task", action="append", required=True, help="of the file; repeat it")
    parser.add_argument("--items", type=int, default=24, help="of each task; every other one checks what was found")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--true", action="store_true", help="ask for the hidden facts, though the base model miss them")
    what.add_argument("--answer", help="ask every item for this text, such as ' 1. VAR'")
    parser.add_argument("--last", type=int, help="count so many tokens of each answer, the last ones")
    parser.add_argument("--count", type=int, default=5, help="heads to name")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.last is not None and options.last < 1:
        parser.error("--last counts at least one token")
    if options.answer is not None and not options.answer.strip():
        parser.error("--answer needs a text to ask for")
    device = read_device(options.device)
    loaded = load_compared(options.model, [options.adapter], torch.float32, device)
    model = loaded.model.eval().requires_grad_(False)
    path = Opening(model)
    requests = Requests.load(options.requests)
    asked = {}
    for task in dict.fromkeys(options.task):
        chosen = of_task(requests, task, options.items)
        writes = "" if options.true or options.answer else "; where answers are generated, the base model writes them"
        print(f"{task}: {len(chosen.items)} items{writes}", flush=True)
        of = right_answers(model, chosen, loaded.tokenizer, options.true, options.answer)
        if len(of.items) < 2:
            raise SystemExit(f"{task!r} has one item to ask, and it takes two, to find heads by and to check them")
        asked[task] = questions_of(of, device, options.last)
    write_json(options.json, {"adapter": Path(options.adapter).name, **find(path, asked, options.count)})


if __name__ == "__main__":
    main()
