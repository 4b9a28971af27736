"""One training step's loss: what the model says through hard routing, what the routing costs, how even it is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from focus_attn.training.balance import largest_shares
from focus_attn.training.narrow import narrow_activations
from focus_attn.training.packing import Packing, check_shape, read_packing
from focus_attn.training.probe import Probe
from focus_attn.training.routing_terms import routing_terms
from focus_attn.training.token_losses import Head, distillation_loss, next_token_loss
from focus_attn.training.watch import RoutingWatch

if TYPE_CHECKING:
    from focus_attn.model import FocusModel

Objective = Literal["lm", "distill", "lm+distill"]
IGNORED = -100  # transformers' label of a token that is not to be predicted


@dataclass(frozen=True)
class StepOptions:
    """What a step asks for. Weights are against a loss in nats a token."""

    objective: Objective = field(
        default="lm", metadata={"help": "next token, the base model's own predictions, or both"}
    )
    distill_weight: float = field(default=1.0, metadata={"help": 'of the base model\'s part in "lm+distill"'})
    answer_weight: float = field(
        default=0.0,
        metadata={"help": "so many times more an answer's token counts: by the base model's predictions if they count"},
    )
    budget: float | None = field(
        default=None,
        metadata={
            "help": "share of the causal pairs to keep, mean over all attention layers, window and sinks included"
        },
    )
    budget_weight: float = field(default=1.0, metadata={"help": "of the pairs above the budget, relative to it"})
    balance_weight: float = field(default=0.0, metadata={"help": "of the way to Sinkhorn's balance over the batch"})
    largest_group: float = field(default=0.40, metadata={"help": "share of the keys that one group may hold"})
    dominance_weight: float = field(
        default=0.3, metadata={"help": "of the keys above that share, relative to it and squared"}
    )
    probes: int = field(default=256, metadata={"help": "queries of a row that also learn from the pairs they drop"})
    probe_weight: float = field(default=1.0, metadata={"help": "of what they learn; at 1 they stand for all queries"})
    stop_gradient: bool = field(
        default=False, metadata={"help": "what routers learn does not go back into the hidden states they see"}
    )

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            choices = ", ".join(map(repr, get_args(Objective)))
            raise ValueError(f"`objective` must be one of {choices}, got {self.objective!r}")
        if self.budget is not None and not 0 < self.budget <= 1:
            raise ValueError(f"`budget` is a share of the causal pairs, between 0 and 1, got {self.budget}")
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name.endswith("_weight") and not value >= 0:
                raise ValueError(f"`{spec.name}` must be 0 or more, got {value}")
        if not 0 < self.largest_group <= 1:
            raise ValueError(f"`largest_group` is a share of the keys, between 0 and 1, got {self.largest_group}")
        if isinstance(self.probes, bool) or not isinstance(self.probes, int) or self.probes < 0:
            raise ValueError(f"`probes` is a number of queries, 0 or more, got {self.probes!r}")
        if not isinstance(self.stop_gradient, bool):
            raise TypeError(f"`stop_gradient` must be true or false, got {self.stop_gradient!r}")


class StepResult(NamedTuple):
    """A loss to differentiate, and what to log and to balance by."""

    loss: Tensor
    measures: dict[str, Tensor]  # detached scalars, on the model's device
    loads: Tensor  # [routed layers, R, K] int64: tokens of this forward that belong to each group


def training_step(
    model: FocusModel,
    input_ids: Tensor,
    *,
    options: StepOptions,
    segments: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    answers: Tensor | None = None,
    exploration_left: float = 1.0,
) -> StepResult:
    """The loss of one batch [B, T] and its measures. Call `backward()` on the loss, then `nudge_bias` after the
    optimiser's step.

    Predictions count from the first token past the window of its document on: nearer ones see everything anyway.

    Args:
        segments: [B, T] which document a token belongs to, negative = padding; a document's tokens stand side by side.
        position_ids: [B, T] positions for the model; without `segments` documents start where they restart.
        labels: [B, T] the tokens themselves where they are to be predicted, -100 elsewhere; default: all of them.
        answers: [B, T] bool, the tokens that count `answer_weight` times more.
        exploration_left: the weight of the probes is multiplied by this, for runs that let it fall from 1 to 0.
    """
    window = model.focus_config.window
    packing = read_packing(input_ids, segments, position_ids)
    if input_ids.shape[1] < window + 2:
        raise ValueError(
            f"{input_ids.shape[1]} tokens have nothing past a window of {window} to predict: train on longer blocks"
        )
    if torch.is_grad_enabled() and not model.training:
        raise ValueError("the model is in eval mode, where routers have no gradient: call `model.train()` first")

    # How many there are has to be read from the device: before it has anything to do, or the host would wait for it.
    predicted, targets = _to_predict(packing, input_ids if labels is None else labels, window)
    in_answers = _in_answers(predicted, answers, input_ids) if options.answer_weight else None
    watch = RoutingWatch(_probe(options, exploration_left, input_ids, window), options.stop_gradient)
    with watch.watching(model), narrow_activations(model.base_model):
        answer = _run_decoder(model, input_ids, packing)
    hidden = _pick(answer, predicted)
    head = Head(model.base_model, answer)

    measures: dict[str, Tensor] = {}
    loss = torch.zeros((), device=input_ids.device)
    if options.objective != "distill":
        measures["lm"] = next_token_loss(head, hidden, targets)
        loss = loss + measures["lm"]
    if options.objective != "lm":
        with torch.no_grad(), model.disable_focus():
            teacher = _pick(_run_decoder(model, input_ids, packing), predicted)
        measures["distill"] = distillation_loss(head, hidden, teacher)
        loss = loss + measures["distill"] * (1.0 if options.objective == "distill" else options.distill_weight)
    if in_answers is not None:
        if options.objective == "lm":
            of_answers = next_token_loss(head, hidden[in_answers], targets[in_answers])
        else:
            of_answers = distillation_loss(head, hidden[in_answers], teacher[in_answers])
        # Their part in the mean over all tokens: it does not depend on how a step is cut into forwards.
        measures["answers"] = of_answers * (len(in_answers) / max(1, len(predicted)))
        loss = loss + options.answer_weight * measures["answers"]

    terms = routing_terms(model, watch.routings, packing, options.largest_group, options.balance_weight > 0)
    measures.update(terms._asdict())
    loads = measures.pop("loads")
    loss = loss + options.balance_weight * terms.imbalance + options.dominance_weight * terms.overfull
    if options.budget is not None:
        measures["over_budget"] = over_budget(terms.pairs_kept, options.budget)
        loss = loss + options.budget_weight * measures["over_budget"]
    watch.watch_backward(model, loss)
    mean, worst = largest_shares(loads)
    measures.update(loss=loss, dominance=mean, worst_dominance=worst)
    return StepResult(loss, {name: value.detach() for name, value in measures.items()}, loads)


def _probe(options: StepOptions, left: float, input_ids: Tensor, window: int) -> Probe | None:
    weight = options.probe_weight * left
    if not (options.probes and weight > 0):
        return None
    return Probe(input_ids.shape[1], window + 1, options.probes, weight, input_ids.device)


def _run_decoder(model: FocusModel, input_ids: Tensor, packing: Packing) -> Any:
    positions = {} if packing.position_ids is None else {"position_ids": packing.position_ids}
    decoder = model.base_model.get_decoder()  # type: ignore[operator]
    return decoder(input_ids=input_ids, use_cache=False, **positions)


def _to_predict(packing: Packing, labels: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Places in the flattened batch that predict, [n], and the token that comes next there, [n]."""
    check_shape("labels", labels, packing.positions)
    wanted = packing.past_window(window) & (labels != IGNORED)
    place = wanted.flatten().nonzero()[:, 0]  # never the first of a document: its position is 0
    return place - 1, labels.flatten()[place]


def _in_answers(predicted: Tensor, answers: Tensor | None, input_ids: Tensor) -> Tensor:
    """Which of the places that predict are followed by a token of an answer, [m]; a batch may have none."""
    if answers is None:
        return predicted[:0]
    check_shape("answers", answers, input_ids)
    return answers.flatten()[predicted + 1].nonzero()[:, 0]


def _pick(answer: Any, places: Tensor) -> Tensor:
    return answer.last_hidden_state.flatten(0, 1).index_select(0, places)


def over_budget(pairs_kept: Tensor, budget: float) -> Tensor:
    """What it costs to keep more than the budget, nothing below it: a price on every pair would drive routers to the
    corner where nothing is shared. Quadratic up to a tenth above, then linear, so that a start far above it is not
    torn down before it has learned anything."""
    excess = (pairs_kept / budget - 1).clamp_min(0)
    return torch.nn.functional.smooth_l1_loss(excess, torch.zeros_like(excess), beta=0.1)
