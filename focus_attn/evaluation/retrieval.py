"""Retrieval tasks made here: facts hidden in text, asked for at the end.

    needle         one fact at a depth of a text of a length: the grid
    multi_key      one fact asked for among others of the same form
    multi_value    one key with several values, all asked for
    variables      a chain of assignments, X2 = X1 and so on: which names hold the first value?

The first two have one right continuation, which one forward over it tests exactly; the others are generated and
searched for the expected strings, and their facts lie anywhere (a chain in its order). The wording is close to that of
RULER (arXiv 2404.06654); the text between the facts is the user's own.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from focus_attn.evaluation.requests import Item, Requests, Task

KINDS = ("needle", "multi_key", "multi_value", "variables")
SPREAD = ("multi_value", "variables")  # facts all over the text, answers generated
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
OTHER_KEYS, VALUES, HOPS = 3, 4, 4
MAX_NEW_TOKENS = 48  # of the generated answers: four numbers of seven digits, or five names
NUMBER_DIGITS = 7
BEFORE = ":"  # what stands before a number that is asked for

WORDS = (
    "amber anchor apple arrow basket beacon birch bridge candle canyon carbon castle cedar cherry cloud cobalt copper "
    "coral crystal dagger desert diamond dragon eagle ember falcon feather forest garden garnet glacier granite hammer "
    "harbor hazel island ivory jasmine kettle ladder lantern lemon lotus maple marble meadow mirror nectar olive "
    "orchid otter pearl pepper pine quartz raven ribbon river saddle saffron scarlet shadow silver sparrow spruce "
    "summit thunder tiger timber tulip velvet violet walnut willow winter"
).split()


@dataclass(frozen=True)
class Hidden:
    """Facts to put into the text, and what is asked at its end."""

    opening: str
    facts: list[str]  # the first is the one that is asked for, where one is
    question: str
    expected: list[str]


def retrieval(
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    documents: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    per_cell: int = 20,
    seed: int = 0,
) -> Requests:
    """`per_cell` items for each length and depth, or as many for each length where facts are all over the text.

    A length counts everything, the answer included.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be among {', '.join(KINDS)}; got {kind!r}")
    if wrong := [depth for depth in depths if not 0 <= depth <= 1]:
        raise ValueError(f"a depth lies between 0 (the start) and 1 (the end), got {wrong[0]}")
    haystack = Haystack(tokenizer, documents)
    if (there := sum(map(len, haystack.sentences))) < max(lengths, default=0):
        warnings.warn(
            f"the text has {there:,} tokens, fewer than the length of {max(lengths):,}: it is repeated, and a fact is "
            "easily told from what repeats; give a longer --text",
            UserWarning,
            stacklevel=2,
        )
    tasks, items = {}, []
    for length in lengths:
        settings = {"length": length, "seed": seed}
        task = Task(
            f"{kind}@{length}", "found_strings" if kind in SPREAD else "exact_continuation", "retrieval", settings
        )
        tasks[task.name] = task
        cells = [None] * len(depths) if kind in SPREAD else depths
        for number in range(per_cell * len(cells)):
            depth = cells[number % len(cells)]
            rng = random.Random(f"{seed} {kind} {length} {number}")
            items.append(_item(haystack, kind, task, depth, number, rng))
    return Requests(tasks, items)


def _item(haystack: Haystack, kind: str, task: Task, depth: float | None, number: int, rng: random.Random) -> Item:
    hidden, length = _MAKERS[kind](rng), task.settings["length"]
    places = sorted(rng.random() for _ in hidden.facts) if depth is None else [depth]
    places += [rng.random() for _ in hidden.facts[len(places) :]]
    answer: dict[str, Any] = {"length": length, "depth": depth, "strings": hidden.expected}
    if kind in SPREAD:
        context = haystack.hide(hidden, places, length - MAX_NEW_TOKENS, rng)
        options = {"max_new_tokens": MAX_NEW_TOKENS, "until": ["\n"]}
        return Item(task.name, str(number), "generate", context, answer=answer, options=options)
    expected = haystack.encode(" " + hidden.expected[0])
    context = haystack.hide(hidden, places, length - len(expected), rng)
    return Item(task.name, str(number), "loglikelihood", context, [expected], answer=answer)


