"""Token ids of documents: what every source of text becomes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenStore:
    """Token ids of documents."""

    ids: np.ndarray  # [tokens], perhaps on disk
    documents: np.ndarray  # [documents, 2]: each is ids[first:last]; one that counts twice stands twice
    digest: str
    name: str
    begin: tuple[int, ...] = ()  # what every block cut from it begins with: <bos> where the tokenizer has one
    answers: np.ndarray | None = None  # [tokens] bool: those that `answer_weight` counts more

    @property
    def tokens(self) -> int:
        return int(self._lengths.sum())

    @property
    def answer_tokens(self) -> int:
        """Tokens of the documents that are answers."""
        return self.answers_in(self.documents.tolist())

    def answers_in(self, places: Iterable[Sequence[int]]) -> int:
        """How many tokens of these spans are answers."""
        marked = self.answers
        return 0 if marked is None else sum(int(marked[first:last].sum()) for first, last in places)

    def with_answers(self, answers: np.ndarray) -> TokenStore:
        """answers: [tokens] bool; where none is, nothing changes."""
        if not answers.any():
            return self
        return dataclasses.replace(self, digest=digest_of([self.digest.encode(), answers.tobytes()]), answers=answers)

    def tensors(self) -> list[Tensor]:
        """The documents' ids."""
        spans = self.documents.tolist()
        return [torch.from_numpy(np.asarray(self.ids[first:last]).astype(np.int64)) for first, last in spans]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self._lengths.max())

    @property
    def _lengths(self) -> np.ndarray:
        return self.documents[:, 1] - self.documents[:, 0]

    def split_off(self, length: int, blocks: int) -> tuple[TokenStore, TokenStore]:
        """What is left, and up to this many blocks of `length` tokens from the ends of the last documents that have
        one: at most a quarter of those that there are. Of such a document, however often it stands here, only what
        still makes a block is left."""
        length -= len(self.begin)
        once = np.unique(self.documents, axis=0)
        blocks = min(blocks, int(((once[:, 1] - once[:, 0]) // length).sum()) // 4)
        left, taken, cuts = [], [], dict[tuple[int, int], int]()
        for first, last in self.documents[::-1].tolist():
            if (first, last) not in cuts:
                cut = last - length * min((last - first) // length, blocks)
                blocks -= (last - cut) // length
                if cut < last:
                    taken.append((cut, last))
                cuts[first, last] = cut
            cut = cuts[first, last]
            if cut == last or cut - first >= length:
                left.append((first, cut))
        parts = (np.array(part[::-1], dtype=np.int64).reshape(-1, 2) for part in (left, taken))
        rest, aside = (dataclasses.replace(self, documents=part) for part in parts)
        return rest, aside


def store_of_ids(ids: np.ndarray, lengths: Iterable[int], name: str) -> TokenStore:
    """Documents of these lengths, end to end. What type the ids have does not show in the digest."""
    offsets = np.cumsum([0, *lengths])
    return TokenStore(ids, spans(offsets), digest_of([ids.astype(np.int64).tobytes(), offsets.tobytes()]), name)


def spans(offsets: np.ndarray) -> np.ndarray:
    """[documents + 1] where documents that touch begin and end -> [documents, 2]."""
    return np.stack([offsets[:-1], offsets[1:]], axis=1)


def digest_of(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()
