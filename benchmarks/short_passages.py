"""Documents made of many short passages that have nothing to do with each other, cut out of books.

    python benchmarks/short_passages.py books/train passages --tokens 2500000

Running text is one story: what was said long ago is the same story still. Prompts with worked examples are not, and
routers that met books alone lose there. A document lists passages in one of several plain forms, as such prompts do;
it holds no item of any benchmark.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from book_text import MOST_TRIES, SHORTEST, joined, sentences_at, write_documents

STRETCH = 1200  # characters of a book that a passage is looked for in

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
        taken, count = sentences_at(book, choose.randrange(max(1, len(book) - STRETCH)), STRETCH, words)
        if len(taken) >= 2 and words <= count < words + 60:
            return taken
    raise SystemExit(f"no two sentences of some {words} words in {MOST_TRIES:,} places: is it prose, with capitals?")


def document(books: list[str], choose: random.Random) -> str:
    form, least = choose.choice(FORMS), choose.choice([8, 20, 40])
    length = choose.randint(SHORTEST, 4 * SHORTEST)
    return joined(lambda: form(passage_of(books, choose.randint(least, 2 * least), choose)), length)


def main() -> None:
    least = 2 * STRETCH
    write_documents(str(__doc__), lambda book: len(book) > least, f"text of more than {least:,} characters", document)


if __name__ == "__main__":
    main()
