"""Documents to token ids, once: they are kept in the cache folder under a digest of the text and the tokenizer.

A document's ids carry no special tokens. What the tokenizer begins every text with stands beside them: each block that
is cut from a document begins with it, as in the evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from focus_attn.evaluation.perplexity import first_token
from focus_attn.progress import Progress
from focus_attn.training.documents import Answered
from focus_attn.training.token_store import TokenStore, digest_of, spans
from focus_attn.zoo import cache_folder

FORMAT = 1  # raised when what is written below changes
IDS, OFFSETS, ANSWERS, META = "ids.bin", "offsets.bin", "answers.bin", "meta.json"
TokenRow = tuple[list[int], int]  # ids of a document, and how many at its end are an answer
DOCUMENTS_AT_ONCE = 64
CHARACTERS_AT_ONCE = 1 << 22


def cached_tokens(
    name: str,
    digest: str,
    documents: Iterable[str],
    tokenizer: Any,
    limit: int | None,
    progress: Progress | None,
) -> TokenStore:
    """The store of these documents, made now unless it is there. Of several processes one makes it."""
    digest = digest_of([digest.encode(), _tokenizer_fingerprint(needed(tokenizer)).encode(), str(FORMAT).encode()])
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


def needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ValueError("text must be tokenised: pass `tokenizer=`, or give token ids instead of text")
    return tokenizer


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return digest_of([type(tokenizer).__name__.encode(), described.encode()])


def _tokenise(
    documents: Iterable[str], tokenizer: Any, folder: Path, name: str, limit: int | None, progress: Progress | None
) -> None:
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        offsets, answers = [0], []
        with (partial / IDS).open("wb") as file:
            for ids, answer in token_rows(documents, tokenizer):
                np.asarray(ids, dtype=kind).tofile(file)
                offsets.append(offsets[-1] + len(ids))
                answers.append(answer)
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
        if any(answers):
            np.asarray(answers, dtype=np.int64).tofile(partial / ANSWERS)
            meta["answers"] = sum(answers)
        (partial / META).write_text(json.dumps(meta), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def token_rows(documents: Iterable[str], tokenizer: Any) -> Iterator[TokenRow]:
    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    for batch in _batches(text for text in documents if text.strip()):
        prompts = iter(encode([text[: text.begins] for text in batch if isinstance(text, Answered)]))
        for text, ids in zip(batch, encode([str(text) for text in batch]), strict=True):
            yield ids, _behind(next(prompts), ids) if isinstance(text, Answered) else 0


def _behind(prompt: list[int], ids: list[int]) -> int:
    """How many of `ids` stand behind the prompt; a token that it shares with its answer is the answer's."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False))
    return len(ids) - sum(1 for _ in shared)


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
        if "answers" in meta:
            sizes[ANSWERS] = meta["documents"] * 8
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read(folder: Path, digest: str, name: str) -> TokenStore:
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    ids = np.memmap(folder / IDS, dtype=meta["dtype"], mode="r")
    documents = spans(np.fromfile(folder / OFFSETS, dtype=np.int64))
    if "answers" not in meta:
        return TokenStore(ids, documents, digest, name)
    answers = np.zeros(len(ids), dtype=bool)
    for last, answer in zip(
        documents[:, 1].tolist(), np.fromfile(folder / ANSWERS, dtype=np.int64).tolist(), strict=True
    ):
        answers[last - answer : last] = True
    return TokenStore(ids, documents, digest, name, answers=answers)
