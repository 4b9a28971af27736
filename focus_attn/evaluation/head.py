"""The part of a causal LM behind its decoder, run on the positions that are asked for and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

LOGITS_AT_ONCE = 1 << 24  # elements: 64 MB in fp32, whatever the length and the vocabulary
MORE_ON_CUDA = 16  # times as many there: a chunk takes the host about as long however large it is


class Predicted(NamedTuple):
    """What a model says of given tokens."""

    log_probs: Tensor  # [n] fp64
    greedy: Tensor  # [n] bool: the token is the likeliest one


@contextmanager
def decoder_answers(decoder: nn.Module, answer: ModelOutput) -> Iterator[None]:
    """Inside, the model is its head alone, on this answer of its decoder: whatever a model does to its logits (a cap, a
    scale) is done, a few positions at a time."""
    before = vars(decoder).get("forward")  # accelerate, for one, puts its own there
    decoder.forward = lambda *args, **kwargs: answer  # type: ignore
    try:
        yield
    finally:
        del decoder.forward
        if before is not None:
            decoder.forward = before


def predict(lm: nn.Module, answer: Any, hidden: Tensor, targets: Tensor) -> Predicted:
    """How likely `targets` [n] are at the hidden states [n, d] before them; `answer` is what they were taken from.

    The logits of more than a chunk of positions never exist at once.
    """
    decoder = lm.get_decoder()  # type: ignore[operator]
    vocabulary = lm.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    step = max(1, LOGITS_AT_ONCE * (MORE_ON_CUDA if hidden.is_cuda else 1) // vocabulary)
    any_id = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
    log_probs, greedy = [], []
    for states, wanted in zip(hidden.split(step), targets.split(step), strict=True):
        with decoder_answers(decoder, type(answer)(**{**answer, "last_hidden_state": states[None]})):
            logits = lm(input_ids=any_id, use_cache=False).logits[0].float()
        log_probs.append(-nn.functional.cross_entropy(logits, wanted, reduction="none"))
        greedy.append(logits.argmax(-1) == wanted)
    return Predicted(torch.cat(log_probs).double(), torch.cat(greedy))
