"""benchmarks/hidden_facts.py: what is asked for was said before, in forms that judge no adapter."""

import itertools
import random
import sys
from pathlib import Path

import pytest
from books import BOOK, PLAIN, WORDS, shape

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import book_text
import hidden_facts

from focus_attn.evaluation import retrieval


def test_what_is_asked_for_follows_from_the_facts(monkeypatch):
    form = hidden_facts.Form("{name}={value}", "{name}={other}", "{name}:{value}", "all {value}:{names}")
    monkeypatch.setattr(hidden_facts, "FORMS", [form])
    monkeypatch.setattr(hidden_facts, "LISTS", [", ".join])
    monkeypatch.setattr(hidden_facts, "ASKED_TO_REPEAT", ["again {facts}"])
    several = repeated = 0
    for seed in range(100):
        facts, questions = hidden_facts.facts_and_questions(WORDS, random.Random(seed))
        held: dict[str, str] = {}
        for fact in facts:
            name, value = fact.split("=")
            held[name] = held.get(value, value)  # that of a name before it, or one of its own
        if f"again {', '.join(facts)}" in questions:
            questions.remove(f"again {', '.join(facts)}")
            repeated += 1
        asked = [question for question in questions if not question.startswith("all ")]
        assert sorted(asked) == sorted(f"{name}:{value}" for name, value in held.items())
        for question in set(questions) - set(asked):
            value, names = question.removeprefix("all ").split(":")
            assert names.split(", ") == [name for name in held if held[name] == value]
            several += 1
    assert several > 10 and 30 < repeated < 70


def test_facts_are_spread_over_a_stretch_and_keep_their_order(monkeypatch):
    facts = ["(first)", "(second)", "(third)"]
    monkeypatch.setattr(hidden_facts, "facts_and_questions", lambda words, choose: (facts, ["asked\n"]))
    apart = 0
    for seed in range(10):
        text, asked, _ = hidden_facts.section(BOOK, WORDS, random.Random(seed)).split("\n", 2)
        places = [text.index(fact) for fact in facts]
        assert places == sorted(places) and asked == "asked"
        assert text.count("nobody spoke") * len("It was a and b, and nobody spoke".split()) > 40
        apart += all("nobody spoke" in text[here:there] for here, there in itertools.pairwise(places))
    assert apart > 5


def test_documents_fill_the_longest_block_and_are_the_same_again():
    text = hidden_facts.document([BOOK], random.Random(0))
    assert len(text.split()) >= hidden_facts.SHORTEST * book_text.WORDS_A_TOKEN
    assert text == hidden_facts.document([BOOK], random.Random(0))


@pytest.mark.parametrize("text", [BOOK[:20_000], "It was long ago, and nobody spoke. " * 4000, " ".join(PLAIN * 30)])
def test_text_that_cannot_hide_anything_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(hidden_facts, "MOST_TRIES", 10)
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["hidden_facts.py", str(tmp_path / "book.txt"), str(tmp_path / "facts")])
    with pytest.raises(SystemExit, match=r"no text of more than|no sentences"):
        hidden_facts.main()


def test_no_form_is_that_of_the_evaluation():
    made = {kind: retrieval._MAKERS[kind](random.Random(0)) for kind in retrieval.KINDS}
    judged = {shape(fact) for hidden in made.values() for fact in hidden.facts}
    assert shape("VAR QWERT = VAR ASDFG.") in judged and shape("VAR QWERT = 1234567.") in judged
    for form in hidden_facts.FORMS:
        given = form.given.format(name="ABCDE", value="7654321"), form.same.format(name="ABCDE", other="FGHIJ")
        assert not judged & {shape(fact) for fact in given}
    said = " ".join(word for hidden in made.values() for word in (hidden.opening, *hidden.facts, hidden.question))
    assert not any(asked.split("{")[0].strip() in said for asked in hidden_facts.ASKED_TO_REPEAT)
