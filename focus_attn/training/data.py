"""Text to token ids, once: what documents.py reads, or what a program has at hand.

Ids are kept in the cache folder under a digest of the text and the tokenizer, so that a second run reads them back. A
document's ids carry no special tokens. What the tokenizer begins every text with stands beside them: each block that is
cut from a document begins with it, as in the evaluation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from focus_attn.evaluation.perplexity import first_token
from focus_attn.progress import Progress
from focus_attn.text import default_text
from focus_attn.training.documents import HUB, dataset_documents, hub_documents, read_documents, text_files
from focus_attn.training.recipe import Data
from focus_attn.zoo import cache_folder

FORMAT = 1  # raised when what is written below changes
IDS, OFFSETS, META = "ids.bin", "offsets.bin", "meta.json"
BUILTIN = "builtin"
COMPLETION_MASK = "completion_mask"  # TRL's name for the column
DOCUMENTS_AT_ONCE = 64
CHARACTERS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class TokenStore:
    """Token ids of documents."""

    ids: np.ndarray  # [tokens], perhaps on disk
    documents: np.ndarray  # [documents, 2]: each is ids[first:last]
    digest: str
    name: str
    begin: tuple[int, ...] = ()  # what every block cut from it begins with: <bos> where the tokenizer has one
    answers: np.ndarray | None = None  # [tokens] bool: those that `answer_weight` counts more

    @property
    def tokens(self) -> int:
        return int(self._lengths.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self._lengths.max())

    @property
    def _lengths(self) -> np.ndarray:
        return self.documents[:, 1] - self.documents[:, 0]

    def split_off(self, length: int, blocks: int) -> tuple[TokenStore, TokenStore]:
        """What is left, and up to this many blocks of `length` tokens from the ends of the last documents that have
        one: at most a quarter of those that there are. Of such a document only what still makes a block is left."""
        length -= len(self.begin)
        blocks = min(blocks, int((self._lengths // length).sum()) // 4)
        left, taken = [], []
        for first, last in self.documents[::-1].tolist():
            cut = last - length * min((last - first) // length, blocks)
            blocks -= (last - cut) // length
            if cut < last:
                taken.append((cut, last))
            if cut == last or cut - first >= length:
                left.append((first, cut))
        parts = (np.array(part[::-1], dtype=np.int64).reshape(-1, 2) for part in (left, taken))
        rest, aside = (dataclasses.replace(self, documents=part) for part in parts)
        return rest, aside


def open_tokens(
    source: Any, tokenizer: Any, data: Data, *, limit: int | None = None, progress: Progress | None = None
) -> TokenStore:
    """The tokens of `source`.

    Args:
        source: a path, "hub:owner/name[:split[:subset]]", "builtin", a list of texts, a `datasets.Dataset`, or ids: a
            tensor ([tokens], or one document a row), a list of ids, a list of such lists, or a dataset or a list of
            rows with `input_ids` and perhaps `completion_mask`, as TRL has them: which of a document's tokens are
            answers. Ids are taken as they are: only blocks of text begin with what the tokenizer begins a text with.
        limit: stop reading a hub dataset after about this many tokens.
    """
    if isinstance(source, (str, Path)):
        return _from_name(str(source), tokenizer, data, limit, progress)
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
            f"cannot train on a {type(source).__name__}: give a path, 'hub:owner/name', a list of texts or of ids, a "
            "tensor of ids, or a datasets.Dataset"
        )
    if not len(source):
        raise ValueError("there is nothing to train on: the list is empty")
    if isinstance(source[0], str):
        digest = _digest(text.encode() for text in source)
        return _cached("texts given in Python", digest, source, tokenizer, None, progress)
    if isinstance(source[0], Mapping):
        return _from_rows(source)
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
    if name == BUILTIN:
        documents = default_text().train
        return _cached(name, _digest(text.encode() for text in documents), documents, tokenizer, None, progress)
    if name.startswith(HUB):
        described = f"{name} {data.field} {limit}"
        return _cached(
            name, _digest([described.encode(), *joined]), hub_documents(name, data), tokenizer, limit, progress
        )
    path = Path(name).expanduser()
    contents = (part for file in text_files(path) for part in (file.suffix.encode(), *_parts(file)))
    digest = _digest([data.field.encode(), *contents, *joined])
    return _cached(str(path), digest, read_documents(path, data.field, data.join), tokenizer, None, progress)


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
        rows = _up_to(limit, map(torch.tensor, _token_lists(texts, _needed(tokenizer))))
        return dataclasses.replace(_in_memory(list(rows)), begin=tuple(first_token(tokenizer)))
    described = f"{dataset._fingerprint} {data.field}{' joined' if data.join else ''}"
    return _cached("the dataset", _digest([described.encode()]), texts, tokenizer, None, progress)


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
    store = _in_memory(ids)
    answers = torch.cat(masks).numpy()
    if not answers.any():
        return store
    return dataclasses.replace(store, digest=_digest([store.digest.encode(), answers.tobytes()]), answers=answers)


def _up_to(limit: int | None, rows: Iterable[Tensor]) -> Iterator[Tensor]:
    taken = 0
    for row in rows:
        yield row
        taken += len(row)
        if limit is not None and taken >= limit:
            return


def _in_memory(rows: list[Tensor]) -> TokenStore:
    rows = [row for row in rows if row.numel()]
    if not rows:
        raise ValueError("there is nothing to train on: no document has a token")
    if any(row.dim() != 1 or row.is_floating_point() for row in rows):
        raise ValueError("token ids must be flat lists of integers, one for each document")
    ids = torch.cat([row.to(torch.int64).cpu() for row in rows]).numpy()
    if ids.min() < 0:
        raise ValueError(f"token ids start at 0, got {ids.min()}")
    offsets = np.cumsum([0, *(row.numel() for row in rows)])
    digest = _digest([ids.tobytes(), offsets.tobytes()])
    return TokenStore(ids, _spans(offsets), digest, "token ids given in Python")


def _spans(offsets: np.ndarray) -> np.ndarray:
    """[documents + 1] where documents that touch begin and end -> [documents, 2]."""
    return np.stack([offsets[:-1], offsets[1:]], axis=1)


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ValueError("text must be tokenised: pass `tokenizer=`, or give token ids instead of text")
    return tokenizer


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return _digest([type(tokenizer).__name__.encode(), described.encode()])


def _cached(
    name: str,
    digest: str,
    documents: Iterable[str],
    tokenizer: Any,
    limit: int | None,
    progress: Progress | None,
) -> TokenStore:
    """The store of these documents, made now unless it is there. Of several processes one makes it."""
    digest = _digest([digest.encode(), _tokenizer_fingerprint(_needed(tokenizer)).encode(), str(FORMAT).encode()])
    folder = cache_folder() / "tokens" / digest[:32]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _is_whole(folder):
                _tokenise(documents, tokenizer, folder, name, limit, progress)
            return dataclasses.replace(_read(folder, digest, name), begin=tuple(first_token(tokenizer)))
    except OSError as error:
        if error.errno is None:  # a sentence already
            raise
        raise OSError(
            f"cannot keep the tokens of {name} in {str(folder.parent)!r} ({error.strerror}): set the environment "
            "variable FOCUS_CACHE to a writable folder with enough space"
        ) from error


def _tokenise(
    documents: Iterable[str], tokenizer: Any, folder: Path, name: str, limit: int | None, progress: Progress | None
) -> None:
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        offsets = [0]
        with (partial / IDS).open("wb") as file:
            for ids in _token_lists(documents, tokenizer):
                np.asarray(ids, dtype=kind).tofile(file)
                offsets.append(offsets[-1] + len(ids))
                if progress:
                    done = min(offsets[-1], limit or offsets[-1])
                    progress("tokenising", done, limit or done + 1)
                if limit is not None and offsets[-1] >= limit:
                    break
        if offsets[-1] == 0:
            raise ValueError(f"{name} holds no text")
        if progress:
            progress("tokenising", offsets[-1], offsets[-1])
        np.asarray(offsets, dtype=np.int64).tofile(partial / OFFSETS)
        meta = {"name": name, "dtype": np.dtype(kind).name, "tokens": offsets[-1], "documents": len(offsets) - 1}
        (partial / META).write_text(json.dumps(meta), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _token_lists(documents: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    for batch in _batches(text for text in documents if text.strip()):
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == DOCUMENTS_AT_ONCE or size >= CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _is_whole(folder: Path) -> bool:
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        width = np.dtype(meta["dtype"]).itemsize
        sizes = {IDS: meta["tokens"] * width, OFFSETS: (meta["documents"] + 1) * 8}
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read(folder: Path, digest: str, name: str) -> TokenStore:
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    ids = np.memmap(folder / IDS, dtype=meta["dtype"], mode="r")
    return TokenStore(ids, _spans(np.fromfile(folder / OFFSETS, dtype=np.int64)), digest, name)
