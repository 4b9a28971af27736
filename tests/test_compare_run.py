"""A comparison run from end to end on the tiny random model."""

import dataclasses
import itertools
import json
import math
import time

import pytest
import torch
from tiny import tiny_model, tokens

from focus_attn import FocusConfig, get_focus_model
from focus_attn.adapters import adapter_digest
from focus_attn.baselines import grouped, make_baseline
from focus_attn.baselines.budget import own_share
from focus_attn.baselines.focus_cost import focus_ledger
from focus_attn.baselines.routing_transformer import RoutingTransformer
from focus_attn.baselines.seam import use_baseline
from focus_attn.compare import Comparison, Dataset, Method, runner, timing
from focus_attn.compare.bench import bench_cells
from focus_attn.compare.data import Texts
from focus_attn.compare.measure import measure
from focus_attn.compare.peer import drawn_with
from focus_attn.compare.recipe import plain
from focus_attn.compare.runner import Settings
from focus_attn.compare.runner import run as run_comparison
from focus_attn.compare.store import FILE, CellStore
from focus_attn.compare.subject import OutOfTimeError, Workshop, digest
from focus_attn.compare.table import make_rows
from focus_attn.compare.timing import layer_calls, time_attention
from focus_attn.compare.together import read_run
from focus_attn.compare.training import identity_of
from focus_attn.evaluation import block_perplexity
from focus_attn.training import Recipe, Stage, Start, loop
from focus_attn.visibility import EVERYTHING
from focus_attn.zoo import tiny_random_model

TRAIN = loop.train
TRAINING = {
    "focus": {"num_groups": 4, "window": 16, "num_sinks": 1},
    "start": {"how": "random"},
    "stages": [{"steps": 2, "length": 96, "sequences": 1, "warmup": 0}],
    "precision": "fp32",
}
COMPARISON = Comparison(
    name="trial",
    models=("tiny",),
    data={"prose": Dataset(lengths=(96, 128), blocks=3)},
    window=16,
    timing=False,
    training=TRAINING,
    tuning={"steps": 2, "length": 96, "sequences": 1, "lr": 1e-3},
    methods=(
        Method(name="Focus", focus={}),
        Method(name="Focus, all groups", focus={}, serve={"query_top_k": 3, "key_top_k": 2}),
        Method(name="window", attention="window", budget="Focus"),
        Method(name="no budget low enough", attention="performer", budget=0.01),
        Method(name="Routing Transformer", attention="routing_transformer", options={"num_clusters": 4}),
        Method(name="LoRA", tune={"how": "lora", "rank": 2, "target_modules": ["q_proj"]}),
        Method(name="tuned window", attention="window", options={"window": 8}, tune={"how": "full"}),
    ),
)

SEEDS = dataclasses.replace(
    COMPARISON,
    data={"prose": Dataset(lengths=(96,), blocks=3)},
    methods=(Method(name="Focus", focus={}), Method(name="window", attention="window", budget="Focus")),
)


def run(comparison, settings):
    """On a text that is quicker to read than the builtin one."""
    settings.folder.mkdir(exist_ok=True)
    text = settings.folder / "prose.txt"
    words = "whale sea ship captain white wind wave the a of and".split()
    text.write_text(" ".join(words[(i * i) % 11] for i in range(4000)))
    data = {name: dataclasses.replace(one, test=str(text)) for name, one in comparison.data.items()}
    return run_comparison(dataclasses.replace(comparison, data=data), settings)


def settings(folder, **changes):
    return dataclasses.replace(Settings(folder, torch.device("cpu"), torch.float32), **changes)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    return folder, run(COMPARISON, settings(folder))


@pytest.fixture(scope="module")
def rows(outcome):
    return {(row.name, row.place.length): row for row in make_rows(outcome[1].cells)}


