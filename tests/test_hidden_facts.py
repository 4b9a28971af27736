"""benchmarks/hidden_facts.py: what is asked for was said before, in forms that judge no adapter."""

import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import hidden_facts

from focus_attn.evaluation import retrieval

WORDS = ["river", "stone", "winter", "garden", "letter", "silver", "candle", "morning", "harbour", "window"]
BOOK = " ".join(f"It was the {number}th day of a long journey, and nobody spoke." for number in range(2000))


def test_what_is_asked_for_follows_from_the_facts(monkeypatch):
    form = hidden_facts.Form("{name}={value}", "{name}={other}", "{name}:{value}", "all {value}:{names}")
    monkeypatch.setattr(hidden_facts, "FORMS", [form])
    several = 0
    for seed in range(100):
        facts, questions = hidden_facts.facts_and_questions(WORDS, random.Random(seed))
        held: dict[str, str] = {}
        for fact in facts:
            name, value = fact.split("=")
            held[name] = held.get(value, value)  # that of a name before it, or one of its own
        asked = [question for question in questions if not question.startswith("all ")]
        assert sorted(asked) == sorted(f"{name}:{value}" for name, value in held.items())
        for question in set(questions) - set(asked):
            value, names = question.removeprefix("all ").split(":")
            assert names.split(", ") == [name for name in held if held[name] == value]
            several += 1
    assert several > 10


def test_facts_are_spread_over_a_stretch_and_keep_their_order():
    text = hidden_facts.section(BOOK, WORDS, random.Random(3))
    facts, questions = text.rstrip().split("\n", 1)
    assert "It was the" in facts and "It was the" not in questions


def test_documents_fill_the_longest_block_and_are_the_same_again():
    text = hidden_facts.document([BOOK], random.Random(0))
    assert len(text.split()) >= hidden_facts.SHORTEST * hidden_facts.WORDS_A_TOKEN
    assert text == hidden_facts.document([BOOK], random.Random(0))


@pytest.mark.parametrize("text", ["Short.", "WORD " * 4000, BOOK, "no end of a sentence " * 400])
def test_text_that_cannot_hide_anything_is_refused(text, tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["hidden_facts.py", str(tmp_path / "book.txt"), str(tmp_path / "facts")])
    with pytest.raises(SystemExit, match="is prose"):
        hidden_facts.main()


def test_no_form_is_that_of_the_evaluation():
    judged = " ".join(
        " ".join([hidden.opening, *hidden.facts, hidden.question])
        for kind in retrieval.KINDS
        for hidden in [retrieval._MAKERS[kind](random.Random(0))]
    )
    for form in hidden_facts.FORMS:
        for sentence in form:
            for words in re.split(r"\{\w+\}|\n", sentence):
                assert len(words.split()) < 3 or words.strip() not in judged
