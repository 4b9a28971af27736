"""The losses on a model's predictions, a few positions at a time: the logits of a whole batch never exist at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from focus_attn.evaluation.head import decoder_answers
from focus_attn.gradients import first_order
from focus_attn.training.distributed import is_sharded

LOGITS_AT_ONCE = 1 << 25  # elements: 128 MB in fp32, whatever the length and the vocabulary
MORE_ON_CUDA = 4  # times as many there: a chunk takes the host about as long however large it is


class Head:
    """The part of a causal LM behind its decoder: the output projection and whatever else is done to the logits."""

    def __init__(self, lm: nn.Module, decoder_answer: Any) -> None:
        self.lm, self.answer = lm, decoder_answer
        self.decoder: nn.Module = lm.get_decoder()  # type: ignore[operator]
        self.vocabulary: int = lm.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        self.any_id = torch.zeros(1, 1, dtype=torch.long, device=decoder_answer.last_hidden_state.device)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """[n, d] -> [n, V] fp32."""
        answer = type(self.answer)(**{**self.answer, "last_hidden_state": hidden[None]})
        with decoder_answers(self.decoder, answer):
            logits: Tensor = self.lm(input_ids=self.any_id, use_cache=False).logits[0]
        return logits.log_softmax(-1, dtype=torch.float32)

    def total(self, loss: Callable[..., Tensor], *by_position: Tensor) -> Tensor:
        """Sum of `loss` over chunks of positions, by hidden states first. No chunk's logits outlive it."""
        device = by_position[0].device
        step = max(1, LOGITS_AT_ONCE * (MORE_ON_CUDA if device.type == "cuda" else 1) // self.vocabulary)
        chunks = zip(*(x.split(step) for x in by_position), strict=True)
        if torch.is_grad_enabled() and by_position[0].requires_grad and not self.learns:
            total: Tensor = _SumWithGradient.apply(by_position[0], loss, chunks)
            return total
        total = torch.zeros((), device=device)
        for chunk in chunks:  # computed again in the backward pass
            total = total + checkpoint(loss, *chunk, use_reentrant=False, preserve_rng_state=False)
        return total

    @property
    def learns(self) -> bool:
        """Whether something besides the hidden states may want a gradient: weights of the head, or shards of them,
        which come together where autograd sees it."""
        weights = self.lm.get_output_embeddings().parameters()  # type: ignore[operator]
        return any(weight.requires_grad or is_sharded(weight) for weight in weights)


class _SumWithGradient(torch.autograd.Function):
    """A sum over chunks whose gradient by the hidden states is taken chunk by chunk on the way: a sum's gradient is
    there before anyone asks for it, so that nothing is computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Callable[..., Tensor], chunks: Iterable[tuple[Tensor, ...]]) -> Tensor:
        total, gradients = torch.zeros((), device=hidden.device), list[Tensor]()
        for states, *others in chunks:
            with torch.enable_grad():
                states = states.detach().requires_grad_()
                part = loss(states, *others)
                gradients += torch.autograd.grad(part, states)
            total += part.detach()
        ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, by_total: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * by_total, None, None


def next_token_loss(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy. hidden [n, d], targets [n] ids."""

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.nll_loss(head.log_probabilities(hidden), targets, reduction="sum")

    return head.total(loss, hidden, targets) / max(1, len(targets))


def distillation_loss(head: Head, hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """Mean KL(teacher || student) of the predictions, both through the same head. Hidden states [n, d]."""

    def loss(hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = head.log_probabilities(teacher_hidden)
        return nn.functional.kl_div(head.log_probabilities(hidden), teacher, reduction="sum", log_target=True)

    return head.total(loss, hidden, teacher_hidden) / max(1, len(hidden))
