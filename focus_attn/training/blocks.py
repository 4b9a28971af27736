"""Tokens to training blocks: cut inside documents, short ones packed side by side, in an order that a seed fixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from focus_attn.training.data import TokenStore

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
        """`input_ids` [T]; `segments` [T] beside them where blocks may be packed."""
        pieces = [self.store.ids[first:last].astype(np.int64) for first, last in self.spans[index]]
        missing = self.length - sum(map(len, pieces))
        ids = np.concatenate([*pieces, np.zeros(missing, dtype=np.int64)])
        block = {"input_ids": torch.from_numpy(ids)}
        if self.packed:
            numbers = [*range(len(pieces)), PADDING]
            sizes = [*map(len, pieces), missing]
            block["segments"] = torch.from_numpy(np.repeat(numbers, sizes))
        return block

    def rows(self, count: int) -> Tensor:
        """The ids of up to `count` blocks, evenly spread, that are one document's, [n, T]."""
        whole = [index for index, spans in enumerate(self.spans) if spans[0][1] - spans[0][0] == self.length]
        count = min(count, len(whole))
        chosen = [whole[index * len(whole) // count] for index in range(count)]
        rows = [self[index]["input_ids"] for index in chosen]
        return torch.stack(rows) if rows else torch.empty(0, self.length, dtype=torch.int64)


def cut_blocks(store: TokenStore, length: int, *, packing: bool, shortest: int) -> Blocks:
    """Non-overlapping blocks. What is left of a document goes into packed blocks, or is dropped without `packing`.

    Args:
        shortest: pieces below this are left out of packed blocks: inside the window there is nothing to route.
    """
    whole: list[list[Span]] = []
    rest: list[Span] = []
    for first, last in store.documents.tolist():
        end = first + (last - first) // length * length
        whole += [[(start, start + length)] for start in range(first, end, length)]
        rest.append((end, last))
    spans = whole + (_pack(rest, length, shortest) if packing else [])
    if not spans:
        cure = "lower `length` or give longer documents" if packing else "lower `length`, or set `packing: true`"
        raise ValueError(
            f"{store.name}: no document reaches one block of {length:,} tokens, the longest of "
            f"{len(store.documents):,} has {store.longest:,}: {cure}"
        )
    return Blocks(store, length, spans, packing)


def _pack(pieces: list[Span], length: int, shortest: int) -> list[list[Span]]:
    """Fill blocks in order. A piece that does not fit is cut if both parts are long enough to teach, else it waits."""
    blocks: list[list[Span]] = []
    block: list[Span] = []
    room = length
    for first, last in pieces:
        while last - first >= shortest:
            fits = last - first <= room
            cut = last if fits else first + room
            if not fits and (room < shortest or last - cut < shortest):
                blocks.append(block)
                block, room = [], length
                continue
            block.append((first, cut))
            room -= cut - first
            first = cut
            if room == 0:
                blocks.append(block)
                block, room = [], length
    return [*blocks, block] if block else blocks


class ShuffledBlocks(Dataset):
    """Blocks in an order that depends on the seed alone, epoch after epoch, as many as a run takes.

    Item i is the same whenever it is asked for, so the position in the data is a number.
    """

    def __init__(self, blocks: Blocks, seed: int, count: int) -> None:
        self.blocks, self.seed, self.count = blocks, seed, count
        self._epoch, self._order = -1, torch.empty(0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, place = divmod(index, len(self.blocks))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.blocks), generator=generator)
        return self.blocks[int(self._order[place])]
