"""Benchmarks behind thousands of tokens: as they are asked by lm-eval, their prompts fit the window and see no gate.

What stands before an item is a prefix: solved examples of the same benchmark (many-shot), or other text. A few prefixes
serve all items in turn, so that each is run once; their number is in the task's settings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from focus_attn.evaluation.requests import Requests, Task
from focus_attn.evaluation.tasks import BENCHMARKS, Question, as_item, encode_pair, enough, evenly, read_questions

MOST_PREFIXES = 16
ITEMS_A_PREFIX = 8  # at least, unless a number of prefixes is asked for
SHOTS_FROM_EVERY = 4  # every fourth item is kept for solved examples, and not asked
BREAK = "\n\n"


def many_shot(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    length: int,
    data: Path | None = None,
    limit: int | None = None,
    prefixes: int | None = None,
    seed: int = 0,
) -> Requests:
    """Items behind as many solved examples as `length` tokens hold."""
    questions = read_questions(name, data, 0, enough(limit))
    preamble = common_preamble([question.context for question in questions])
    pool, asked = questions[::SHOTS_FROM_EVERY], [q for i, q in enumerate(questions) if i % SHOTS_FROM_EVERY]
    known = {question.context for question in asked}  # benchmarks have a few items twice: no example gives one away
    examples = [q.context[len(preamble) :] + q.shown for q in pool if q.context not in known]

    def shots(number: int, _: int) -> list[str]:
        drawn = random.Random(f"{seed} {name} {number}").sample(examples, len(examples))
        return [preamble.rstrip(), *drawn] if preamble else drawn

    return _behind(tokenizer, name, length, asked, len(preamble), shots, "shots", limit, prefixes)


def behind_text(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    length: int,
    documents: Sequence[str],
    data: Path | None = None,
    limit: int | None = None,
    prefixes: int | None = None,
) -> Requests:
    """Items behind passages of other text, which end at a paragraph. What all items begin with stands once, between."""
    paragraphs = [part for document in documents for part in document.split(BREAK) if part.strip()]

    def passage(number: int, of: int) -> list[str]:
        start = number * len(paragraphs) // of
        return paragraphs[start:] + paragraphs[:start]

    questions = read_questions(name, data, 0, enough(limit))
    preamble = common_preamble([question.context for question in questions])
    return _behind(tokenizer, name, length, questions, len(preamble), passage, "text", limit, prefixes, preamble)


def common_preamble(contexts: Sequence[str]) -> str:
    """What all prompts begin with, up to an empty line: TruthfulQA's six examples, for one."""
    first, last = min(contexts), max(contexts)  # what these two share all between them share
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    start = first[:same]
    return start[: start.rfind(BREAK) + len(BREAK)] if BREAK in start else ""


def _behind(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    length: int,
    questions: list[Question],
    skipped: int,
    pieces_of: Callable[[int, int], list[str]],
    form: str,
    limit: int | None,
    prefixes: int | None,
    ending: str = "",
) -> Requests:
    """`skipped` characters of every context are in the prefix already, whose last words are `ending`."""
    questions = evenly(questions, limit)
    ends = [
        encode_pair(tokenizer, BREAK + question.context[skipped:], question.continuations, special=False)
        for question in questions
    ]
    longest = max(
        len(context) + max(map(len, continuations), default=question.options.get("max_new_tokens", 0))
        for question, (context, continuations) in zip(questions, ends, strict=True)
    )
    last = tokenizer.encode(BREAK + ending.rstrip(), add_special_tokens=False) if ending else []
    room = length - longest - len(last)
    if room < 1:
        raise ValueError(f"{name} has items of {length - room} tokens: --long must be above that, got {length}")
    wanted = max(1, min(MOST_PREFIXES, len(questions) // ITEMS_A_PREFIX)) if prefixes is None else prefixes
    used = min(wanted, len(questions))
    names = [f"{name}@{length} {form} {number}" for number in range(used)]
    filled = {one: fill(tokenizer, pieces_of(number, used), room) + last for number, one in enumerate(names)}
    sizes = [len(tokens) for tokens in filled.values()]
    settings = {"form": form, "length": length, "prefixes": used, "prefix_tokens": [min(sizes), max(sizes)]}
    task = Task(f"{name}@{length} {form}", BENCHMARKS[name].measure, "task", settings)
    items = [
        as_item(task, question, context, continuations, names[index % used])
        for index, (question, (context, continuations)) in enumerate(zip(questions, ends, strict=True))
    ]
    return Requests({task.name: task}, items, filled)


def fill(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[str], room: int) -> list[int]:
    """The tokens of as many whole pieces as `room` holds, with empty lines between; what is too long is passed over."""
    tokens: list[int] = []
    for piece in pieces:
        text = (BREAK if tokens else "") + piece.strip()
        more: list[int] = tokenizer.encode(text, add_special_tokens=not tokens)
        if len(tokens) + len(more) <= room:
            tokens += more
        if room - len(tokens) < room // 100:
            break
    if not tokens:
        raise ValueError(f"no example or paragraph fits into {room} tokens: ask for a greater length")
    return tokens
