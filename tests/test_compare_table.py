"""Cells to rows: seeds put together, intervals, and who is first."""

import itertools
import math

import pytest

from focus_attn.compare.plot import draw, label_heights, pareto_front, plot_curves, plot_pareto
from focus_attn.compare.recipe import Comparison, Method
from focus_attn.compare.runner import Outcome
from focus_attn.compare.table import Place, blocks_of, make_rows, places, verdicts
from focus_attn.compare.terminal import print_outcome

HARD = (3.0, 3.2, 2.8, 3.1)  # losses of four blocks under full attention
RUN = {"gpu": "NVIDIA H200", "cpu": "a CPU", "torch": "2.11", "date": "2026-01-01", "commit": "abc"}
AT = Place("model", "books", 64)


def cell(row, losses=HARD, *, kind="skips", focus=False, cost=0.2, ms=1.0, seed=0, tune=None, **figures):
    ppl = math.exp(sum(losses) / len(losses))
    method = {"attention": "full" if row == "full" or focus else row, "tune": tune}
    measured = {"ppl": ppl, "losses": list(losses), "pairs_kept": cost, "multiply_adds": cost, "leaking": False}
    return {
        "run": RUN,
        "model": "model",
        "data": "books",
        "length": 64,
        "row": row,
        "method": method,
        "seed": seed,
        "kind": kind,
        "focus": focus,
        "trained_parameters": 0,
        "figures": {**measured, "dominance": 0.3 if focus else None, **figures},
        "timing": {"ms": ms, "dense_ms": 2.0},
    }


def above(by):
    return tuple(loss + by for loss in HARD)


FULL = cell("full", kind="dense", cost=1.0, ms=2.0)


def test_seeds_become_one_row():
    cells = [FULL, *(cell("Focus", above(by), focus=True, seed=seed) for seed, by in enumerate((0.0, 0.02, 0.04)))]
    base, focus = make_rows(cells)
    assert base.is_base
    assert base.over_base is None
    assert focus.seeds == 3
    assert focus.lowest == pytest.approx(base.ppl)
    assert focus.highest == pytest.approx(base.ppl * math.exp(0.04))
    assert focus.over_base.estimate == pytest.approx(math.exp(0.02))
    assert focus.over_base.low == pytest.approx(focus.over_base.high)  # every block is as much worse
    assert focus.speedup == 2.0


def test_a_row_has_the_times_of_its_newest_day():
    """Older ones are of other kernels or another machine, whatever day its perplexity is of."""
    ours = [cell("Focus", focus=True, ms=9.0, seed=seed) for seed in range(3)]
    ours[1] |= {"timed": {**RUN, "date": "2026-01-02"}, "timing": {"ms": 1.0, "dense_ms": 2.0}}
    _, focus = make_rows([FULL, *ours])
    assert (focus.seeds, focus.ms, focus.day) == (3, 1.0, "2026-01-02")


def test_blocks_are_apart_and_sorted():
    cells = [FULL, cell("window", above(0.2)), cell("bigbird", above(0.1)), cell("sparq", kind="selects")]
    rows = make_rows(cells)
    assert places(rows) == [AT]
    assert {kind: [row.name for row in block] for kind, block in blocks_of(rows, AT).items()} == {
        "skips": ["bigbird", "window"],
        "selects": ["sparq"],
        "dense": ["full"],
    }
    assert [row.name for row in blocks_of(rows, AT, stepwise=True)["skips"]] == ["window", "bigbird"]


def test_first_among_those_that_cost_no_more():
    cells = [
        FULL,
        cell("Focus", above(0.1), focus=True),
        cell("window", above(0.2)),
        cell("moba", HARD, cost=0.3, ms=3.0),
    ]
    by_cost, by_time = verdicts(make_rows(cells), AT)
    assert by_cost.startswith("Focus comes before the best of the 1 peer")
    assert "at about the same multiply-adds or less" in by_cost and "20.0% against 20.0% of the mult" in by_cost
    assert "at about the same time or less" in by_time and "1 against 1 ms a layer" in by_time
    assert "cheaper" not in by_cost + by_time


def test_a_rival_that_costs_less_is_called_so():
    cells = [FULL, cell("Focus", above(0.1), focus=True), cell("window", above(0.2), cost=0.18, ms=0.99)]
    by_cost, by_time = verdicts(make_rows(cells), AT)
    assert by_cost.startswith(
        "Focus has no peer that skips work at about the same multiply-adds; one that costs less is"
    )
    assert by_cost.endswith("20.0% against 18.0% of the multiply-adds: window is the cheaper one.")
    assert by_time.endswith("1 against 0.99 ms a layer.")


