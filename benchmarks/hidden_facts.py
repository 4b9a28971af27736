"""Books with facts hidden in them, which are asked for later: text to train routers on.

    python benchmarks/hidden_facts.py books/train facts --tokens 2500000

Running text seldom asks for a name or a number that was given once, thousands of tokens ago, so that routers which met
books alone lose such pairs. A document is made of stretches of a book. Each has a few names hidden in it that are
given a value or that of a name before them, and asks for them at its end, in one of several forms, or repeats what was
said of them. None of those is that of `focus eval --retrieval`: what judges an adapter must not train it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from book_text import MOST_TRIES, SHORTEST, joined, sentences_at, write_documents

SHORTEST_STRETCH, LONGEST_STRETCH = 100, 3000  # words of a book that facts are hidden in, before they are asked for
MOST_CHARACTERS = 10  # of a word, generously: so much of a book is looked at for a stretch
MOST_FACTS = 6
FEWEST_WORDS = 100  # that differ, so that names do


class Form(NamedTuple):
    """How names are given values, and how they are asked for."""

    given: str  # {name}, {value}
    same: str  # {name}, {other}
    asked: str  # {name}, {value}
    all_asked: str  # {value}, {names}


FORMS = [
    Form("{name} := {value};", "{name} := {other};", "print({name}) # {value}\n", "# equal to {value}: {names}\n"),
    Form("({name}: {value}.)", "({name}: see {other}.)", "Q: {name}? A: {value}\n", "Q: {value}? A: {names}\n"),
    Form("Let {name} be {value}.", "Let {name} be {other}.", "{name} -> {value}\n", "{value} <- {names}\n"),
    Form("[{name}={value}]", "[{name}={other}]", "What is {name}? It is {value}.\n", "Who is {value}? {names}.\n"),
    Form("set {name} {value}", "copy {other} {name}", "get {name}\n{value}\n", "keys {value}\n{names}\n"),
    Form(
        "Remember that the code of {name} is {value}.",
        "Remember that {name} has the code of {other}.",
        "The code of {name} was {value}.\n",
        "Those with the code {value} were {names}.\n",
    ),
]


def _letters(choose: random.Random) -> str:
    return "".join(choose.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=choose.randint(3, 6)))


def _digits(choose: random.Random) -> str:
    least = 10 ** choose.randint(2, 7)
    return str(choose.randrange(least, 10 * least))


LISTS: list[Callable[[list[str]], str]] = [
    ", ".join,
    " and ".join,
    lambda several: " ".join(f"{number}. {one}" for number, one in enumerate(several, 1)),
    lambda several: " ".join(f"({number}) {one}" for number, one in enumerate(several, 1)),
    lambda several: "".join(f"\n- {one}" for one in several),
]
ASKED_TO_REPEAT = ["Notes so far: {facts}\n", "Said above: {facts}\n", "Once more, {facts}\n"]

Draw = Callable[[random.Random, list[str]], str]
NAMES: list[Draw] = [
    lambda choose, words: _letters(choose),
    lambda choose, words: choose.choice(words),
    lambda choose, words: "_".join(choose.choices(words, k=2)),
    lambda choose, words: "".join(word.capitalize() for word in choose.choices(words, k=2)),
    lambda choose, words: f"{choose.choice(words)}{choose.randint(1, 99)}",
]
VALUES: list[Draw] = [
    lambda choose, words: _digits(choose),
    lambda choose, words: _letters(choose),
    lambda choose, words: " ".join(choose.choices(words, k=2)),
]


def different(draw: Draw, count: int, choose: random.Random, words: list[str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(choose, words)] = None
    return list(found)


@cache  # asked when a book is looked at, and by every document that takes its words
def words_of(book: str) -> list[str]:
    """Plain ones, in lower case, to make names and values of."""
    return sorted(set(re.findall(r"\b[a-z]{4,9}\b", book[:200_000])))


def stretch_of(book: str, words: int, choose: random.Random) -> list[str]:
    """Whole sentences of one place in a book, about so many words of them."""
    characters = words * MOST_CHARACTERS
    for _ in range(MOST_TRIES):
        taken, count = sentences_at(book, choose.randrange(max(1, len(book) - characters)), characters, words)
        if count >= words / 2:
            return taken
    raise SystemExit(f"no sentences with some {words:,} words in {MOST_TRIES:,} places: is it prose, with capitals?")


def facts_and_questions(words: list[str], choose: random.Random) -> tuple[list[str], list[str]]:
    """What is hidden, in its order, and what is asked behind it."""
    form, count = choose.choice(FORMS), choose.randint(2, MOST_FACTS)
    names = different(choose.choice(NAMES), count, choose, words)
    values = different(choose.choice(VALUES), count, choose, words)
    chained = choose.random() < 0.5
    held: dict[str, str] = {}
    facts = []
    for name, value in zip(names, values, strict=True):
        if held and chained and choose.random() < 0.7:
            other = choose.choice(list(held))
            held[name] = held[other]
            facts.append(form.same.format(name=name, other=other))
        else:
            held[name] = value
            facts.append(form.given.format(name=name, value=value))
    listed = choose.choice(LISTS)
    questions = [form.asked.format(name=name, value=value) for name, value in held.items()]
    for value in dict.fromkeys(held.values()):
        alike = [name for name in held if held[name] == value]
        if len(alike) > 1:
            questions.append(form.all_asked.format(value=value, names=listed(alike)))
    if choose.random() < 0.5:
        questions.append(choose.choice(ASKED_TO_REPEAT).format(facts=listed(facts)))
    choose.shuffle(questions)
    return facts, questions


def section(book: str, words: list[str], choose: random.Random) -> str:
    length = round(SHORTEST_STRETCH * (LONGEST_STRETCH / SHORTEST_STRETCH) ** choose.random())
    sentences = stretch_of(book, length, choose)
    facts, questions = facts_and_questions(words, choose)
    places = sorted(choose.randint(0, len(sentences)) for _ in facts)
    for place, fact in reversed(list(zip(places, facts, strict=True))):  # from the end: no place moves
        sentences.insert(place, fact)
    return f"{' '.join(sentences)}\n{''.join(questions)}\n"


def document(books: list[str], choose: random.Random) -> str:
    book, words = choose.choice(books), words_of(choose.choice(books))
    return joined(lambda: section(book, words, choose), choose.randint(SHORTEST, 3 * SHORTEST))


def main() -> None:
    least = LONGEST_STRETCH * MOST_CHARACTERS
    write_documents(
        str(__doc__),
        lambda book: len(book) > least and len(words_of(book)) >= FEWEST_WORDS,
        f"text of more than {least:,} characters with {FEWEST_WORDS} plain words",
        document,
    )


if __name__ == "__main__":
    main()
