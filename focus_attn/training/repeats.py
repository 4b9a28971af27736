"""Passages of a block that come once more: what a model finds by looking back, routers have to let it see.

Running text asks for that seldom. A name is likely whether or not its last mention is visible, so routers trained on
books alone learn to do without it, and lose what is said once and asked for thousands of tokens later.

A passage of a book can still be guessed in part. A strange one cannot: behind its first words stand others, drawn at
random: words of the block, any the text has, or digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHORTEST, LONGEST = 8, 48  # tokens of a passage: the first few cannot be foreseen, the others can be looked up
MEAN = (SHORTEST + LONGEST) / 2
PART = 1 << 24  # tokens of a text that are read at a time: it may be larger than the memory
CUE = 4  # tokens that a strange passage begins with as it stood: by them it is found again


def repeat_passages(
    ids: Tensor,
    segments: Tensor | None,
    share: float,
    distance: int,
    generator: torch.Generator,
    begin: int = 0,
    strange: float = 0.0,
    words: Sequence[Tensor] = (),
) -> Tensor:
    """`ids` [T] where about `share` of the tokens are replaced by passages from at least `distance` tokens before.

    Documents that are not much longer than `distance` have less of it, or none.

    Args:
        segments: [T] which document a token belongs to; a passage and its repetition are one document's.
        begin: how many tokens every document begins with that are none of its text.
        strange: share of the passages that are made of random tokens, where they first stand too.
        words: [n] ids each, of which such a passage draws its own, all alike; the document's are always among them.
    """
    repeated, taken = ids.clone(), torch.zeros(len(ids), dtype=torch.bool)
    for first, last in _documents(ids, segments):
        first += begin
        earliest, latest = first + distance + SHORTEST, last - LONGEST  # where a repetition may begin
        count = min(round(share * (last - first) / MEAN), (latest - earliest) // (LONGEST + 1))
        for number in range(count):
            slot, next_slot = (earliest + (latest - earliest) * n // count for n in (number, number + 1))
            to = _draw(slot, max(slot + 1, next_slot - LONGEST), generator)
            size = min(_draw(SHORTEST, LONGEST + 1, generator), to - distance - first)
            source = _draw(first, to - distance - size + 1, generator)
            free = not taken[source : source + size].any()  # else one that already came again would not any more
            if strange and free and float(torch.rand((), generator=generator)) < strange:
                source_words = (ids[first:last], *words)[number % (1 + len(words))]
                chosen = torch.randint(len(source_words), (size - CUE,), generator=generator)
                repeated[source + CUE : source + size] = source_words[chosen]
            repeated[to : to + size] = repeated[source : source + size]
            taken[source : source + size] = taken[to : to + size] = True
    return repeated


def strange_words(text: np.ndarray, tokenizer: Any) -> list[Tensor]:
    """What strange passages are made of: all tokens that a text has, however rare, and digits. Numbers are what one
    looks up and what one cannot guess, and books have few."""
    if tokenizer is None:
        raise ValueError("`strange` needs to know which tokens are digits: give the `tokenizer` beside the token ids")
    parts = [np.unique(text[first : first + PART]) for first in range(0, len(text), PART)]
    words = [torch.from_numpy(np.unique(np.concatenate(parts)).astype(np.int64))]
    digits = [number for token, number in tokenizer.get_vocab().items() if token.isascii() and token.isdigit()]
    return [*words, torch.tensor(sorted(digits))] if digits else words


def _documents(ids: Tensor, segments: Tensor | None) -> list[tuple[int, int]]:
    """(from, up to before) of each; they stand side by side."""
    if segments is None:
        return [(0, len(ids))]
    sizes = torch.unique_consecutive(segments, return_counts=True)[1]
    ends = sizes.cumsum(0)
    return list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))


def _draw(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (1,), generator=generator))
