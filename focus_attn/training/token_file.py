"""Token files: a text as ids, for machines without the text, the tokenizer or the network.

NAME.npy has the ids of all documents end to end, NAME_len.npy beside it their lengths, and NAME_completion_mask.npy,
where there are answers, a bit for each token: whether it is one's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from focus_attn.training.token_store import TokenStore, store_of_ids

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


def open_token_file(path: Path, *, answers: bool = True) -> TokenStore:
    """The documents of a token file; without lengths beside it, one.

    answers: False leaves out which tokens are answers, for what only measures.
    """
    if not path.is_file():
        raise ValueError(
            f"no token file {str(path)!r}: `focus compare RECIPE --write-tokens FOLDER` writes such files, or "
            "numpy.save of ids"
        )
    ids = _load(path, "integers")
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise ValueError(f"{str(path)!r} must hold one row of whole numbers, it has {ids.dtype} {list(ids.shape)}")
    if ids.min() < 0:
        raise ValueError(f"token ids start at 0, {str(path)!r} has {ids.min()}")
    lengths_file = _lengths_file(path)
    lengths = _load(lengths_file, "integers") if lengths_file.is_file() else np.array([len(ids)])
    if lengths.sum() != len(ids):
        raise ValueError(f"the lengths in {lengths_file.name} add up to {lengths.sum():,}, the ids are {len(ids):,}")
    store = store_of_ids(ids, lengths.tolist(), path.name)
    if not answers or not _answers_file(path).is_file():
        return store
    return store.with_answers(_marks(path, len(ids)))


def read_tokens(path: Path) -> list[Tensor]:
    """The documents of a token file as ids."""
    return open_token_file(path, answers=False).tensors()


def _marks(path: Path, tokens: int) -> np.ndarray:
    file = _answers_file(path)
    bits = _load(file, "bits")
    if bits.dtype != np.uint8 or len(bits) != -(-tokens // 8):
        raise ValueError(
            f"{file.name} is not of {path.name}, which has {tokens:,} tokens: it must hold a bit for each, as "
            "numpy.packbits puts them together"
        )
    return np.unpackbits(bits, count=tokens).astype(bool)


def _load(file: Path, what: str) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{str(file)!r} does not hold {what} as numpy.save writes them ({error})") from None


def _lengths_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}_len.npy")


def _answers_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}_{COMPLETION_MASK}.npy")
