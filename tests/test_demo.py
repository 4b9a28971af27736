"""The demo on a tiny random model: every stage runs and the report says what was measured."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from focus_attn import FocusConfig, get_focus_model
from focus_attn.bench import Timing, crossover, describe_crossover
from focus_attn.demo import FOCUS, FULL, RANDOM, SHIPPED, WINDOW, DemoOptions, _seconds_a_block, run_demo
from focus_attn.report import render_report
from focus_attn.report.html import describe_gap
from focus_attn.zoo import tiny_random_model


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """With an adapter of the tiny model in the place of the shipped one: one that keeps every pair."""
    shipped, seen, said = tmp_path_factory.mktemp("shipped"), [], []
    everything = FocusConfig(num_groups=2, query_top_k=2, window=16, num_sinks=2, router_dim=4)
    get_focus_model(tiny_random_model(0)[0], everything).save_pretrained(shipped)
    options = DemoOptions.for_tests(shipped=shipped)
    result, model = run_demo(options, lambda *call: seen.append(call), lambda line: said.append((len(seen), line)))
    return result, model, seen, said


def test_every_condition_is_measured_on_the_same_predictions(demo):
    result, *_ = demo
    assert list(result.perplexity) == [FULL, SHIPPED, FOCUS, WINDOW, RANDOM]
    assert len({(one.tokens, one.blocks, one.window) for one in result.perplexity.values()}) == 1
    kept = {name: one.pairs_kept for name, one in result.perplexity.items()}
    assert kept[FULL] is None
    assert kept[WINDOW] < kept[FOCUS]
    assert kept[RANDOM] == pytest.approx(kept[FOCUS], rel=0.2)


def test_how_fast_a_machine_is_does_not_depend_on_its_disk(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("focus_attn.demo.time.perf_counter", lambda: clock[0])
    seen = []

    def base(ids):
        clock[0] += 0.01 * ids.shape[1] if seen else 50.0  # the first forward waits for the weights
        seen.append(ids.shape[1])

    assert _seconds_a_block(base, torch.zeros(3, 64, dtype=torch.long)) == pytest.approx(0.64)
    assert seen[-1] == 8


@pytest.mark.parametrize(("blocks", "measured"), [(None, 4), (3, 3)])
def test_a_slow_machine_measures_half_unless_it_is_told(monkeypatch, blocks, measured):
    monkeypatch.setattr("focus_attn.demo.SLOW", 0.0)
    said = []
    result, _ = run_demo(DemoOptions.for_tests(blocks=blocks), say=said.append)
    told, _ = run_demo(DemoOptions.for_tests(blocks=measured))
    assert result.perplexity[FULL].blocks == measured and result.perplexity[FULL].ppl == told.perplexity[FULL].ppl
    assert [("4 blocks are measured" in line) for line in said] == ([] if blocks else [True])


def test_the_shipped_adapter_is_shown_before_the_fit_and_leaves_nothing_behind(demo):
    result, model, seen, [(at, line)] = demo
    full, shipped = result.perplexity[FULL], result.perplexity[SHIPPED]
    assert shipped.ppl == pytest.approx(full.ppl, rel=1e-5) and shipped.pairs_kept == 1.0
    assert f"perplexity {shipped.ppl:.2f} at 100% of the token pairs, {full.ppl:.2f} with full attention" in line
    assert "fitting the routers" not in {what for what, *_ in seen[:at]}
    assert list(model.adapters) == [model.active_adapter]


def test_the_fitted_model_is_the_one_measured(demo):
    result, model, *_ = demo
    assert model.focus_config == result.config
    assert model.get_nb_trainable_parameters()[0] == result.router_parameters
    assert [timing.length for timing in result.prefill] == [64, 128]


def test_every_stage_reports_its_end(demo):
    _, _, seen, _ = demo
    last = {what: (done, total) for what, done, total in seen}
    assert all(done == total for done, total in last.values())
    assert len(last) >= 6


def test_numbers_survive_json(demo):
    result, *_ = demo
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["perplexity"][FOCUS]["ppl"] == result.perplexity[FOCUS].ppl
    assert plain["attention"][0]["speedup"] == result.attention[0].speedup
    assert plain["groups"]["groups"][0]["key_tokens"] == result.groups.groups[0].key_tokens
    assert plain["config"]["window"] == 16


class Outline(HTMLParser):
    """Tags that are open, headings, and whatever a browser would fetch."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.count = [], [], {}

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.fetched.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_whole_and_fetches_nothing(demo):
    result, *_ = demo
    page = render_report(result)
    outline = Outline()
    outline.feed(page)
    assert outline.open == [] and outline.fetched == []
    assert outline.count["svg"] == 4
    assert "@import" not in page and "url(http" not in page
    assert not re.search(r"\$[a-z_]+", page)


def test_report_shows_the_measured_numbers(demo):
    result, *_ = demo
    page = render_report(result)
    for one in result.perplexity.values():
        assert f"{one.ppl:.2f}" in page
    for timing in result.prefill:
        assert f"{timing.speedup:.2f}x" in page
    assert describe_gap(result) in page


def test_crossover_is_interpolated_between_lengths():
    timings = [Timing(1000, 1.0, 2.0, 3), Timing(4000, 8.0, 4.0, 3)]
    assert crossover(timings) == pytest.approx(2000)
    assert "about 2,000" in describe_crossover(timings)
    assert describe_crossover(timings[-1:]).endswith("the only length that was measured")


def test_crossover_that_was_not_reached_is_said_to_lie_beyond():
    timings = [Timing(1000, 1.0, 2.0, 3), Timing(4000, 8.0, 9.0, 3)]
    assert crossover(timings) is None
    assert "beyond" in describe_crossover(timings) and "4,000" in describe_crossover(timings)
    assert "from 1,000 on" in describe_crossover([Timing(1000, 2.0, 1.0, 3), Timing(2000, 4.0, 1.0, 3)])
    assert describe_crossover([]) == "nothing was measured"


def test_a_length_that_wins_by_chance_is_no_crossover():
    timings = [Timing(1000, 2.0, 1.0, 3), Timing(2000, 2.0, 4.0, 3), Timing(4000, 8.0, 4.0, 3)]
    assert 2000 < crossover(timings) < 4000