def test_every_row_is_measured_at_every_length(outcome, rows):
    assert outcome[1].stopped is None
    assert len(rows) == 2 * len(COMPARISON.methods)
    assert [row.name for row in rows.values() if row.failed] == ["no budget low enough"] * 2
    assert "cannot go as low as" in rows["no budget low enough", 96].failed


def test_costs(rows):
    base, focus, window = (rows[name, 128] for name in ("full attention", "Focus", "window"))
    assert (base.pairs_kept, base.multiply_adds, base.over_base) == (1.0, 1.0, None)
    # 2 sides x 2 routers x 4 groups x 32 wide, for 128 tokens and 16 numbers of a centroid; 4 heads of 8.
    router = 2 * 2 * 4 * 32 * (128 + 16) / (128 * 129 / 2 * 4 * 16)
    assert focus.multiply_adds == pytest.approx(focus.pairs_kept + router)
    assert 0.9 * focus.multiply_adds < window.multiply_adds <= focus.multiply_adds
    assert focus.dominance > 0.25
    assert focus.trained_parameters == 2 * 2 * 2 * (32 * 16 + 4 * 16)


def test_kinds(rows):
    kinds = {name: row.kind for (name, length), row in rows.items() if length == 96}
    assert kinds["Focus"] == kinds["window"] == kinds["tuned window"] == "skips"
    assert kinds["LoRA"] == kinds["full attention"] == "dense"


def test_what_keeps_every_pair_is_the_base_model(rows):
    row = rows["Focus, all groups", 96]
    assert row.pairs_kept == 1.0
    assert row.over_base.estimate == pytest.approx(1.0, abs=1e-6)


def test_rows_that_differ_in_serving_share_their_training(outcome):
    trained = [folder for folder in (outcome[0] / "trained").iterdir() if folder.is_dir()]
    assert len(trained) == 1


def test_tuning_trains_what_it_says(rows):
    assert rows["LoRA", 96].trained_parameters == 2 * 2 * (32 + 32)
    assert rows["LoRA", 96].ppl != rows["full attention", 96].ppl
    assert rows["tuned window", 96].trained_parameters > 30_000
    assert rows["tuned window", 96].pairs_kept < 0.2


def test_cells_carry_their_run_and_their_blocks(outcome):
    cells = read_run(outcome[0] / FILE).cells
    assert len(cells) == 2 * len(COMPARISON.methods)
    cell = next(cell for cell in cells if cell["row"] == "Focus")
    assert {"commit", "torch", "command"} <= cell["run"].keys()
    assert len(cell["figures"]["losses"]) == 3
    assert [point["step"] for point in cell["training"]["curve"]] == [1, 2]


def test_a_rerun_measures_nothing_twice(outcome, monkeypatch):
    def refuse(*args):
        raise AssertionError("nothing was to be made")

    monkeypatch.setattr(Workshop, "make", refuse)
    again = run(COMPARISON, settings(outcome[0]))
    assert [cell["figures"]["ppl"] for cell in again.cells if "figures" in cell] == [
        cell["figures"]["ppl"] for cell in outcome[1].cells if "figures" in cell
    ]


def test_a_line_that_was_cut_short_is_measured_again(tmp_path):
    store = CellStore(tmp_path / FILE)
    store.put("a", {"row": "one"})
    store.put("b", {"row": "two"})
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-5])
    cut = CellStore(tmp_path / FILE)
    assert "a" in cut
    assert "b" not in cut
    cut.put("b", {"row": "two"})
    assert [cell["row"] for cell in read_run(tmp_path / FILE).cells] == ["one", "two"]
    with pytest.raises(ValueError, match="no such file"):
        read_run(tmp_path / "none.jsonl")


def test_a_renamed_row_is_not_measured_again(outcome, monkeypatch):
    monkeypatch.setattr(Workshop, "make", None)
    renamed = dataclasses.replace(COMPARISON, methods=(Method(name="the model itself"),))
    assert {cell["row"] for cell in run(renamed, settings(outcome[0])).cells} == {"the model itself"}