def test_the_best_of_several_cheaper_rivals():
    rivals = [cell(name, above(0.2 + worse), cost=0.1) for worse, name in ((0.1, "bigbird"), (0.0, "window"))]
    sentence = verdicts(make_rows([FULL, cell("Focus", above(0.1), focus=True), *rivals]), AT)[0]
    assert "the best of the 2 that cost less is behind" in sentence and "of window, ratio" in sentence
    same = cell("moba", above(0.3), cost=0.2)
    sentence = verdicts(make_rows([FULL, cell("Focus", above(0.1), focus=True), *rivals, same]), AT)[0]
    assert sentence.startswith("Focus comes before the best of the 3 peers")


def test_where_focus_is_not_first_it_says_so():
    cells = [FULL, cell("Focus", above(0.1), focus=True), cell("window", above(0.05)), cell("bigbird", above(0.2))]
    sentence = verdicts(make_rows(cells), AT)[0]
    assert "Focus is NOT first: the best of the 2 peers" in sentence
    assert "is window" in sentence
    assert "does not tell apart" not in sentence
    cells = [cell("full", HARD * 2, kind="dense"), cell("Focus", above(0.1) * 2, focus=True)]
    cells.append(cell("window", (2.0, 4.1, 2.7, 3.6) * 2))
    assert "does not tell apart" in verdicts(make_rows(cells), AT)[0]


def test_few_blocks_say_nothing_of_others():
    cells = [cell("full", HARD[:1], kind="dense"), cell("Focus", (3.0,), focus=True), cell("window", (3.1,))]
    assert "of too few blocks to tell" in verdicts(make_rows(cells), AT)[0]


def test_what_looks_ahead_is_not_ranked():
    cells = [FULL, cell("Focus", above(0.1), focus=True), cell("vertical_slash", HARD, leaking=True)]
    assert verdicts(make_rows(cells), AT) == []


def test_focus_that_looks_ahead_is_not_ranked_either():
    assert verdicts(make_rows([FULL, cell("Focus", focus=True, leaking=True), cell("window", above(0.1))]), AT) == []


def test_a_rival_with_trained_weights_is_named_as_one():
    rival = {**cell("window", HARD, tune={"how": "full"}), "trained_parameters": 100}
    assert (
        "(whose weights were trained too)"
        in verdicts(make_rows([FULL, cell("Focus", above(0.1), focus=True), rival]), AT)[0]
    )


def test_what_is_not_possible_stands_in_the_table(capsys):
    failed = {**cell("performer"), "failed": "performer cannot go as low as 20 %"}
    del failed["figures"]
    from rich.console import Console

    comparison = Comparison(title="Peers", methods=(Method(name="performer", attention="performer"),), note="A TRIAL.")
    outcome = Outcome(cells=[FULL, failed], stopped="stopped after 5 s")
    print_outcome(Console(width=160), comparison, outcome)
    shown = capsys.readouterr().out
    for part in (
        "A TRIAL.",
        "Peers: model, books, 64 tokens",
        "performer cannot go as low",
        "keeps every pair",
        "after 5 s",
    ):
        assert part in shown


def test_pareto_front():
    assert pareto_front([(1.0, 10.0), (0.2, 12.0), (0.3, 13.0), (0.1, 30.0)]) == [(0.1, 30.0), (0.2, 12.0), (1.0, 10.0)]


def test_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = make_rows([FULL, cell("Focus", above(0.1), focus=True), cell("window", above(5.0))])
    plot_pareto(rows, AT, "title", tmp_path / "pareto.svg")
    drawn = (tmp_path / "pareto.svg").read_text()
    assert "window: " in drawn  # off the scale: named with its figure
    assert "keeps every pair" in drawn


def test_the_panel_reaches_further_where_most_rows_are_far_off(tmp_path):
    pytest.importorskip("matplotlib")

    def drawn(names):
        far = [cell("w", above(1.1)), cell("far", above(3.0))]
        plot_pareto(make_rows([FULL, *names, *far]), AT, "title", tmp_path / "pareto.svg")
        return (tmp_path / "pareto.svg").read_text()

    few_off = drawn([cell(f"near {number}") for number in range(3)])
    assert "w: " in few_off and "far: " in few_off
    most_off = drawn([cell(f"off {number}", above(0.5 + number / 10)) for number in range(6)])
    assert "w: " not in most_off and "off 5: " not in most_off and "far: " in most_off


