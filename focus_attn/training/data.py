"""What can be trained on, as token ids: what documents.py reads, token files, or what a program has at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focus_attn.evaluation.perplexity import first_token
from focus_attn.progress import Progress
from focus_attn.text import default_text
from focus_attn.training.documents import HUB, dataset_documents, hub_documents, read_documents, text_files, text_of
from focus_attn.training.recipe import Data
from focus_attn.training.token_cache import TokenRow, cached_tokens, needed, token_rows
from focus_attn.training.token_file import COMPLETION_MASK, SUFFIX, open_token_file
from focus_attn.training.token_store import TokenStore, digest_of, store_of_ids

BUILTIN = "builtin"


@dataclass(frozen=True)
class Sources:
    """Names of texts to be read together; one that is named twice counts twice."""

    names: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.names, (str, Path)) or not self.names:
            raise ValueError(f"`names` must be a list of at least one text's name, got {self.names!r}")
        object.__setattr__(self, "names", tuple(map(str, self.names)))


def open_tokens(
    source: Any, tokenizer: Any, data: Data, *, limit: int | None = None, progress: Progress | None = None
) -> TokenStore:
    """The tokens of `source`.

    Args:
        source: a path, "hub:owner/name[:split[:subset]]", "builtin", `Sources` of such names, a list of texts, a
            `datasets.Dataset`, or ids: a tensor ([tokens], or one document a row), a list of ids or of such lists.
            Rows, of a dataset or a list, have text, `prompt` and `completion`, or `input_ids` and perhaps
            `completion_mask`, as TRL has them: which of a document's tokens are answers. Ids are taken as they are:
            only blocks of text, and of token files, begin with what the tokenizer begins a text with.
        limit: stop reading a hub dataset after about this many tokens.
    """
    if isinstance(source, (str, Path)):
        return _from_name(str(source), tokenizer, data, limit, progress)
    if isinstance(source, Sources):
        opened = {name: _from_name(name, tokenizer, data, limit, progress) for name in dict.fromkeys(source.names)}
        return _together(opened, source.names)
    if hasattr(source, "column_names"):
        return _from_dataset(source, tokenizer, data, limit, progress)
    if isinstance(source, (Tensor, np.ndarray)):
        rows = torch.as_tensor(source)
        if rows.dim() not in (1, 2) or rows.is_floating_point() or rows.numel() == 0:
            got = f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}"
            raise ValueError(f"token ids must be integers [tokens] or [documents, tokens], got {got}")
        return _in_memory(list(rows[None] if rows.dim() == 1 else rows))
    if not isinstance(source, Sequence):
        raise TypeError(
            f"cannot train on a {type(source).__name__}: give a path, 'hub:owner/name', `Sources` of such names, a "
            "list of texts, of rows or of ids, a tensor of ids, or a datasets.Dataset"
        )
    if not len(source):
        raise ValueError("there is nothing to train on: the list is empty")
    if isinstance(source[0], str):
        digest = digest_of(text.encode() for text in source)
        return cached_tokens("texts given in Python", digest, source, tokenizer, None, progress)
    if isinstance(source[0], Mapping) and "input_ids" in source[0]:
        return _from_rows(source)
    if isinstance(source[0], Mapping):
        texts = [text_of(row, data.field, f"row {number}") for number, row in enumerate(source)]
        begins = (str(getattr(text, "begins", None)) for text in texts)
        digest = digest_of(part.encode() for pair in zip(texts, begins, strict=True) for part in pair)
        return cached_tokens("rows given in Python", digest, texts, tokenizer, None, progress)
    if isinstance(source[0], int):
        source = [source]
    return _in_memory([torch.as_tensor(row) for row in source])


def check_vocabulary(store: TokenStore, tokenizer: Any, vocabulary: int) -> None:
    """ValueError unless the ids are ones that the model knows."""
    if tokenizer is not None:
        known = len(tokenizer)
        if known > vocabulary or known < vocabulary // 2:
            raise ValueError(
                f"the tokenizer has {known:,} tokens, the model {vocabulary:,}: they do not belong together; "
                "load the tokenizer of this model"
            )
    largest = int(np.max(store.ids))
    if largest >= vocabulary:
        raise ValueError(
            f"the text has the token id {largest:,}, the model knows {vocabulary:,} tokens: it was tokenised for "
            "another model"
        )


def _from_name(name: str, tokenizer: Any, data: Data, limit: int | None, progress: Progress | None) -> TokenStore:
    joined = [b"joined"] if data.join else []
    if not name:
        raise ValueError("the name of a text is empty: give a file, a folder, or hub:owner/name")
    if name == BUILTIN:
        documents = default_text().train
        return cached_tokens(name, digest_of(text.encode() for text in documents), documents, tokenizer, None, progress)
    if name.startswith(HUB):
        described = f"{name} {data.field} {limit}"
        return cached_tokens(
            name, digest_of([described.encode(), *joined]), hub_documents(name, data), tokenizer, limit, progress
        )
    path = Path(name).expanduser()
    if path.suffix == SUFFIX:
        store, begin = open_token_file(path), () if tokenizer is None else tuple(first_token(tokenizer))
        digest = digest_of([store.digest.encode(), str(begin).encode()]) if begin else store.digest
        return dataclasses.replace(store, digest=digest, begin=begin)
    contents = (part for file in text_files(path) for part in (file.suffix.encode(), *_parts(file)))
    digest = digest_of([data.field.encode(), *contents, *joined])
    return cached_tokens(str(path), digest, read_documents(path, data.field, data.join), tokenizer, None, progress)


def _parts(file: Path) -> Iterator[bytes]:
    with file.open("rb") as content:
        while part := content.read(1 << 24):
            yield part


def _from_dataset(dataset: Any, tokenizer: Any, data: Data, limit: int | None, progress: Progress | None) -> TokenStore:
    if isinstance(dataset, dict):  # `load_dataset` without a split
        splits = ", ".join(dataset)
        raise ValueError(
            f"this dataset has splits ({splits}): give one of them, as in dataset[{next(iter(dataset))!r}]"
        )
    columns = dataset.column_names or []
    if "input_ids" in columns:
        return _from_rows(dataset)
    texts = dataset_documents("the dataset", lambda: dataset, data)
    if not hasattr(dataset, "__len__"):  # a stream: nothing says what it will give, so there is nothing to cache by
        rows = _up_to(limit, token_rows(texts, needed(tokenizer)))
        marked = ({"input_ids": ids, COMPLETION_MASK: np.arange(len(ids)) >= len(ids) - answer} for ids, answer in rows)
        return dataclasses.replace(_from_rows(marked), begin=tuple(first_token(tokenizer)))
    described = f"{dataset._fingerprint} {data.field}{' joined' if data.join else ''}"
    return cached_tokens("the dataset", digest_of([described.encode()]), texts, tokenizer, None, progress)


def _from_rows(rows: Iterable[Any]) -> TokenStore:
    ids, masks = [], []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or "input_ids" not in row:
            has = f"it has: {', '.join(row)}" if isinstance(row, Mapping) else f"it is a {type(row).__name__}"
            raise ValueError(f"row {number} has no `input_ids` ({has})")
        ids.append(torch.as_tensor(row["input_ids"]).cpu())
        mask = row.get(COMPLETION_MASK)
        masks.append(torch.zeros_like(ids[-1], dtype=torch.bool) if mask is None else torch.as_tensor(mask).cpu() > 0)
        if masks[-1].shape != ids[-1].shape:
            raise ValueError(
                f"`{COMPLETION_MASK}` of row {number} must have a number for each of its {ids[-1].numel():,} ids, it "
                f"has {masks[-1].numel():,}"
            )
    return _in_memory(ids).with_answers(torch.cat(masks).numpy())


def _up_to(limit: int | None, rows: Iterable[TokenRow]) -> Iterator[TokenRow]:
    taken = 0
    for row in rows:
        yield row
        taken += len(row[0])
        if limit is not None and taken >= limit:
            return


def _together(stores: Mapping[str, TokenStore], names: Sequence[str]) -> TokenStore:
    """One store of several, each as often as it is named; the ids of one that is named twice stand there once."""
    if len(names) == 1:
        return stores[names[0]]
    each = list(stores.values())
    starts = dict(zip(stores, np.cumsum([0, *(len(store.ids) for store in each)]).tolist(), strict=False))
    documents = np.concatenate([stores[name].documents + starts[name] for name in names])
    answers = None
    if any(store.answers is not None for store in each):
        marks = (np.zeros(len(store.ids), dtype=bool) if store.answers is None else store.answers for store in each)
        answers = np.concatenate([*marks])
    digest, name = digest_of(stores[name].digest.encode() for name in names), ", ".join(stores[n].name for n in names)
    ids = np.concatenate([store.ids for store in each])
    return TokenStore(ids, documents, digest, name, each[0].begin, answers)


def _in_memory(rows: list[Tensor]) -> TokenStore:
    rows = [row for row in rows if row.numel()]
    if not rows:
        raise ValueError("there is nothing to train on: no document has a token")
    if any(row.dim() != 1 or row.is_floating_point() for row in rows):
        raise ValueError("token ids must be flat lists of integers, one for each document")
    ids = torch.cat([row.to(torch.int64).cpu() for row in rows]).numpy()
    if ids.min() < 0:
        raise ValueError(f"token ids start at 0, got {ids.min()}")
    return store_of_ids(ids, [row.numel() for row in rows], "token ids given in Python")
