"""Questions about facts hidden in books, with what the base model answers: tokens to train routers on.

    python benchmarks/base_answers.py books/train answers.npy --sections 4000 --length 2048

Questions with right answers (hidden_facts.py) teach routers to find facts. They do not teach them to keep to what the
base model makes of a question that asks for much, and often fails at. Here it writes the answers itself, and a recipe's
`answer_weight` makes its predictions of them count. A section is text of a book with facts in it, one question and its
answer, of so many tokens; those where something was found come five times, those where it counted up, 1. 2. 3., are
left out. Documents are of four sections.

Questions are put together of many parts, so that few are alike; the words of `focus eval --retrieval` are not among
them: what judges an adapter must not train it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from adapter_figures import load_default_on
from hidden_facts import FEWEST_WORDS, NAMES, VALUES, different, words_of
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_attn.evaluation.requests import Item, Requests, Task
from focus_attn.evaluation.retrieval import MAX_NEW_TOKENS, Haystack, Hidden
from focus_attn.evaluation.scoring import Scorer
from focus_attn.training.data import open_tokens
from focus_attn.training.documents import read_documents
from focus_attn.training.recipe import Data
from focus_attn.training.token_file import write_tokens

FEWEST_CHARACTERS, MOST_CHARACTERS = 20_000, 240_000  # of a book: shorter ones are left out, of longer ones the first
TIMES_IF_FOUND = 5
SECTIONS = 4  # of a document
SHARE_OF_CHAINS, SHARE_OF_CAPITALS, SHARE_OF_OTHERS = 0.9, 0.6, 0.3

MOST_NAMES = 6
THINGS = {  # and the keyword that sets one
    "name": "NAME",
    "label": "LABEL",
    "constant": "CONST",
    "key": "KEY",
    "symbol": "SYM",
    "register": "REG",
    "field": "FIELD",
    "item": "ITEM",
    "tag": "TAG",
    "cell": "CELL",
    "parameter": "PARAM",
    "pointer": "PTR",
    "code": "CODE",
    "handle": "HANDLE",
}
GIVEN = [  # how a name is given a value, and how that of another one
    ("{word} {name} = {value}.", "{word} {name} = {word} {other}."),
    ("{word} {name} = {value}.", "{word} {name} = {other}."),
    ("{word} {name} := {value};", "{word} {name} := {word} {other};"),
    ("{word} {name} := {value}.", "{word} {name} := {other}."),
    ("{word} {name} {value}.", "{word} {name} {other}."),
    ("{word} {name} -> {value}.", "{word} {name} -> {word} {other}."),
    ("{name} <- {value}.", "{name} <- {other}."),
    ("{name} := {value}.", "{name} := {other}."),
    ("{thing} {name} is {value}.", "{thing} {name} is {thing} {other}."),
    ("{thing} {name} equals {value}.", "{thing} {name} equals {thing} {other}."),
    ("Define {name} as {value}.", "Define {name} as {other}."),
    ("Let {name} be {value}.", "Let {name} be {other}."),
    ("[{name}: {value}]", "[{name}: {other}]"),
    ("({thing} {name}: {value}.)", "({thing} {name}: see {thing} {other}.)"),
    ("{name} holds {value}.", "{name} holds the same as {other}."),
    ("{thing} {name} stands for {value}.", "{thing} {name} stands for {thing} {other}."),
]
OPENINGS = [
    "Some {thing}s are defined in this text. Keep them in mind.\n",
    "While you read, note which {thing} leads to which number.\n",
    "The following passage sets {thing}s. Remember each of them.\n",
    "Read carefully: {thing}s are copied from one another here.\n",
    "There are {thing}s in the text below; you will be asked about them.\n",
    "Follow the {thing}s through the passage below.\n",
    "Pay attention to every {thing} that is set in these pages.\n",
    "",
]
ASKED = [
    "Which {thing}s are equal to {value}?",
    "List every {thing} that has the value {value}.",
    "Name all {thing}s which stand for {value}.",
    "What {thing}s lead to {value}?",
    "Give the {thing}s that hold {value} according to the passage.",
    "Tell each {thing} bound to {value} in these pages.",
    "Enumerate the {thing}s set to {value} above.",
    "Look for the {thing}s with the value {value} in what you have read.",
    "Write down all the {thing}s that were given the number {value}.",
]
BEGUN = [  # few that the base model does not go on from with a list
    "The {thing}s that hold {value} are:",
    "The {count} {thing}s that have the value {value} are:",
    "Answer: As stated in the passage, {value} belongs to {count} {thing}s, which are:",
    "Answer: Of the {thing}s in the passage, {count} hold {value}, which are:",
    "Answer: By the passage, {count} {thing}s have the value {value}, namely:",
    "Reply: Following what was written, the {count} {thing}s equal to {value} are:",
    "Reply: In the pages above {count} {thing}s have the value {value}, these being:",
    "Solution: Going through the definitions above, {count} {thing}s stand for {value}. These are:",
    "Answer: In the text, {count} {thing}s were set to {value}:",
]
SEVERAL = [  # how one thing is given several values, how they are asked for, how the answer begins
    ("The {thing} of the {key} is {value}.", "Which {thing}s does the {key} have?", "The {thing}s of the {key} are:"),
    ("{thing} of {key}: {value}.", "List all {thing}s of {key} in the passage.", "The {count} {thing}s of {key} are:"),
    ("[{key}: {thing} {value}]", "What {thing}s does {key} have, by the passage?", "Answer: {key} has the {thing}s"),
    ("{key} got the {thing} {value}.", "Name the {thing}s that {key} got.", "Answer: By the text, {key} got:"),
    ("One {thing} for {key} is {value}.", "Give every {thing} for {key}.", "Reply: The {thing}s for {key} were"),
]
CAPITALS, NUMBERS = NAMES[0], VALUES[0]


class Section(NamedTuple):
    """Tokens up to where the answer begins, what may follow it, and the strings that were asked for."""

    context: list[int]
    follows: list[int]
    expected: list[str]


def chain(choose: random.Random, words: list[str]) -> Hidden:
    """Names that come to have one value, each by the one before; sometimes others beside them have another."""
    draw = CAPITALS if choose.random() < SHARE_OF_CAPITALS else choose.choice(NAMES)
    given, same = choose.choice(GIVEN)
    thing = choose.choice([*THINGS])
    parts = {"thing": thing, "word": THINGS[thing]}
    count = choose.randint(2, MOST_NAMES)
    others = choose.randint(1, 3) if choose.random() < SHARE_OF_OTHERS else 0
    several = different(draw, count + others, choose, words)
    value, other_value = different(NUMBERS, 2, choose, words)

    def assigned(names: list[str], value: str) -> list[str]:
        first = [given.format(name=name, value=value, **parts) for name in names[:1]]
        return first + [same.format(name=name, other=other, **parts) for other, name in pairwise(names)]

    facts = assigned(several[:count], value) + assigned(several[count:], other_value)
    parts |= {"value": value, "count": str(count)}
    question = f"\n{choose.choice(ASKED)} {choose.choice(BEGUN)}".format(**parts)
    return Hidden(choose.choice(OPENINGS).format(**parts), facts, question, several[:count])


def several_values(choose: random.Random, words: list[str]) -> Hidden:
    given, asked, begun = choose.choice(SEVERAL)
    count = choose.randint(2, MOST_NAMES - 1)
    values = different(NUMBERS, count, choose, words)
    parts = {"thing": choose.choice([*THINGS]), "key": choose.choice(words), "count": str(count)}
    facts = [given.format(value=value, **parts) for value in values]
    return Hidden(choose.choice(OPENINGS).format(**parts), facts, f"\n{asked} {begun}".format(**parts), values)


def section(haystack: Haystack, words: list[str], length: int, choose: random.Random) -> Section:
    hidden = (chain if choose.random() < SHARE_OF_CHAINS else several_values)(choose, words)
    places = sorted(choose.random() for _ in hidden.facts)
    context = haystack.hide(hidden, places, length - MAX_NEW_TOKENS, choose)
    follows: list[int] = []
    at = choose.randrange(len(haystack.sentences))
    while len(follows) < length - len(context):
        follows += haystack.sentences[at % len(haystack.sentences)]
        at += 1
    return Section(context, follows, hidden.expected)


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sections: Sequence[Section]) -> Iterator[str]:
    """What the model writes, a line each: a list may have a line of its own before it."""
    task = Task("answers", "found_strings", "retrieval", {})
    options = {"max_new_tokens": MAX_NEW_TOKENS, "until": ["\n\n"]}
    items = [
        Item(task.name, str(number), "generate", one.context, options=options) for number, one in enumerate(sections)
    ]
    scorer = Scorer(model, Requests({task.name: task}, items), tokenizer)
    scorer.check()
    written: dict[str, str] = {}
    for batch in scorer.run(items):
        written |= {item: score["text"] for (_, item), score in batch}
        print(f"{len(written):,} of {len(items):,} answered", flush=True)
    for item in items:
        text = written[item.item]
        start = len(text) - len(text.lstrip())
        yield text[:start] + "".join(text[start:].partition("\n")[:2])


def times_to_take(answer: str, expected: Sequence[str]) -> int:
    """None of a bare run of numbers, which the base model falls into wherever it finds nothing to say."""
    if any(string in answer for string in expected):
        return TIMES_IF_FOUND
    return int(any(character.isalpha() for character in answer))


def row(one: Section, answer: list[int], length: int) -> dict[str, list[int]]:
    """A section of `length` tokens and which of them are the answer, as rows to train on are."""
    ids = [*one.context, *answer, *one.follows][:length]
    mask = [0] * len(one.context) + [1] * len(answer) + [0] * length
    return {"input_ids": ids, "completion_mask": mask[:length]}


def documents(rows: Sequence[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
    """Several sections each, what is left over dropped."""
    return [
        {name: [token for one in rows[first : first + SECTIONS] for token in one[name]] for name in rows[first]}
        for first in range(0, len(rows) - SECTIONS + 1, SECTIONS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, help="files or a folder of them")
    parser.add_argument("output", type=Path, help="NAME.npy; NAME_len.npy and NAME_completion_mask.npy come beside it")
    parser.add_argument("--sections", type=int, default=4000)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a section")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    options = parser.parse_args()
    if options.output.suffix != ".npy" or options.sections < SECTIONS:
        parser.error(f"the output is NAME.npy, of at least {SECTIONS} sections")
    books = [book[:MOST_CHARACTERS] for book in read_documents(options.books, "text") if len(book) > FEWEST_CHARACTERS]
    books = [book for book in books if len(words_of(book)) >= FEWEST_WORDS]
    if not books:
        wanted = f"text of more than {FEWEST_CHARACTERS:,} characters with {FEWEST_WORDS} plain words"
        parser.error(f"no {wanted} in {str(options.books)!r}")
    model, tokenizer = load_default_on(options.device)
    choose, haystack_of = random.Random(options.seed), cache(lambda book: Haystack(tokenizer, [book]))
    sections = []
    for _ in range(options.sections):
        book = choose.choice(books)
        haystack = haystack_of(book)
        sections.append(section(haystack, words_of(book), options.length, choose))
    rows, found = [], 0
    for one, text in zip(sections, answers(model, tokenizer, sections), strict=True):
        answer = haystack.encode(text)
        times = times_to_take(text, one.expected)
        found += times == TIMES_IF_FOUND
        rows += [row(one, answer, options.length)] * times
    if len(rows) < SECTIONS:
        raise SystemExit("the base model answered too few questions for one document: ask more --sections")
    choose.shuffle(rows)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_tokens(options.output, open_tokens(documents(rows), None, Data()))
    print(f"{len(rows):,} sections; the base model found something in {found:,} of {len(sections):,}")


if __name__ == "__main__":
    main()
