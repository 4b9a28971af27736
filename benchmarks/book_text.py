"""What the makers of training text share: sentences of one place in a book, documents of parts, a folder of them."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable
from pathlib import Path

from focus_attn.training.documents import read_documents

SENTENCE_END = re.compile(r'(?:(?<=[.!?])|(?<=[.!?]["”\']))\s+(?=[A-Z"“])')
WORDS_A_TOKEN = 0.75
MOST_TRIES = 10_000
SHORTEST = 8300  # tokens of a document: one block of the longest stage


def sentences_at(book: str, begin: int, characters: int, words: int) -> tuple[list[str], int]:
    """Whole sentences among so many characters of a book, until they have so many words; and how many they have."""
    taken, count = [], 0
    for sentence in SENTENCE_END.split(re.sub(r"\s+", " ", book[begin : begin + characters]))[1:-1]:
        taken.append(sentence)
        count += len(sentence.split())
        if count >= words:
            break
    return taken, count


def joined(part: Callable[[], str], tokens: int) -> str:
    """Parts, until they are about so many tokens."""
    parts: list[str] = []
    words = 0
    while words < tokens * WORDS_A_TOKEN:
        parts.append(part())
        words += len(parts[-1].split())
    return "".join(parts)


def write_documents(
    about: str, usable: Callable[[str], bool], wanted: str, document: Callable[[list[str], random.Random], str]
) -> None:
    """The program: documents out of the books that are usable, into a folder.

    wanted: what a book must be, for the error where none is.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, help="files or a folder of them")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=2_500_000, help="in all, roughly")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    books = [book for book in read_documents(options.books, "text") if usable(book)]
    if not books:
        raise SystemExit(f"no {wanted} in {str(options.books)!r}")
    options.folder.mkdir(parents=True, exist_ok=True)
    choose, written, number = random.Random(options.seed), 0.0, 0
    while written < options.tokens:
        text = document(books, choose)
        (options.folder / f"{number:04}.txt").write_text(text, encoding="utf-8")
        written, number = written + len(text.split()) / WORDS_A_TOKEN, number + 1
    print(f"{number} documents, about {written:,.0f} tokens")
