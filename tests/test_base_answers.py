"""benchmarks/base_answers.py: questions that judge no adapter, and the base model's own words behind them."""

import itertools
import random
import re
import sys
from pathlib import Path

import pytest
from books import BOOK, WORDS, shape

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import base_answers

from focus_attn.evaluation import retrieval
from focus_attn.evaluation.retrieval import Haystack
from focus_attn.training.token_file import open_token_file
from focus_attn.zoo import tiny_random_model

LENGTH = 1200


@pytest.fixture(scope="module")
def tiny():
    return tiny_random_model()


def test_the_names_asked_for_are_those_that_come_to_have_the_value(monkeypatch):
    monkeypatch.setattr(base_answers, "GIVEN", [("{name}={value}", "{name}={other}")])
    monkeypatch.setattr(base_answers, "ASKED", ["{value}?"])
    monkeypatch.setattr(base_answers, "BEGUN", ["{count}:"])
    others = 0
    for seed in range(100):
        hidden = base_answers.chain(random.Random(seed), WORDS)
        held: dict[str, str] = {}
        for fact in hidden.facts:
            name, value = fact.split("=")
            held[name] = held.get(value, value)
        value, count = re.fullmatch(r"\n(\d+)\? (\d+):", hidden.question).groups()
        assert hidden.expected == [name for name in held if held[name] == value] and len(hidden.expected) == int(count)
        others += len(held) > int(count)
    assert 15 < others < 50


def test_every_value_of_a_key_is_asked_for():
    for seed in range(20):
        hidden = base_answers.several_values(random.Random(seed), WORDS)
        assert len(set(hidden.expected)) == len(hidden.facts) >= 2
        assert all(value in fact for value, fact in zip(hidden.expected, hidden.facts, strict=True))
        (key,) = (word for word in WORDS if word in hidden.question)
        assert all(key in fact for fact in hidden.facts)


def test_no_part_is_that_of_the_evaluation():
    made = {kind: retrieval._MAKERS[kind](random.Random(0)) for kind in retrieval.KINDS}
    judged = {shape(fact) for hidden in made.values() for fact in hidden.facts}
    for (given, same), (thing, word) in itertools.product(base_answers.GIVEN, base_answers.THINGS.items()):
        parts = {"word": word, "thing": thing, "name": "ABCDE"}
        facts = given.format(value="7654321", **parts), same.format(other="FGHIJ", **parts)
        assert not judged & set(map(shape, facts))
    for given, *_ in base_answers.SEVERAL:
        assert shape(given.format(thing="number", key=retrieval.WORDS[0], value="7654321")) not in judged
    runs = {run for hidden in made.values() for text in (hidden.opening, hidden.question) for run in runs_of(text)}
    assert runs_of("Answer: {count} {thing}s are assigned the value {value}, they are:") & runs  # the evaluation's end
    asked = (part for form in base_answers.SEVERAL for part in form[1:])
    for part in (*base_answers.OPENINGS, *base_answers.ASKED, *base_answers.BEGUN, *asked):
        assert not runs_of(part) & runs, part


def runs_of(text):
    """All runs of five words, the things that are asked for and their names and numbers alike."""
    blank = re.sub(r"{\w+}s?", "_", shape(text))
    words = re.sub(r"\b(variables?|special magic numbers?|\d+)\b", "_", blank).lower().split()
    return {tuple(words[n : n + 5]) for n in range(len(words) - 4)}


def test_a_section_has_room_for_its_answer_and_fills_its_length(tiny):
    _, tokenizer = tiny
    haystack = Haystack(tokenizer, [BOOK])
    for seed in range(5):
        one = base_answers.section(haystack, WORDS, LENGTH, random.Random(seed))
        assert len(one.context) <= LENGTH - base_answers.MAX_NEW_TOKENS
        text = tokenizer.decode(one.context)
        assert all(string in text for string in one.expected)
        for answer in ([7, 8, 9], [7] * base_answers.MAX_NEW_TOKENS):
            row = base_answers.row(one, answer, LENGTH)
            assert len(row["input_ids"]) == len(row["completion_mask"]) == LENGTH
            marked = [token for token, mask in zip(*row.values(), strict=True) if mask]
            assert marked == answer and row["input_ids"][: len(one.context)] == one.context


def test_answers_are_a_line_each_in_the_order_asked(tiny, monkeypatch):
    class Written:
        def __init__(self, model, requests, tokenizer):
            self.items = requests.items

        def check(self): ...

        def run(self, items):
            texts = [" first\nsecond", "\n- one\n- two", " all"]
            yield [(item.key, {"text": text}) for item, text in reversed(list(zip(items, texts, strict=True)))]

    monkeypatch.setattr(base_answers, "Scorer", Written)
    sections = [base_answers.Section([5], [], [])] * 3
    assert [*base_answers.answers(*tiny, sections)] == [" first\n", "\n- one\n", " all"]


def test_what_was_found_counts_more_and_bare_numbers_do_not():
    assert base_answers.times_to_take(" 1. ABCDE. 2.", ["ABCDE", "FGHIJ"]) == base_answers.TIMES_IF_FOUND > 1
    assert base_answers.times_to_take(" 77, 78\n", ["77"]) == base_answers.TIMES_IF_FOUND
    assert base_answers.times_to_take(" 1. General Lee.\n", ["ABCDE"]) == 1
    assert base_answers.times_to_take(" 1. 2. 3. 4.\n", ["ABCDE"]) == base_answers.times_to_take("\n", ["A"]) == 0


def test_a_token_file_with_its_answers(tiny, tmp_path, monkeypatch, capsys):
    written = [" 1. 2. 3.", *[" General Lee.\n"] * 3, " {}, and no more\n"]

    def answers(model, tokenizer, sections):
        yield from (text.format(one.expected[0]) for text, one in zip(written, sections, strict=True))

    monkeypatch.setattr(base_answers, "load_default_on", lambda device: tiny)
    monkeypatch.setattr(base_answers, "answers", answers)
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    output = tmp_path / "made" / "facts.npy"
    command = ["base_answers.py", str(tmp_path), str(output), "--sections", "5", "--length", str(LENGTH)]
    monkeypatch.setattr(sys, "argv", command)
    base_answers.main()
    store = open_token_file(output)
    assert store.documents.tolist() == [[0, 4 * LENGTH], [4 * LENGTH, 8 * LENGTH]]  # three, and one five times
    sections = zip(store.ids.reshape(-1, LENGTH), store.answers.reshape(-1, LENGTH), strict=True)
    texts = [tiny[1].decode(ids[marked]) for ids, marked in sections]
    assert texts.count(" General Lee.\n") == 3 and sum("and no more\n" in text for text in texts) == 5
    assert "8 sections; the base model found something in 1 of 5" in capsys.readouterr().out


def test_the_base_model_is_asked(tiny):
    haystack = Haystack(tiny[1], [BOOK])
    sections = [base_answers.section(haystack, WORDS, LENGTH, random.Random(seed)) for seed in range(2)]
    texts = [*base_answers.answers(*tiny, sections)]
    assert len(texts) == 2 and all(len(text.lstrip().split("\n")) <= 2 for text in texts)


def test_books_that_are_too_short_are_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "book.txt").write_text("It was long ago.", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["base_answers.py", str(tmp_path), str(tmp_path / "answers.npy")])
    with pytest.raises(SystemExit):
        base_answers.main()
    assert "no text of more than" in capsys.readouterr().err
