"""Tokens to training blocks: cut inside documents, short ones packed side by side, in an order that a seed fixes.

Every piece of a document begins with what the tokenizer begins a text with (`TokenStore.begin`), counted in its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from focus_attn.training.repeats import repeat_passages
from focus_attn.training.token_store import TokenStore

Span = tuple[int, int]  # from, up to before: places in the store
PADDING = -1  # the segment of what fills a packed block up


@dataclass(frozen=True)
class Blocks:
    """Blocks of `length` tokens, each one document's, or several documents' pieces where they are packed."""

    store: TokenStore
    length: int
    spans: list[list[Span]]
    packed: bool

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids` [T]; `segments` [T] beside them where blocks may be packed, `answers` [T] where there are any."""
        begin = np.array(self.store.begin, dtype=np.int64)
        pieces = [np.concatenate([begin, self.store.ids[first:last]]) for first, last in self.spans[index]]
        missing = self.length - sum(map(len, pieces))
        ids = np.concatenate([*pieces, np.zeros(missing, dtype=np.int64)])
        block = {"input_ids": torch.from_numpy(ids)}
        if self.packed:
            numbers = [*range(len(pieces)), PADDING]
            sizes = [*map(len, pieces), missing]
            block["segments"] = torch.from_numpy(np.repeat(numbers, sizes))
        if self.store.answers is not None:
            none = np.zeros(len(begin), dtype=bool)
            marked = [np.concatenate([none, self.store.answers[first:last]]) for first, last in self.spans[index]]
            block["answers"] = torch.from_numpy(np.concatenate([*marked, np.zeros(missing, dtype=bool)]))
        return block

    @property
    def share(self) -> float:
        """Of the store's tokens, that stand in a block."""
        return sum(last - first for spans in self.spans for first, last in spans) / self.store.tokens

    @cached_property
    def answers(self) -> int:
        """How many of the tokens in blocks are marked as answers."""
        return self.store.answers_in(span for spans in self.spans for span in spans)

    def rows(self, count: int) -> Tensor:
        """The ids of up to `count` blocks, evenly spread, that are one document's, [n, T]."""
        rows = [self[index]["input_ids"] for index in self._spread(count)]
        return torch.stack(rows) if rows else torch.empty(0, self.length, dtype=torch.int64)

    def documents(self, count: int) -> list[int]:
        """Which document of the store each of these `rows` is of."""
        first, last = self.store.documents.T
        starts = np.array([self.spans[index][0][0] for index in self._spread(count)], dtype=np.int64)[:, None]
        return ((first <= starts) & (starts < last)).argmax(1).tolist()

    def _spread(self, count: int) -> list[int]:
        inner = self.length - len(self.store.begin)
        whole = [index for index, spans in enumerate(self.spans) if spans[0][1] - spans[0][0] == inner]
        count = min(count, len(whole))
        return [whole[index * len(whole) // count] for index in range(count)]


def cut_blocks(store: TokenStore, length: int, *, packing: bool, shortest: int) -> Blocks:
    """Non-overlapping blocks. What is left of a document goes into packed blocks, or is dropped without `packing`.

    Args:
        shortest: pieces below this are left out of packed blocks: inside the window there is nothing to route.
    """
    whole: list[list[Span]] = []
    rest: list[Span] = []
    inner = length - len(store.begin)
    for first, last in store.documents.tolist():
        end = first + (last - first) // inner * inner
        whole += [[(start, start + inner)] for start in range(first, end, inner)]
        rest.append((end, last))
    spans = whole + (_pack(rest, length, shortest, len(store.begin), store.answers) if packing else [])
    if not spans:
        needed = f"the {shortest:,} tokens of a packed piece" if packing else f"one block of {length:,} tokens"
        cure = "give longer documents" if packing else "lower `length`, set `packing: true`"
        raise ValueError(
            f"{store.name}: no document reaches {needed}, the longest of {len(store.documents):,} has "
            f"{store.longest:,}: {cure}, or `join: true` where these are the lines of one text"
        )
    return Blocks(store, length, spans, packing)


def _pack(pieces: list[Span], length: int, shortest: int, begin: int, answers: np.ndarray | None) -> list[list[Span]]:
    """Fill blocks in order. A piece that does not fit is cut if both parts are long enough to teach and it has no
    answer, which would stand without its prompt; else it waits. Each takes `begin` tokens more than its own."""
    blocks: list[list[Span]] = []
    block: list[Span] = []
    room = length
    for first, last in pieces:
        while begin + last - first >= shortest:
            fits = begin + last - first <= room
            cut = last if fits else first + room - begin
            whole = answers is not None and begin + last - first <= length and bool(answers[first:last].any())
            if not fits and (whole or room < shortest or begin + last - cut < shortest):
                blocks.append(block)
                block, room = [], length
                continue
            block.append((first, cut))
            room -= begin + cut - first
            first = cut
            if room == 0:
                blocks.append(block)
                block, room = [], length
    return [*blocks, block] if block else blocks


class ShuffledBlocks(Dataset):
    """Blocks in an order that depends on the seed alone, epoch after epoch, as many as a run takes.

    Item i is the same whenever it is asked for, so the position in the data is a number.

    repeats: share of the tokens that are replaced by passages from more than `window` tokens before.
    strange: share of those passages that are random tokens, drawn from `words` too (`repeat_passages`).
    """

    def __init__(
        self,
        blocks: Blocks,
        seed: int,
        count: int,
        *,
        repeats: float = 0.0,
        strange: float = 0.0,
        words: Sequence[Tensor] = (),
        window: int = 0,
    ) -> None:
        self.blocks, self.seed, self.count = blocks, seed, count
        self.repeats, self.strange, self.words, self.window = repeats, strange, words, window
        self._epoch, self._order = -1, torch.empty(0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, place = divmod(index, len(self.blocks))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.blocks), generator=generator)
        block = self.blocks[int(self._order[place])]
        if self.repeats:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
            ids, segments = block["input_ids"], block.get("segments")
            how = len(self.blocks.store.begin), self.strange, self.words
            block["input_ids"] = repeat_passages(ids, segments, self.repeats, self.window + 1, generator, *how)
            if "answers" in block:  # what a passage took the place of is none any more
                block["answers"] &= block["input_ids"] == ids
        return block