def test_fields_that_came_later_count_where_they_are_used():
    plain = Recipe(stages=(Stage(steps=3),))
    later = {"repeats", "first", "stop_gradient", "centroid_rate", "recluster_every"}
    assert not later & {*identity_of(plain)["stages"][0], *identity_of(plain)["start"]}
    used = Recipe(stages=(Stage(steps=3, repeats=0.1),), start=Start(first="heads"))
    assert identity_of(used)["stages"][0]["repeats"] == 0.1
    assert identity_of(used)["start"]["first"] == "heads"
    balanced = Stage(steps=3, stop_gradient=True, centroid_rate=0.1, bias_rate=0.0)
    assert {"stop_gradient", "centroid_rate"} <= identity_of(Recipe(stages=(balanced,)))["stages"][0].keys()
    assert identity_of(Recipe(start=None))["start"] is None


def test_no_new_field_makes_finished_trainings_others():
    """Cells are looked up by what trained them: a field that joins a recipe belongs into `LATER`, or every table that
    was ever run is trained once more."""
    recipe = Recipe(stages=(Stage(steps=3),), start=Start())
    assert digest(plain(identity_of(recipe))) == "3dbd9338a5f42524"


def test_it_begins_nothing_after_its_time(tmp_path):
    stopped = run(COMPARISON, settings(tmp_path, seconds=-1.0))
    assert stopped.cells == []
    assert "the same command goes on" in stopped.stopped


def test_it_stops_in_the_middle_of_a_cell(tmp_path, monkeypatch):
    """Some peers take minutes for one. But one is finished in any case, or none ever might be."""
    now, done = time.monotonic, []

    def later(what, *block):
        done.append(what.split()[0])
        monkeypatch.setattr(time, "monotonic", lambda: now() + 86_400)

    def a_day_later(what, *block):
        done.append(what.split()[0])
        if what.startswith("2/"):
            later(what)

    short = dataclasses.replace(COMPARISON, methods=())
    for folder, progress, blocks in (("first", later, {"1/2"}), ("second", a_day_later, {"1/2", "2/2"})):
        monkeypatch.setattr(time, "monotonic", now)
        done.clear()
        (tmp_path / folder).mkdir()
        stopped = run(short, settings(tmp_path / folder, seconds=1000.0, progress=progress))
        assert len(read_run(tmp_path / folder / FILE).cells) == len(stopped.cells) == 1
        assert stopped.stopped == "stopped after the 1000 s given: the same command goes on"
        assert set(done) == blocks


def test_a_row_that_needs_too_much_memory_holds_nobody_up(tmp_path, monkeypatch):
    make = Workshop.make

    def greedy(self, method, seed):
        if method.focus is not None:
            raise torch.OutOfMemoryError
        return make(self, method, seed)

    monkeypatch.setattr(Workshop, "make", greedy)
    first, second = COMPARISON.methods[:2]
    short = dataclasses.replace(COMPARISON, methods=(second, first))
    outcome = run(short, settings(tmp_path))
    assert {cell["row"] for cell in outcome.cells} == {first.name}
    assert f"out of memory: {second.name}" in outcome.stopped
    assert {cell["row"] for cell in read_run(tmp_path / FILE).cells} == {first.name}  # it is no result


def test_training_that_is_stopped_goes_on(tmp_path, monkeypatch):
    short = dataclasses.replace(COMPARISON, methods=COMPARISON.methods[:2])
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", lambda *args, **options: TRAIN(*args, **{**options, "time_limit": 1e-9}))
        stopped = run(short, settings(tmp_path, seconds=1000.0))
    assert [cell["row"] for cell in stopped.cells] == ["full attention"] * 2
    assert stopped.stopped == "stopped by a signal in the middle of a training: the same command goes on"
    lines = []
    whole = run(short, settings(tmp_path, log=lines.append))
    assert len(whole.cells) == 4
    assert any("going on from step 1 of 2" in line for line in lines)


