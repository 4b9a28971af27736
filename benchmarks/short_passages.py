"""Documents made of many short passages that have nothing to do with each other, cut out of books.

    python benchmarks/short_passages.py books/train passages --tokens 2500000

Running text is one story: what was said long ago is the same story still. Prompts with worked examples are not, and
routers that met books alone lose there. A document lists passages in one of several plain forms, as such prompts do;
it holds no item of any benchmark.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable
from pathlib import Path

from focus_attn.training.data import read_documents

SENTENCE_END = re.compile(r'(?:(?<=[.!?])|(?<=[.!?]["”\']))\s+(?=[A-Z"“])')
STRETCH = 1200  # characters of a book that a passage is looked for in
WORDS_A_TOKEN = 0.75
MOST_TRIES = 10_000
SHORTEST = 8300  # tokens of a document: one block of the longest stage

Form = Callable[[list[str]], str]
FORMS: list[Form] = [
    lambda passage: " ".join(passage) + "\n\n",
    lambda passage: f"Text: {' '.join(passage[:-1])}\nNext: {passage[-1]}\n\n",
    lambda passage: f"Question: {passage[0]}\nAnswer: {' '.join(passage[1:])}\n\n",
    lambda passage: " -> ".join(" ".join(passage).rsplit(" ", 1)) + "\n",
    lambda passage: f"- {' '.join(passage)}\n",
]


def passage_of(books: list[str], words: int, choose: random.Random) -> list[str]:
    """At least two whole sentences with about so many words."""
    for _ in range(MOST_TRIES):
        book = choose.choice(books)
        begin = choose.randrange(max(1, len(book) - STRETCH))
        sentences = SENTENCE_END.split(re.sub(r"\s+", " ", book[begin : begin + STRETCH]))[1:-1]
        taken, count = [], 0
        for sentence in sentences:
            taken.append(sentence)
            count += len(sentence.split())
            if count >= words:
                break
        if len(taken) >= 2 and words <= count < words + 60:
            return taken
    raise SystemExit(f"no two sentences of some {words} words in {MOST_TRIES:,} places: is it prose, with capitals?")


def document(books: list[str], choose: random.Random) -> str:
    form, least = choose.choice(FORMS), choose.choice([8, 20, 40])
    length = choose.randint(SHORTEST, 4 * SHORTEST) * WORDS_A_TOKEN
    parts: list[str] = []
    words = 0
    while words < length:
        passage = passage_of(books, choose.randint(least, 2 * least), choose)
        parts.append(form(passage))
        words += len(parts[-1].split())
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, help="files or a folder of them")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=2_500_000, help="in all, roughly")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    books = [book for book in read_documents(options.books, "text") if len(book) > 2 * STRETCH]
    if not books:
        raise SystemExit(f"no text of more than {2 * STRETCH:,} characters in {str(options.books)!r}")
    choose, written, number = random.Random(options.seed), 0.0, 0
    while written < options.tokens:
        text = document(books, choose)
        (options.folder / f"{number:04}.txt").write_text(text, encoding="utf-8")
        written, number = written + len(text.split()) / WORDS_A_TOKEN, number + 1
    print(f"{number} documents, about {written:,.0f} tokens")


if __name__ == "__main__":
    main()