def test_several_places_are_files_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    comparison = Comparison(title="Peers", methods=(Method(name="window", attention="window"),))
    books, more = [FULL, cell("window")], [{**one, "data": "more", "length": 128} for one in (FULL, cell("window"))]
    hub = [{**one, "model": "Qwen/Qwen3-0.6B"} for one in books]
    longer = [{**one, "length": 256} for one in more]
    for number, (cells, names) in enumerate(
        (
            (books, ["a"]),
            ([*books, *more], ["a-books", "a-more"]),
            ([*more, *longer], ["a-128", "a-256"]),
            ([*books, *hub], ["a-Qwen_Qwen3-0.6B", "a-model"]),
        )
    ):
        (tmp_path / str(number)).mkdir()
        draw(comparison, cells, tmp_path / str(number) / "a.svg")
        assert sorted(file.stem for file in (tmp_path / str(number)).iterdir()) == names


def test_seeds_are_drawn_from_end_to_end_and_said_where_they_leave_the_panel(tmp_path):
    pytest.importorskip("matplotlib")
    seeds = [cell("Focus", above(over), focus=True, seed=seed) for seed, over in enumerate((-0.3, 1.0))]
    one = cell("window", above(0.1))
    plot_pareto(make_rows([FULL, *seeds, one]), AT, "title", tmp_path / "pareto.svg")
    drawn = (tmp_path / "pareto.svg").read_text()
    highest = max(cell["figures"]["ppl"] for cell in seeds)
    assert f"▲ {highest:.3g}" in drawn and drawn.count("▲") == 2  # a panel for each cost
    ends = [(point - 1.0, point + 4.0) for point in (1.0, 2.0, 3.0)]
    heights = label_heights([(1.0, 1.0), (2.0, 2.0), (4.0, 3.0)], ["a", "b", "c"], ends)
    assert heights == pytest.approx([0.1 + 0.8 * share for share in (1 / 7, 2 / 7, 3 / 7)])  # of what is drawn, 0 to 7


def test_without_times_there_is_one_panel_and_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    timed = [FULL, cell("softmax", focus=True), cell("Sinkhorn", focus=True)]
    cells = [{name: value for name, value in one.items() if name != "timing"} for one in timed]
    plot_pareto(make_rows(cells), AT, "title", tmp_path / "pareto.svg")
    assert "measured time" not in (tmp_path / "pareto.svg").read_text()
    for one in cells[1:]:
        one["training"] = {"curve": [{"step": 5, "dominance": 0.2}, {"step": 10, "dominance": 0.9}]}
    plot_curves([{**one, "training": one.get("training", {})} for one in cells], "title", tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert "Sinkhorn" in drawn
    assert ">full<" not in drawn


def test_many_curves_are_told_apart(tmp_path):
    """More rows than colours take another line; a row whose seed 0 is missing has its name all the same."""
    pytest.importorskip("matplotlib")
    curve = {"training": {"curve": [{"step": 5, "dominance": 0.2}, {"step": 10, "dominance": 0.9}]}}
    cells = [{**cell(f"way {number}", focus=True, seed=seed), **curve} for number in range(7) for seed in (1, 2)]
    plot_curves(cells, "title", tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert [drawn.count(f">way {number}<") for number in range(7)] == [1] * 7
    assert drawn.count("stroke-dasharray") == 3  # two seeds and the legend of the last


def test_names_of_neighbours_do_not_cover_each_other():
    same = [(0.2, 20.0), (0.2, 20.001), (0.2, 20.002), (0.9, 20.001), (0.2, 25.0)]
    heights = label_heights(same, ["a name"] * 5, [(ppl, ppl) for _, ppl in same])
    stacked = sorted(heights[:3])
    assert all(after - before >= 0.0349 for before, after in itertools.pairwise(stacked))
    assert heights[3] == pytest.approx(0.1, abs=1e-3)
    assert heights[4] == pytest.approx(0.9)


def test_long_names_go_over_the_points_they_would_cover():
    points = [(0.1, 20.0), (0.3, 20.0), (1.0, 30.0)]
    short, long = (
        label_heights(points, [name, "b", "c"], [(ppl, ppl) for _, ppl in points])[0] for name in ("a", "a" * 60)
    )
    assert short == pytest.approx(0.1) and long == pytest.approx(0.135)


def test_blocks_of_a_document_are_drawn_together():
    luck = (0.2, 0.1, -0.1, 0.0, -0.2, 0.1, 0.3, -0.1)  # of eight documents
    apart = [
        cell("full", (3.0,) * 32, kind="dense"),
        cell("Focus", [3.0 + x for x in luck for _ in range(4)], focus=True),
    ]
    together = [one | {"documents": [number // 4 for number in range(32)]} for one in apart]
    wide, narrow = (make_rows(cells)[1].over_base for cells in (together, apart))
    assert narrow.drawn_together is None and wide.drawn_together == 8
    assert wide.high - wide.low > narrow.high - narrow.low