def test_fine_tuning_that_is_stopped_goes_on(tmp_path, monkeypatch):
    from focus_attn.baselines import fine_tune

    short = dataclasses.replace(COMPARISON, methods=(Method(name="LoRA", tune=COMPARISON.methods[6].tune),))
    real, steps = fine_tune.fine_tune, []

    def stop_at(step):
        def report(done, total):
            steps.append(done)
            if done == step:
                raise OutOfTimeError

        monkeypatch.setattr(
            fine_tune, "fine_tune", lambda *args, **options: real(*args, **{**options, "progress": report})
        )

    stop_at(1)  # long before a checkpoint is due
    stopped = run(short, settings(tmp_path))
    assert stopped.stopped
    assert [cell["row"] for cell in stopped.cells] == ["full attention"] * 2
    stop_at(None)
    assert len(run(short, settings(tmp_path)).cells) == 4
    assert steps == [1, 2]


def test_fine_tuning_that_diverges_is_a_row_that_says_so(tmp_path):
    methods = (Method(name="wild", tune={"how": "full", "lr": 1e20, "steps": 4}), Method(name="w", attention="window"))
    found = make_rows(run(dataclasses.replace(COMPARISON, methods=methods), settings(tmp_path)).cells)
    failed = {row.name: row.failed for row in found}
    assert "lower `lr`" in failed["wild"]
    assert failed["w"] is None


def test_a_loss_that_is_no_number_is_a_row_that_says_so(tmp_path, monkeypatch):
    def spoiled(model, peer, blocks, window, report):
        figures = measure(model, peer, blocks, window, report)
        return dataclasses.replace(figures, losses=(math.nan, *figures.losses[1:])) if peer else figures

    monkeypatch.setattr("focus_attn.compare.runner.measure", spoiled)
    comparison = dataclasses.replace(COMPARISON, methods=(Method(name="w", attention="window"),))
    cells = run(comparison, settings(tmp_path)).cells
    json.dumps(cells, allow_nan=False)
    assert {row.name: row.failed for row in make_rows(cells)}["w"] == "its loss is not a number"


def test_an_adapter_of_another_model_is_a_row_that_says_so(tmp_path):
    methods = (Method(name="shipped", adapter="k8"), Method(name="w", attention="window"))
    found = make_rows(run(dataclasses.replace(COMPARISON, methods=methods), settings(tmp_path)).cells)
    failed = {row.name: row.failed for row in found}
    assert "this adapter was made for" in failed["shipped"] and failed["w"] is None


def test_adapters_are_measured_as_they_are(tmp_path, outcome, rows):
    folder = next(folder for folder in (outcome[0] / "trained").iterdir() if folder.is_dir())
    comparison = dataclasses.replace(COMPARISON, methods=(Method(name="saved", adapter=f"{folder},{folder}"),))
    cells = run(comparison, settings(tmp_path)).cells
    digests = [cell["adapter_digest"] for cell in (*outcome[1].cells, *cells) if cell["adapter_digest"] is not None]
    assert digests == [adapter_digest(folder)] * 4  # two seeds, two lengths
    found = {(row.name, row.place.length): row for row in make_rows(cells)}
    assert found["saved", 96].ppl == pytest.approx(rows["Focus", 96].ppl)
    assert found["saved", 96].seeds == 2
    assert found["saved", 96].trained_parameters == rows["Focus", 96].trained_parameters


def test_measure_agrees_with_the_perplexity_of_a_focus_model():
    base, _ = tiny_random_model()
    model = get_focus_model(base, FocusConfig(num_groups=4, window=8, num_sinks=1))
    blocks = torch.randint(0, 250, (3, 64), generator=torch.Generator().manual_seed(0))
    figures = measure(model, None, blocks, window=8)
    expected = block_perplexity(model, blocks)
    assert figures.ppl == pytest.approx(expected.ppl)
    assert figures.pairs_kept == pytest.approx(expected.pairs_kept)
    assert figures.losses == pytest.approx(expected.block_losses)


