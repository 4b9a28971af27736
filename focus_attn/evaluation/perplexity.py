"""Perplexity past the window, in non-overlapping blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from focus_attn.config import FocusConfig
from focus_attn.evaluation.head import predict
from focus_attn.model import FocusModel
from focus_attn.progress import Count
from focus_attn.stats import Stats

LEAK_WARNING = "NOT CAUSAL: the routing sees later tokens, so this is no perplexity of a language model"


@dataclass(frozen=True)
class Perplexity:
    """A measured perplexity and how it was measured."""

    ppl: float
    ppl_last_half: float  # of the predictions in the second half of each block
    tokens: int  # predictions counted
    blocks: int
    length: int
    window: int  # predictions up to this position are not counted
    pairs_kept: float | None  # None: not a Focus model, or Focus is disabled
    leaking: bool
    block_losses: tuple[float, ...] = field(default=(), repr=False)  # mean -log p of each block: what is bootstrapped

    def __str__(self) -> str:
        text = f"perplexity {self.ppl:.2f} ({self.tokens:,} tokens, {self.blocks} blocks of {self.length:,})"
        if self.pairs_kept is not None:
            text += f", {self.pairs_kept:.1%} of pairs kept"
        return f"{text} — {LEAK_WARNING}" if self.leaking else text


def perplexity(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str],
    *,
    length: int = 2048,
    window: int | None = None,
    max_blocks: int | None = None,
    progress: Count | None = None,
) -> Perplexity:
    """Perplexity of `text` (one document, or several) under a causal LM or a FocusModel.

    Every document is cut into non-overlapping blocks of `length` tokens, what is left over is dropped, and the
    tokens from position `window + 1` on are predicted: nearer ones see everything they would see without Focus.

    Args:
        window: by default the FocusModel's own, else that of `FocusConfig()`. Give both of two models that are to be
            compared the same.
        max_blocks: take this many blocks, evenly spread over the text.
    """
    return block_perplexity(model, token_blocks(tokenizer, text, length, max_blocks), window=window, progress=progress)


def token_blocks(
    tokenizer: PreTrainedTokenizerBase, text: str | Sequence[str], length: int, max_blocks: int | None = None
) -> Tensor:
    """Non-overlapping blocks of `length` tokens, each inside one document, [blocks, length] int64. Where the tokenizer
    begins a text with a token of its own, every block begins with it and it is one of the `length`."""
    return blocks_of_documents(tokenizer, text, length, max_blocks)[0]


def blocks_of_documents(
    tokenizer: PreTrainedTokenizerBase, text: str | Sequence[str], length: int, max_blocks: int | None = None
) -> tuple[Tensor, list[int]]:
    """The blocks of `token_blocks`, and the number of the document that each lies in."""
    begin = first_token(tokenizer)
    for name, value, lowest in (("length", length, 1 + len(begin)), ("max_blocks", max_blocks, 1)):
        if value is not None and value < lowest:
            raise ValueError(f"`{name}` must be at least {lowest}, got {value}")
    documents = [text] if isinstance(text, str) else list(text)
    inner = length - len(begin)
    blocks, longest = [], 0
    for number, document in enumerate(documents):
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(ids))
        blocks += [(begin + ids[start : start + inner], number) for start in range(0, len(ids) - inner + 1, inner)]
    if not blocks:
        raise ValueError(
            f"no document reaches one block of {length} tokens, the longest has {longest}: lower `length` or give "
            "longer documents"
        )
    if max_blocks is not None and max_blocks < len(blocks):
        blocks = [blocks[index * len(blocks) // max_blocks] for index in range(max_blocks)]
    taken, numbers = zip(*blocks, strict=True)
    return torch.tensor(taken, dtype=torch.int64), list(numbers)


def first_token(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer begins every text with: [] or a BOS token, as Gemma's and Llama's do. Their models have never
    seen a text without it, and Gemma's go badly astray there."""
    first: list[int] = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


@torch.no_grad()
def block_perplexity(
    model: nn.Module,
    blocks: Tensor,
    *,
    window: int | None = None,
    progress: Count | None = None,
) -> Perplexity:
    """`perplexity` of blocks that are tokens already, [blocks, length]."""
    focus = model if isinstance(model, FocusModel) else None
    if window is None:
        window = focus.focus_config.window if focus else FocusConfig().window
    length = blocks.shape[-1]
    if window < 0:
        raise ValueError(f"`window` must be at least 0, got {window}")
    if length < window + 2:
        raise ValueError(
            f"blocks of {length} tokens have nothing past a window of {window} to predict: use a longer `length`"
        )
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    losses = torch.zeros(length, dtype=torch.float64)  # by position of the predicted token
    by_block: list[float] = []
    kept: list[float] = []
    for done, block in enumerate(blocks, start=1):
        recording: AbstractContextManager[Stats | None] = focus.record_stats() if focus else nullcontext()
        with recording as stats:
            block_losses = token_losses(focus.base_model if focus else model, block[None].to(device), window).cpu()
        losses[window + 1 :] += block_losses
        by_block.append(block_losses.mean().item())
        if stats is not None and stats.per_layer:  # nothing is recorded inside `disable_focus()`
            kept.append(stats.pairs_kept)
        if progress:
            progress(done, len(blocks))
    model.train(was_training)

    def mean_ppl(start: int) -> float:
        return math.exp(losses[start:].sum().item() / ((length - start) * len(blocks)))

    return Perplexity(
        ppl=mean_ppl(window + 1),
        ppl_last_half=mean_ppl(max(window + 1, length // 2)),
        tokens=(length - window - 1) * len(blocks),
        blocks=len(blocks),
        length=length,
        window=window,
        pairs_kept=sum(kept) / len(kept) if kept else None,
        leaking=bool(focus and kept and focus.focus_config.leaks_future()),
        block_losses=tuple(by_block),
    )


def token_losses(lm: nn.Module, ids: Tensor, window: int) -> Tensor:
    """-log p of the tokens from position window + 1 on, [T - window - 1] fp64."""
    answer = lm.get_decoder()(input_ids=ids, use_cache=False)  # type: ignore[operator]
    return -predict(lm, answer, answer.last_hidden_state[0, window:-1], ids[0, window + 1 :]).log_probs
