"""The texts of a comparison as tokens: one store to train on, one to measure on, which share nothing.

A source is what `focus train` reads: files, folders, token files, hub datasets, builtin.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from focus_attn.compare.recipe import Dataset
from focus_attn.evaluation.perplexity import first_token
from focus_attn.text import TextSplit, default_text
from focus_attn.training.blocks import Blocks, cut_blocks
from focus_attn.training.data import BUILTIN, check_vocabulary, open_tokens
from focus_attn.training.recipe import Data
from focus_attn.training.token_file import SUFFIX, open_token_file
from focus_attn.training.token_store import TokenStore

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
        return self.train.tensors()


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


@cache
def _builtin() -> TextSplit:
    return default_text()


def _open(source: str, dataset: Dataset, tokenizer: Any) -> TokenStore:
    if source.endswith(SUFFIX):
        store = open_token_file(Path(source).expanduser(), answers=False)
    else:
        store = open_tokens(source, tokenizer, Data(field=dataset.field), limit=TOKENS_ENOUGH)
    if not dataset.join:
        return store
    whole = np.array([[store.documents[0, 0], store.documents[-1, 1]]])  # they touch
    return dataclasses.replace(store, documents=whole, digest=f"{store.digest}:joined")
