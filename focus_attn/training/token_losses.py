"""The losses on a model's predictions, a few positions at a time: the logits of a whole batch never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from focus_attn.evaluation.head import decoder_answers

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
        return logits.float().log_softmax(-1)

    def total(self, loss: Callable[..., Tensor], *by_position: Tensor) -> Tensor:
        """Sum of `loss` over chunks of positions. Each is computed again in the backward pass, not kept."""
        device = by_position[0].device
        step = max(1, LOGITS_AT_ONCE * (MORE_ON_CUDA if device.type == "cuda" else 1) // self.vocabulary)
        total = torch.zeros((), device=device)
        for chunk in zip(*(x.split(step) for x in by_position), strict=True):
            total = total + checkpoint(loss, *chunk, use_reentrant=False, preserve_rng_state=False)
        return total


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
