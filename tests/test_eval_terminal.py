"""Tables of an evaluation on terminals of any width."""

import io

import pytest
from rich.console import Console

from focus_attn.evaluation.bootstrap import Interval
from focus_attn.evaluation.requests import Requests, Task
from focus_attn.evaluation.summary import Cell, Row
from focus_attn.evaluation.terminal import print_grids, print_positions, print_rows

ADAPTERS = ["first", "second", "third", "fourth"]


def printed(width: int, print_on) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_on(console)
    return console.file.getvalue()


def rows() -> list[Row]:
    value = {
        model: Interval(20.0 + number, 19.0, 21.0, 8, 1000, 0.95) for number, model in enumerate(["base", *ADAPTERS])
    }
    ratios = {adapter: Interval(1.01, 1.0, 1.02, 8, 1000, 0.95) for adapter in ADAPTERS}
    return [Row("text", "1-128", 8, value, ratios, True, None, None, {})]


def cells() -> list[Cell]:
    found = {model: [1.0, 0.5] for model in ["base", *ADAPTERS]}
    return [Cell("needle", length, depth, found) for length in (1024, 2048) for depth in (0.0, 0.5)]


@pytest.mark.parametrize(
    ("print_on", "title"),
    [
        (lambda console: print_positions(console, rows(), "base"), "by position"),
        (lambda console: print_grids(console, cells(), "base"), "items a cell"),
    ],
    ids=["rows", "grids"],
)
def test_adapters_share_a_table_only_where_it_fits(print_on, title):
    wide, narrow = printed(240, print_on), printed(80, print_on)
    assert wide.count(title) == 1
    assert narrow.count(title) == len(ADAPTERS)
    for text in (wide, narrow):
        assert "…" not in text and all(name in text for name in ["base", *ADAPTERS])


def test_every_short_verdict_is_explained():
    few = Interval(0.99, 0.98, 1.02, 4, 1000, 0.95)
    row = Row("text", "ppl", 4, dict.fromkeys(("base", "k8"), few), {"k8": few}, True, None, None, {})
    requests = Requests({"text": Task("text", "losses", "perplexity")}, [])
    text = printed(120, lambda console: print_rows(console, requests, [row], "base"))
    assert " few " in text and "few: fewer than six blocks or questions" in text


def test_ratios_and_differences_in_one_table_can_be_told_apart():
    models = {model: Interval(20.0, 19.0, 21.0, 8, 1000, 0.95) for model in ("base", "k8")}
    ratio = Row("text", "ppl", 8, models, {"k8": Interval(0.99, 0.98, 1.0, 8, 1000, 0.95)}, True, None, None, {})
    bits = Row("text", "bits", 8, models, {"k8": Interval(-0.01, -0.02, 0.0, 8, 1000, 0.95)}, False, None, None, {})
    text = printed(120, lambda console: print_positions(console, [ratio, bits], "base"))
    assert "k8 against base" in text
    assert "x 0.9900 [0.9800, 1.0000]" in text and " -0.0100 [-0.0200, +0.0000]" in text
