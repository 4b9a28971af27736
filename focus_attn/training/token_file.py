"""Token files: a text as ids, for machines without the text, the tokenizer or the network.

NAME.npy has the ids of all documents end to end, NAME_len.npy beside it their lengths, and NAME_completion_mask.npy,
where there are answers, a bit for each token: whether it is one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from focus_attn.training.token_store import TokenStore

SUFFIX = ".npy"
COMPLETION_MASK = "completion_mask"  # TRL's name for the column


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


def read_rows(path: Path) -> list[dict[str, Tensor]]:
    """The documents as rows to train on: their ids, and which of these are answers where the file says it."""
    documents = read_tokens(path)
    answers = read_answers(path, [*map(len, documents)])
    if answers is None:
        return [{"input_ids": document} for document in documents]
    pairs = zip(documents, answers, strict=True)
    return [{"input_ids": document, COMPLETION_MASK: mask} for document, mask in pairs]


def _lengths_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}_len.npy")


def _answers_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}_{COMPLETION_MASK}.npy")  # a bit for each token