def test_equal_cost_is_that_of_the_layers_that_attend_to_everything():
    """In a model with sliding layers a peer is given what Focus costs in the others, so that both cost the same."""
    base = tiny_model("gemma3_text")
    model = get_focus_model(tiny_model("gemma3_text"), FocusConfig(num_groups=4, window=4, num_sinks=1))
    blocks = tokens(2, 96)
    focus = measure(model, None, blocks, window=4)
    assert focus.full_layers < focus.multiply_adds < 1
    window = make_baseline("window", budget=focus.full_layers, length=96, model=base)
    peer = measure(base, window, blocks, window=4)
    assert peer.multiply_adds == pytest.approx(focus.multiply_adds, abs=0.02)
    assert peer.full_layers <= focus.full_layers
    own = measure(base, None, blocks, window=4)
    assert own.pairs_kept == pytest.approx(measure(base, make_baseline("full"), blocks, window=4).pairs_kept)


def test_routed_sliding_layers_save_against_what_they_had():
    config = FocusConfig(num_groups=4, window=2, num_sinks=1, sliding_layers="intersect")
    model, blocks = get_focus_model(tiny_model("gemma3_text"), config), tokens(2, 96)
    with model.record_stats() as stats:
        model(blocks)
    with use_baseline(model, make_baseline("full")) as own:
        model.base_model(blocks, use_cache=False)
    own_shares = [own_share(layer.spec, 96) for layer in model.focus_layers()]
    assert all(layer.pairs_kept < own for layer, own in zip(stats.per_layer, own_shares, strict=True))
    dense = [[layer.dense_multiply_adds for layer in one.per_layer] for one in (focus_ledger(model, stats, 96), own)]
    assert dense[0] == pytest.approx([cost / 2 for cost in dense[1]])  # of one row, and of two


def test_a_model_whose_layers_all_slide():
    base, blocks = tiny_model("gemma3_text", layer_types=["sliding_attention"] * 4), tokens(2, 96)
    assert measure(base, make_baseline("window", window=4), blocks, window=4).full_layers == 1.0
    assert "every layer slides" in time_attention(base, None, blocks[0], 1)["failed"]
    config = FocusConfig(num_groups=4, window=2, num_sinks=1, sliding_layers="intersect")
    focus = measure(get_focus_model(base, config), None, blocks, window=4)
    assert focus.full_layers == focus.multiply_adds


def test_time_is_that_of_every_layer_it_names():
    base, _ = tiny_random_model()
    block = torch.arange(64)
    with use_baseline(base, make_baseline("full")) as ledger:
        base(block[None])
    calls = layer_calls(base, block)
    assert [call.layer_idx for call in calls] == [layer.layer_idx for layer in ledger.per_layer]
    assert calls[1].hidden.shape == (1, 64, 32)
    model = get_focus_model(base, FocusConfig(num_groups=4, window=8))
    timed = time_attention(model, None, block, repeats=2)
    assert timed["layers"] == [0, 1]
    assert timed["ms"] > 0
    assert timed["dense_ms"] > 0


def test_layers_with_dense_heads_are_timed_in_their_share():
    """Evenly spread layers alone can all be ones with a dense head, or none."""
    config = FocusConfig(num_groups=4, window=8, dense_heads=[[0, 0], [3, 1], [6, 0]])
    model = get_focus_model(tiny_model(num_hidden_layers=9), config)
    assert [call.layer_idx for call in layer_calls(model, torch.arange(64), count=3)] == [2, 3, 7]
    config = FocusConfig(num_groups=4, window=8, dense_layers=(0, 3, 6))
    model = get_focus_model(tiny_model(num_hidden_layers=9), config)
    assert [call.layer_idx for call in layer_calls(model, torch.arange(64), count=3)] == [2, 3, 7]
    assert [call.layer_idx for call in layer_calls(model.unload(), torch.arange(64), count=3)] == [1, 4, 7]


