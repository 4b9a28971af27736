"""The texts of a comparison as tokens: one store to train on, one to measure on, which share nothing.

A source is what `focus train` reads (files, folders, hub datasets, builtin) or a token file: NAME.npy with the ids of
all documents end to end and NAME_len.npy beside it with their lengths; text to train on may have
NAME_completion_mask.npy too, a bit for each token: whether it is an answer's. `write_tokens` makes one, so that a
machine without the text or the network can measure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focus_attn.compare.recipe import Dataset
from focus_attn.evaluation.perplexity import first_token
from focus_attn.text import TextSplit, default_text
from focus_attn.training.blocks import Blocks, cut_blocks
from focus_attn.training.data import BUILTIN, TokenStore, check_vocabulary, open_tokens
from focus_attn.training.recipe import Data

TEST_EVERY = 4  # where one source serves both parts, each fourth document by size is measured on
TOKENS_ENOUGH = 40_000_000  # of a hub dataset, which need not end


@dataclass
class Texts:
    """One dataset, tokenised for one model, each part when it is first asked for."""

    dataset: Dataset
    tokenizer: Any
    vocabulary: int  # of the model

    @cached_property
    def train(self) -> TokenStore:
        if self.dataset.train is None:
            return self._split[0]
        return self._checked(_open(self.dataset.train, self.dataset, self.tokenizer))

    @cached_property
    def test(self) -> TokenStore:
        if self.dataset.train is None:
            return self._split[1]
        return self._checked(_open(self.dataset.test, self.dataset, self.tokenizer))

    @cached_property
    def begin(self) -> list[int]:
        """What every block begins with."""
        return first_token(self.tokenizer)

    @cached_property
    def _split(self) -> tuple[TokenStore, TokenStore]:
        """Both parts from one source."""
        if self.dataset.test != BUILTIN:
            return split_store(self._checked(_open(self.dataset.test, self.dataset, self.tokenizer)))
        split = _builtin()
        parts = (open_tokens(part, self.tokenizer, Data()) for part in (split.train, split.held_out))
        train, test = map(self._checked, parts)
        return dataclasses.replace(train, name=split.name), dataclasses.replace(test, name=split.name)

    def _checked(self, store: TokenStore) -> TokenStore:
        check_vocabulary(store, self.tokenizer, self.vocabulary)
        return dataclasses.replace(store, begin=tuple(self.begin))  # a token file does not know it

    def test_blocks(self, length: int, count: int) -> Tensor:
        """[up to `count`, length], each inside one document, evenly spread over the text."""
        return _cut(self.test, length).rows(count)

    def test_documents(self, length: int, count: int) -> list[int]:
        """Which document each of these blocks is of."""
        return _cut(self.test, length).documents(count)

    def train_blocks(self, length: int, count: int) -> Tensor:
        return _cut(self.train, length).rows(count)

    def train_documents(self, length: int) -> list[Tensor]:
        """What routers are trained on: the documents, or blocks of `length` where each has a beginning of its own."""
        if self.begin:
            return list(self.train_blocks(length, self.train.tokens // length))
        return [
            torch.from_numpy(np.asarray(self.train.ids[first:last]).astype(np.int64))
            for first, last in self.train.documents.tolist()
        ]


def _cut(store: TokenStore, length: int) -> Blocks:
    return cut_blocks(store, length, packing=False, shortest=length)


def split_store(store: TokenStore) -> tuple[TokenStore, TokenStore]:
    """To train on, to measure on: whole documents, or of a single one its first three quarters and the rest."""
    spans = store.documents
    if len(spans) == 1:
        first, last = spans[0].tolist()
        cut = last - (last - first) // TEST_EVERY
        parts = [(first, cut)], [(cut, last)]
    else:
        by_size = spans[np.argsort(spans[:, 0] - spans[:, 1], kind="stable")]
        test = np.arange(len(by_size)) % TEST_EVERY == 1
        parts = by_size[~test].tolist(), by_size[test].tolist()
    train, measured = (
        dataclasses.replace(store, documents=np.array(part, dtype=np.int64), digest=f"{store.digest}:{which}")
        for part, which in zip(parts, ("train", "test"), strict=True)
    )
    return train, measured


def write_tokens(path: Path, store: TokenStore) -> None:
    """A token file of the store's documents, with what of them are answers beside it."""
    documents = [np.asarray(store.ids[first:last]) for first, last in store.documents.tolist()]
    ids = np.concatenate(documents)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, ids.astype(np.uint16 if ids.max() < 1 << 16 else np.uint32))
    np.save(_lengths_file(path), np.array([len(document) for document in documents], dtype=np.int64))
    _answers_file(path).unlink(missing_ok=True)  # of other tokens
    if store.answers is not None:
        marked = np.concatenate([store.answers[first:last] for first, last in store.documents.tolist()])
        np.save(_answers_file(path), np.packbits(marked))


def read_tokens(path: Path) -> list[Tensor]:
    """The documents of a token file; without lengths beside it, one."""
    if not path.is_file():
        raise ValueError(f"no token file {str(path)!r}: `focus compare RECIPE --write-tokens FOLDER` makes them")
    ids = np.load(path, mmap_mode="r")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{str(path)!r} must hold one row of whole numbers, it has {ids.dtype} {list(ids.shape)}")
    lengths_file = _lengths_file(path)
    lengths = np.load(lengths_file) if lengths_file.is_file() else np.array([len(ids)])
    if lengths.sum() != len(ids):
        raise ValueError(f"the lengths in {lengths_file.name} add up to {lengths.sum():,}, the ids are {len(ids):,}")
    return [torch.from_numpy(part.astype(np.int64)) for part in np.split(ids, np.cumsum(lengths)[:-1])]


def read_answers(path: Path, lengths: Sequence[int]) -> list[Tensor] | None:
    """Which tokens of a token file's documents, of these lengths, are answers; None without a file that says it."""
    file = _answers_file(path)
    if not file.is_file():
        return None
    tokens, bits = sum(lengths), np.load(file)
    if bits.dtype != np.uint8 or len(bits) != -(-tokens // 8):
        raise ValueError(f"{file.name} is not of {path.name}, which has {tokens:,} tokens: it must hold a bit for each")
    return list(torch.from_numpy(np.unpackbits(bits, count=tokens).astype(bool)).split(list(lengths)))


@cache
def _builtin() -> TextSplit:
    return default_text()


def _lengths_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}_len.npy")


def _answers_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}_completion_mask.npy")  # a bit for each token


def _open(source: str, dataset: Dataset, tokenizer: Any) -> TokenStore:
    if source.endswith(".npy"):
        path = Path(source).expanduser()
        store = dataclasses.replace(open_tokens(read_tokens(path), None, Data()), name=path.name)
    else:
        store = open_tokens(source, tokenizer, Data(field=dataset.field), limit=TOKENS_ENOUGH)
    if not dataset.join:
        return store
    whole = np.array([[store.documents[0, 0], store.documents[-1, 1]]])  # they touch
    return dataclasses.replace(store, documents=whole, digest=f"{store.digest}:joined")
