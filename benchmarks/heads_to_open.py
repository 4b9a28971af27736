"""Which KV heads an adapter misses, found together: what each gives back while all of them are opened.

    python benchmarks/heads_to_open.py --adapter runs/k8_distill --requests requests.jsonl.xz --task multi_value@2048 \
        --task "lambada_openai@4096 shots" --open 5 --json heads_to_open.json

Between an adapter and full attention lies a path along which the pairs that groups hide count more and more, in every
head at once. The loss falls along it, and the gradient by each head's own share of opening says who brought it about:
integrated gradients, which add up to the whole gap but for tokens that change their groups on the way. One backward
pass a step answers for all heads, where `dense_layers.py` asks them one at a time and does not see what heads do
together. The loss is that of right answers, as there; half of the items find the heads, the other half say what opening
them gives back, nothing trained.
It is a choice that comes of this, `dense_heads` of a recipe, so ask what the adapter is not judged by.
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
from focus_attn.baselines.masked import masked_attention, pairs_cost, positions
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
            out, kept = masked_attention(call, lambda start, stop: positions(start, stop, call.q.device)[0] >= 0)
            return out, pairs_cost(call, kept, 0.0)
        opened = self.opened[call.layer_idx]
        out = checkpoint(self._attend, call, opened, use_reentrant=False)  # keeps no [H, T, T] for the backward pass
        return out, pairs_cost(call, call.q.shape[0] * call.shape.heads * call.shape.causal_pairs, 0.0)

    def _attend(self, call: LayerCall, opened: Tensor) -> Tensor:
        rows, heads, length = call.q.shape[:3]
        at = torch.arange(length, device=call.q.device).expand(rows, length)
        routing = self.layers[call.layer_idx](call.hidden)
        seen = visible_mask(routing.query_groups, routing.key_groups, Tokens(at, at), self.pattern)
        seen = seen.repeat_interleave(heads // seen.shape[1], dim=1)
        share = opened.repeat_interleave(heads // len(opened))[:, None, None]
        weight = (
            torch.where(seen, 1.0, share).log().masked_fill(at[:, None, :, None] < at[:, None, None, :], -torch.inf)
        )
        scores = call.q @ call.keys.transpose(-1, -2) * call.scale
        if call.softcap is not None:
            scores = call.softcap * (scores / call.softcap).tanh()
        scores = scores.float() + weight
        if call.sink_logits is not None:
            sink = call.sink_logits.float().view(1, -1, 1, 1).expand(rows, heads, length, 1)
            scores = torch.cat([scores, sink], dim=-1)
        return scores.softmax(-1)[..., :length].to(call.v.dtype) @ call.values


class Opening:
    """An adapter's losses on the way to full attention."""

    def __init__(self, model: FocusModel) -> None:
        config = model.focus_config
        self.model = model
        self.layers = {layer.spec.layer_idx: layer for layer in model.focus_layers() if layer.router is not None}
        self.pattern = Pattern(config.num_groups, config.window, config.num_sinks)
        self.heads = next(iter(self.layers.values())).spec.num_kv_heads
        self.device = next(model.parameters()).device

    def at(self, share: float) -> Tensor:
        return torch.full((max(self.layers) + 1, self.heads), share, device=self.device)

    def opening(self, heads: Iterable[Head]) -> Tensor:
        opened = self.at(0.0)
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
        total = self.at(0.0)
        for question in questions:
            for step in range(steps):
                opened = self.at((step + 0.5) / steps).requires_grad_()
                (gradient,) = torch.autograd.grad(self.loss(question, opened), opened)
                total -= gradient / steps
        return total / len(questions)


def questions_of(asked: Requests, device: torch.device) -> list[Question]:
    found = []
    for item in asked.items:
        before = [] if item.prefix is None else list(asked.prefixes[item.prefix])
        answer = list(item.continuations[0])
        found.append(Question(torch.tensor([*before, *item.context, *answer], device=device), len(answer)))
    return found


def find(path: Opening, asked: Mapping[str, Sequence[Question]], count: int) -> dict[str, Any]:
    """The heads that give back most, of all tasks alike, and what `count` of them together give back elsewhere."""
    shares = path.at(0.0)
    tasks: dict[str, Any] = {}
    for name, questions in asked.items():
        finding = questions[::2]
        closed, open_ = (path.mean_loss(finding, path.at(share)) for share in (0.0, 1.0))
        each = path.gives_back(finding)
        if closed - open_ > LEAST_GAP:
            shares += each / (closed - open_)
        tasks[name] = {"items": len(finding), "adapter_loss": closed, "open_loss": open_, "heads": each.tolist()}
        print(f"{name}: {closed:.3f} with groups, {open_:.3f} without; best {named(best(each, 8))}", flush=True)
    ranked = best(shares, count)
    print(f"over all of them: {named(ranked)}", flush=True)
    for name, questions in asked.items():
        rest = questions[1::2]
        if rest:
            closed, open_, chosen = (
                path.mean_loss(rest, opened) for opened in (path.at(0.0), path.at(1.0), path.opening(ranked))
            )
            tasks[name]["other_items"] = {"adapter_loss": closed, "open_loss": open_, "with_heads_open": chosen}
            print(f"{name}, other items: {closed:.3f}, {open_:.3f} all open, {chosen:.3f} with these", flush=True)
    return {"open": ranked, "tasks": tasks}


def best(each: Tensor, count: int) -> list[Head]:
    """Those that give back something, the most first. A head that is dense already gives back nothing."""
    order = each.flatten().argsort(descending=True).tolist()[:count]
    return [divmod(index, each.shape[1]) for index in order if each.flatten()[index] > 0]


def named(heads: Iterable[Head]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face name or folder; by default the embedded model")
    parser.add_argument("--adapter", required=True, help="a folder, or the name of a shipped adapter")
    parser.add_argument("--requests", type=Path, required=True, help="a file of `focus eval --write-requests`")
    parser.add_argument("--task", action="append", required=True, help="of the file; repeat it")
    parser.add_argument("--items", type=int, default=24, help="of each task; every other one checks what was found")
    parser.add_argument("--open", type=int, default=5, help="heads to name")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    device = read_device(options.device)
    loaded = load_compared(options.model, [options.adapter], torch.float32, device)
    model = loaded.model.eval().requires_grad_(False)
    requests = Requests.load(options.requests)
    asked = {}
    for task in options.task:
        of = of_task(requests, task, options.items)
        if of.items[0].kind == "generate":
            of = right_answers(model, of, loaded.tokenizer)
        asked[task] = questions_of(of, device)
    write_json(options.json, {"adapter": Path(options.adapter).name, **find(Opening(model), asked, options.open)})


if __name__ == "__main__":
    main()