def test_counting_pairs_is_not_timed(monkeypatch):
    """Focus is timed without it, and so are the peers that run on its kernels."""

    def refuse(*args):
        raise AssertionError("pairs were counted under the clock")

    base, _ = tiny_random_model()
    monkeypatch.setattr(grouped, "count_pairs", refuse)
    assert time_attention(base, make_baseline("window", window=8), torch.arange(64), repeats=1)["ms"] > 0
    with pytest.raises(AssertionError, match="under the clock"), use_baseline(base, make_baseline("window")):
        base(torch.arange(64)[None])


def test_what_is_dense_is_timed_as_the_model_runs_it(monkeypatch):
    windows = []
    model = get_focus_model(tiny_random_model()[0], FocusConfig(num_groups=4, window=8, query_top_k=3, key_top_k=2))
    whole = timing.focus_attention
    monkeypatch.setattr(
        timing, "focus_attention", lambda *args, **options: windows.append(options["window"]) or whole(*args, **options)
    )
    time_attention(model, None, torch.arange(64), repeats=1)
    assert set(windows) == {EVERYTHING}


def test_a_tuned_peer_is_served_as_it_was_trained(tmp_path, monkeypatch):
    """Centroids fitted anew to the trained model would be others than those it was trained with."""
    fits, real = [], RoutingTransformer.fit
    monkeypatch.setattr(RoutingTransformer, "fit", lambda self, *args: fits.append(self) or real(self, *args))
    routing = {"attention": "routing_transformer", "options": {"num_clusters": 2, "window": 8}}
    tuned = Method(name="tuned", **routing, tune={"how": "full"})
    found = run(dataclasses.replace(COMPARISON, methods=(tuned,)), settings(tmp_path))
    assert len(found.cells) == 4
    assert len(fits) == 1


def test_a_seed_is_of_all_that_a_trained_row_draws(tmp_path):
    """Where its centroids begin changes a Routing Transformer."""
    routing = {"attention": "routing_transformer", "tune": {"how": "full"}}
    methods = (
        Method(name="drawn", options={"num_clusters": 2, "window": 8}, **routing),
        Method(name="at a cost", budget=0.9, **routing),
        Method(name="features at a cost", attention="performer", budget=0.9, tune={"how": "full"}),
        Method(name="named", attention="performer", options={"features": 4, "seed": 7}, tune={"how": "full"}),
        Method(name="window", attention="window", options={"window": 8}, tune={"how": "full"}),
    )
    comparison = dataclasses.replace(SEEDS, methods=methods, seeds=(0, 2))
    found = run(comparison, settings(tmp_path))
    peers = {(cell["row"], cell["seed"]): cell["peer"] for cell in found.cells if cell["row"] != "full attention"}
    for name in ("drawn", "at a cost", "features at a cost"):
        assert [f"seed={seed}" in peers[name, seed] for seed in (0, 2)] == [True, True], name
    assert all("seed=7" in peers["named", seed] for seed in (0, 2))
    assert peers["window", 0] == peers["window", 2]


def test_what_was_drawn_is_part_of_what_a_row_is(tmp_path):
    """Weights trained under one draw of a peer must not be served under another."""
    routing = {"attention": "routing_transformer", "options": {"num_clusters": 2, "window": 8}}
    drawn = Method(name="drawn", **routing, tune={"how": "full"})
    window = Method(name="window", attention="window", options={"window": 8}, tune={"how": "full"})
    named = dataclasses.replace(drawn, options={**routing["options"], "seed": 7})
    assert [drawn_with(one, 2) for one in (drawn, window, named)] == [{"seed": 2}, {}, {}]
    assert drawn_with(drawn, 0) == {}  # what was measured before stands
    text = tmp_path / "prose.txt"
    text.write_text("the whale is white and the sea is wide. " * 400)
    model, tokenizer = tiny_random_model()
    texts = {"prose": Texts(Dataset(test=str(text)), tokenizer, model.get_output_embeddings().weight.shape[0])}
    workshop = Workshop(COMPARISON, "tiny", model, texts, tmp_path)
    assert workshop.identity(drawn, 2)["drawn_with"] == {"seed": 2}
    assert "drawn_with" not in workshop.identity(drawn, 0) | workshop.identity(window, 2)


