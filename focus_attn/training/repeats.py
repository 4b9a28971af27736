"""Passages of a block that come once more: what a model finds by looking back, routers have to let it see.

Running text asks for that seldom. A name is likely whether or not its last mention is visible, so routers trained on
books alone learn to do without it, and lose what is said once and asked for thousands of tokens later.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHORTEST, LONGEST = 8, 48  # tokens of a passage: the first few cannot be foreseen, the others can be looked up


def repeat_passages(
    ids: Tensor, segments: Tensor | None, share: float, distance: int, generator: torch.Generator
) -> Tensor:
    """`ids` [T] where about `share` of the tokens are replaced by passages from at least `distance` tokens before.

    segments: [T] which document a token belongs to; a passage and its repetition are one document's.
    """
    repeated = ids.clone()
    slot = round((SHORTEST + LONGEST) / 2 / share)  # on average one passage in so many tokens
    for begin in range(0, len(ids) - LONGEST, slot):
        size, shift = _draw(SHORTEST, LONGEST + 1, generator), _draw(0, max(1, slot - LONGEST), generator)
        to = begin + shift
        latest = to - distance - size
        if latest < 0 or to + size > len(ids):
            continue
        source = _draw(0, latest + 1, generator)
        if segments is not None and not _one_document(segments, source, to + size):
            continue
        repeated[to : to + size] = repeated[source : source + size]
    return repeated


def _draw(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (1,), generator=generator))


def _one_document(segments: Tensor, first: int, last: int) -> bool:
    """Documents stand side by side, so its ends tell."""
    return bool(segments[first] == segments[last - 1])