class Haystack:
    """Sentences of a text as tokens, from which contexts are cut."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        sentences = [" " + sentence for document in documents for sentence in _sentences(document)]
        if not sentences:
            raise ValueError("the text has no sentence to hide a fact between: give a longer --text")
        self.sentences = self._encode_all(sentences)

    def encode(self, text: str) -> list[int]:
        return self._encode_all([text])[0]

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        """As they go on behind other text: alone, some tokenizers would put a space of their own before each."""

        def encoded(texts: list[str]) -> list[list[int]]:
            return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore

        (before,) = encoded([BEFORE])
        behind = encoded([BEFORE + text for text in texts])
        return [
            ids[len(before) :] if ids[: len(before)] == before else encoded([text])[0]
            for ids, text in zip(behind, texts, strict=True)
        ]

    def hide(self, hidden: Hidden, places: Sequence[float], room: int, rng: random.Random) -> list[int]:
        """At most `room` tokens: the opening, whole sentences with the facts at their places (0 to 1), the question."""
        opening: list[int] = self.tokenizer.encode(hidden.opening)
        question = self.encode(hidden.question)
        facts = [self.encode(" " + fact) for fact in hidden.facts]
        left = room - len(opening) - len(question) - sum(map(len, facts))
        if left < 0:
            raise ValueError(f"the facts and the question alone take {room - left} tokens: ask for a greater length")
        sentences: list[list[int]] = []
        index = rng.randrange(len(self.sentences))
        passed_over = 0  # sentences that no longer fit: a few are tried, so that the length is nearly reached
        while passed_over < 8:
            sentence = self.sentences[index % len(self.sentences)]
            index += 1
            if len(sentence) > left:
                passed_over += 1
                continue
            sentences.append(sentence)
            left -= len(sentence)
        put = sorted(zip((round(place * len(sentences)) for place in places), facts, strict=True), key=lambda x: x[0])
        body: list[int] = []
        for number in range(len(sentences) + 1):
            body += [token for place, fact in put if place == number for token in fact]
            body += sentences[number] if number < len(sentences) else []
        return opening + body + question


def _numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of seven digits."""
    return [str(n) for n in rng.sample(range(10 ** (NUMBER_DIGITS - 1), 10**NUMBER_DIGITS), count)]


def _opening(what: str) -> str:
    return f"{what} hidden within the following text. Make sure to memorize it. I will quiz you about it afterwards.\n"


def _fact(key: str, number: str) -> str:
    return f"One of the special magic numbers for {key} is: {number}."


def _one_of_several(rng: random.Random, others: int) -> Hidden:
    keys, numbers = rng.sample(WORDS, 1 + others), _numbers(rng, 1 + others)
    question = (
        f"\nWhat is the special magic number for {keys[0]} mentioned in the provided text? "
        f"The special magic number for {keys[0]} mentioned in the provided text is:"
    )
    facts = [_fact(key, number) for key, number in zip(keys, numbers, strict=True)]
    what = "Some special magic numbers are" if others else "A special magic number is"
    return Hidden(_opening(what), facts, question, numbers[:1])


def _several_values(rng: random.Random) -> Hidden:
    key, numbers = rng.choice(WORDS), _numbers(rng, VALUES)
    question = (
        f"\nWhat are all the special magic numbers for {key} mentioned in the provided text? "
        f"The special magic numbers for {key} mentioned in the provided text are:"
    )
    facts = [_fact(key, number) for number in numbers]
    return Hidden(_opening("Some special magic numbers are"), facts, question, numbers)


def _chain(rng: random.Random) -> Hidden:
    names = ["".join(letters) for letters in _different(rng, lambda: rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))]
    value = _numbers(rng, 1)[0]
    facts = [f"VAR {names[0]} = {value}."]
    facts += [f"VAR {name} = VAR {before}." for before, name in pairwise(names)]
    question = (
        f"\nFind all variables that are assigned the value {value} in the text above. "
        f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assigned the value {value}, they are:"
    )
    opening = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
    return Hidden(opening, facts, question, names)


def _different(rng: random.Random, draw: Callable[[], list[str]]) -> list[list[str]]:
    found: list[list[str]] = []
    while len(found) < HOPS + 1:
        one = draw()
        if one not in found:
            found.append(one)
    return found


def _sentences(document: str) -> list[str]:
    """Pieces that end with a full stop, of up to 80 words, on one line."""
    pieces = [
        piece.strip() for piece in " ".join(document.split()).replace("? ", "?. ").replace("! ", "!. ").split(". ")
    ]
    return [
        (piece if piece.endswith(("?", "!", ".")) else piece + ".") for piece in pieces if 3 <= len(piece.split()) <= 80
    ]


_MAKERS: dict[str, Callable[[random.Random], Hidden]] = {
    "needle": lambda rng: _one_of_several(rng, 0),
    "multi_key": lambda rng: _one_of_several(rng, OTHER_KEYS),
    "multi_value": _several_values,
    "variables": _chain,
}