def make_counted(monkeypatch):
    """What is made to be measured, as (row, seed)."""
    made, make = [], Workshop.make
    monkeypatch.setattr(Workshop, "make", lambda self, *row: made.append((row[0].name, row[1])) or make(self, *row))
    return made


def test_only_what_other_runs_lack_is_measured(tmp_path, monkeypatch):
    """A training on the same text in another order has another key: it is known by its name."""
    known = [
        {**cell, "key": f"{cell['key']} of another order"} if cell["row"] == "Focus" else cell
        for cell in run(SEEDS, settings(tmp_path)).cells
    ]
    made = make_counted(monkeypatch)
    more = run(dataclasses.replace(SEEDS, seeds=(0, 1)), settings(tmp_path / "more", known=known))
    assert made == [("Focus", 1)]
    assert [cell["key"] for cell in more.cells if cell["seed"] == 0] == [cell["key"] for cell in known]
    assert {row.name: row.seeds for row in make_rows(more.cells)} == {"full attention": 1, "Focus": 2, "window": 1}


def test_a_known_row_of_other_settings_or_costs_is_measured(tmp_path, monkeypatch):
    known = run(SEEDS, settings(tmp_path)).cells
    failed = [{**cell, "failed": "once"} if cell["row"] == "window" else cell for cell in known]
    dearer = [{**cell, "budget": 0.9} if cell["row"] == "window" else cell for cell in known]
    wider = [{**cell, "method": {**cell["method"], "options": {"window": 9}}} for cell in known]
    for number, (given, again) in enumerate(((known, []), (failed, ["window"]), (dearer, ["window"]), (wider, None))):
        made = make_counted(monkeypatch)
        other_keys = [{**cell, "key": cell["row"]} for cell in given]
        run(SEEDS, settings(tmp_path / str(number), known=other_keys))
        names = [name for name, _ in made if name != "full attention"]
        assert names == (["Focus", "window"] if again is None else again), number
        monkeypatch.undo()


def test_what_is_known_of_other_blocks_is_refused(tmp_path):
    known = run(SEEDS, settings(tmp_path)).cells
    fewer = dataclasses.replace(SEEDS, data={"prose": Dataset(lengths=(96,), blocks=2)})
    with pytest.raises(ValueError, match=r"The known cells and this run measured other blocks of prose at 96 tokens"):
        run(fewer, settings(tmp_path / "more", known=known))


def test_an_adapter_is_known_by_its_weights_alone(tmp_path, outcome, monkeypatch):
    folder = next(one for one in (outcome[0] / "trained").iterdir() if one.is_dir())
    saved = dataclasses.replace(SEEDS, methods=(Method(name="saved", adapter=str(folder)),))
    known = run(saved, settings(tmp_path)).cells
    made = make_counted(monkeypatch)
    run(saved, settings(tmp_path / "same", known=known))
    assert made == []
    trained_again = [{**cell, "key": "other weights"} if cell["row"] == "saved" else cell for cell in known]
    run(saved, settings(tmp_path / "other", known=trained_again))
    assert made == [("saved", 0)]


def test_without_full_attention_nothing_is_known_by_its_name(tmp_path, monkeypatch):
    known = [cell for cell in run(SEEDS, settings(tmp_path)).cells if cell["row"] == "Focus"]
    made = make_counted(monkeypatch)
    run(SEEDS, settings(tmp_path / "more", known=[{**cell, "key": "other"} for cell in known]))
    assert made == [("full attention", 0), ("Focus", 0), ("window", 0)]


