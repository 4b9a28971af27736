"""Perplexity as requests: blocks that do not overlap, or windows that stride over the text.

Blocked, the predictions from position `window + 1` on count, by buckets of position: nearer ones see everything they
would see without Focus. Strided, only the last `stride` predictions of each window count, so that each has nearly the
whole length before it and (but for the start of a document) every token is predicted once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from focus_attn.evaluation.perplexity import first_token
from focus_attn.evaluation.requests import Item, Requests, Task


def blocked(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    length: int,
    window: int,
    max_blocks: int | None = None,
) -> Requests:
    """Non-overlapping blocks of `length` tokens, each inside one document; what is left over is dropped."""
    if window < 0:
        raise ValueError(f"the window must be at least 0, got {window}")
    if length < window + 2:
        raise ValueError(f"blocks of {length} tokens have nothing past a window of {window}: use a longer length")
    edges = position_edges(length, window)
    settings = {"length": length, "window": window, "protocol": "blocked"}
    task = Task(f"perplexity@{length}", "text_losses", "perplexity", settings)
    return _windows(tokenizer, documents, task, length, None, window + 1, edges, max_blocks)


def strided(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    length: int,
    stride: int,
    max_windows: int | None = None,
) -> Requests:
    """Windows of `length` tokens that begin every `stride` tokens of a document."""
    if not 0 < stride < length:
        raise ValueError(f"the stride must lie between 0 and the length of {length} tokens, got {stride}")
    settings = {"length": length, "stride": stride, "protocol": "strided"}
    task = Task(f"perplexity@{length}/{stride}", "text_losses", "perplexity", settings)
    first = length - stride
    return _windows(tokenizer, documents, task, length, stride, first, [first], max_windows)


def position_edges(length: int, window: int) -> list[int]:
    """Where buckets of position begin: 1, past the window, the powers of two above it, half the length."""
    powers = [1 << n for n in range(length.bit_length()) if window + 1 < 1 << n < length]
    return sorted({1, window + 1, *powers, max(window + 1, length // 2)})


@functools.lru_cache(maxsize=1)  # a text is asked for in several lengths
def _document_ids(tokenizer: PreTrainedTokenizerBase, documents: tuple[str, ...]) -> list[list[int]]:
    return [tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"] for document in documents]


def _windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    task: Task,
    length: int,
    step: int | None,
    first: int,
    edges: list[int],
    most: int | None,
) -> Requests:
    """`step`: from one window to the next; None: they do not overlap."""
    begin = first_token(tokenizer)
    inner = length - len(begin)
    places: list[tuple[int, int, list[int]]] = []
    longest = 0
    for number, ids in enumerate(_document_ids(tokenizer, tuple(documents))):
        longest = max(longest, len(ids))
        starts = range(0, len(ids) - inner + 1, step or inner)
        places += [(number, start, begin + ids[start : start + inner]) for start in starts]
    if not places:
        raise ValueError(
            f"no document reaches {length} tokens, the longest has {longest}: give longer ones or a smaller --length"
        )
    if most is not None and most < len(places):
        places = [places[index * len(places) // most] for index in range(most)]
    items = []
    for number, start, ids in places:
        whole, before = (tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in (ids, ids[:first]))
        spelled = len(str(whole).encode()) - len(str(before).encode())
        answer = {"first": first, "length": length, "bytes": max(1, spelled)}
        items.append(Item(task.name, f"{number}:{start}", "losses", ids, options={"edges": edges}, answer=answer))
    return Requests({task.name: task}, items)