def test_known_rows_are_timed_again_and_nothing_else_of_them(tmp_path, monkeypatch):
    lora = Method(name="LoRA", tune={"how": "lora", "rank": 2, "target_modules": ["q_proj"]})
    timed = dataclasses.replace(SEEDS, timing=True, methods=(*SEEDS.methods, lora))
    clock = itertools.count(1.0)
    monkeypatch.setattr(runner, "time_attention", lambda *_: {"ms": next(clock), "dense_ms": 1.0})
    known = run(timed, settings(tmp_path)).cells
    made = make_counted(monkeypatch)
    monkeypatch.setattr(runner, "measure", None)  # no figures are taken again
    again = run(timed, settings(tmp_path / "again", known=known, time_again=True)).cells
    assert made == [("Focus", 0), ("window", 0)]  # what keeps every pair takes as long whatever was trained
    assert [cell["timing"]["ms"] for cell in again] == [5.0, 6.0, 7.0, 8.0]
    assert all(cell["timed"]["date"] for cell in again)
    assert not any("timed" in cell for cell in known)
    rest = [{name: cell[name] for name in cell.keys() - {"timed", "timing"}} for cell in again]
    assert rest == [{name: cell[name] for name in cell.keys() - {"timing"}} for cell in known]
    made.clear()
    assert run(timed, settings(tmp_path / "again", known=known, time_again=True)).cells == again
    assert made == []


def test_a_cell_measured_again_is_not_another_seed(outcome, tmp_path):
    cells = read_run(outcome[0] / FILE).cells
    with (tmp_path / FILE).open("w") as file:
        for one in (*cells, {**cells[0], "key": "other settings"}):
            file.write(json.dumps(one) + "\n")
    again = read_run(tmp_path / FILE).cells
    assert len(again) == len(cells)
    assert again[0]["key"] == "other settings"


def test_tables_of_speed_are_skipped_and_continued_too(tmp_path):
    options = {
        "lengths": "256,512",
        "groups": "4",
        "heads": 2,
        "kv_heads": 2,
        "width": 16,
        "repeats": 1,
        "device": "cpu",
        "dtype": "fp32",
    }
    lines = []
    store = CellStore(tmp_path / FILE)
    cells = list(bench_cells(options, store, time.monotonic() + 60, lines.append))
    assert [(cell["row"], cell["length"]) for cell in cells] == [("K = 4", 256), ("K = 4", 512)]
    assert len(lines) == 2
    assert list(bench_cells(options, CellStore(tmp_path / FILE), time.monotonic() - 1, lines.append)) == cells
    assert len(lines) == 2


def test_a_table_of_speed_that_is_not_whole_says_so(tmp_path, monkeypatch):
    from focus_attn.compare import bench

    monkeypatch.setattr(bench.Sweep, "rows", lambda self: iter(()))
    with pytest.raises(OutOfTimeError):
        list(bench_cells({"device": "cpu"}, CellStore(tmp_path / FILE), time.monotonic() + 60, print))


def test_a_peer_that_cannot_attend_is_a_row_that_failed(tmp_path):
    rows = (Method(name="Linformer", attention="linformer"), Method(name="window", attention="window"))
    outcome = run(dataclasses.replace(COMPARISON, methods=rows), settings(tmp_path))
    _, linformer, window = make_rows([cell for cell in outcome.cells if cell["length"] == 96])
    assert "causal" in linformer.failed and window.ppl is not None


def test_blocks_know_their_documents(tmp_path):
    outcome = run(dataclasses.replace(COMPARISON, methods=()), settings(tmp_path))
    assert all(len(cell["documents"]) == len(cell["figures"]["losses"]) for cell in outcome.cells)


def test_what_holds_no_cells_is_not_shown(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"loss": 3}\n')
    with pytest.raises(ValueError, match="is not a file of cells"):
        read_run(tmp_path / "log.jsonl")
