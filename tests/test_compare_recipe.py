"""Comparisons as data: every recipe reads, its quick form too, and what is wrong is answered with how to mend it."""

import dataclasses
import re

import pytest
from tiny import tiny_model

from focus_attn.baselines import BASELINES
from focus_attn.compare import Comparison, Dataset, Method
from focus_attn.compare.changes import with_adapters, with_data, with_only
from focus_attn.compare.quick import NOTE, quick
from focus_attn.compare.recipe import BASE, find_recipe, merged, recipe_names
from focus_attn.compare.training import check_positions, training_recipe, tuning_options
from focus_attn.training.coverage import _far_budget

PAPER = [*(f"table{number}" for number in range(1, 11)), "dimension", "domains", "long-context", "groups", "collapse"]


def test_every_table_of_the_paper_has_a_recipe():
    assert set(PAPER) <= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("form", [lambda whole: whole, quick], ids=["whole", "quick"])
def test_recipe_reads_and_its_trainings_are_valid(name, form):
    comparison = form(Comparison.from_yaml(find_recipe(name)))
    assert comparison.name == name
    assert Comparison.from_dict(comparison.to_dict()) == comparison
    rows = {method.name for method in comparison.methods}
    for method in comparison.methods:
        assert method.attention in BASELINES
        if method.focus is not None:
            training_recipe(comparison, method, seed=0)
    assert all(entry.get("row") in {None, *rows} for entry in comparison.published) or comparison.bench is not None


def test_quick_form_keeps_every_row_and_says_what_it_is():
    whole = Comparison.from_yaml(find_recipe("peers"))
    small = quick(whole)
    assert [method.name for method in small.methods] == [method.name for method in whole.methods]
    assert small.models == ("tiny",)
    assert small.note == NOTE
    assert small.data["books"].lengths == (1024,)
    assert small.window == 16


def test_full_attention_is_always_a_row():
    comparison = Comparison(methods=(Method(name="window", attention="window"),))
    assert [method.name for method in comparison.methods] == [BASE, "window"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": []}, "did you mean `methods`"),
        ({"methods": [{"name": "a", "attention": "window", "focus": {}}]}, "exclude each other"),
        ({"methods": [{"name": "a"}, {"name": "a", "attention": "window"}]}, "a `name` of its own"),
        ({"methods": [{"name": "a", "attention": "window", "budget": "b"}]}, "the name of a row above it"),
        ({"methods": [{"name": "a", "attention": "window", "serve": {"window": 4}}]}, "has no Focus"),
        ({"methods": [{"name": "a", "tune": {"how": "prompt"}}]}, "`tune.how` must be one of lora, dora, full"),
        ({"methods": [{"name": "a", "budget": "b", "tune": {"how": "full"}}]}, "needs a share as `budget`"),
        (
            {"methods": [{"name": "a"}, {"name": "b", "attention": "window", "budget": "a"}], "tasks": True},
            "benchmarks have prompts of many lengths",
        ),
        ({"train_on": "poems"}, "`train_on` must be one of text"),
        ({"data": {"text": {"lengths": [0]}}}, "whole numbers of at least 2"),
        ({"seeds": []}, "at least one number"),
        ({"bench": {}, "methods": [{"name": "a", "attention": "window"}]}, "leave `methods` out"),
        ({"methods": [{"name": "a", "attention": "mobaa"}]}, "'a': no baseline 'mobaa'; there are bigbird"),
        ({"methods": [{"name": "a", "attention": "window", "options": {"windows": 3}}]}, "no option 'windows'; it has"),
        ({"methods": [{"name": "a", "attention": "sparq", "options": {"keys": -5}}]}, "`keys` must not be negative"),
        ({"methods": [{"name": "a", "attention": "window", "budget": 1.5}]}, "`budget` is a share"),
        ({"methods": [{"name": "a", "focus": {}, "budget": 0.1}]}, "`budget` is for peers"),
        ({"methods": [{"name": "a", "options": {"window": 3}}]}, "`options` are a peer's"),
        ({"methods": [{"name": "a", "tune": "lora"}]}, "`tune` must hold fields and their values, got 'lora'"),
        ({"methods": [None]}, "methods"),
        ({"methods": [{"name": "a", "attention": "window", "options": [1]}]}, "options` must hold fields"),
        (
            {"methods": [{"name": "a", "attention": "moba", "budget": 0.2, "options": {"top_blocks": 3}}]},
            "no option 'top_blocks' beside a `budget`; it has block_size, num_sinks",
        ),
        ({"methods": [{"name": "a", "attention": "linformer", "budget": 0.2}]}, "no knob that a `budget` could turn"),
        ({"methods": [{"name": "a", "attention": "loki", "options": {"axes": {}}}]}, "no option 'axes'; it has"),
    ],
)
def test_what_is_wrong_is_said(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Comparison.from_dict(values)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="table1"):
        find_recipe("table0")


def test_training_like_another_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "usual.yaml").write_text("name: x\nstages: [{steps: 5, length: 64}]\nprecision: fp32\n")
    file = tmp_path / "mine.yaml"
    file.write_text("training: {like: usual, stages: {steps: 7}}\nmethods: [{name: a, focus: {}}]\n")
    assert Comparison.from_yaml(file).training == {"stages": [{"steps": 7, "length": 64}], "precision": "fp32"}
    file.write_text("training: {like: k8}\nmethods: [{name: a, focus: {}}]\n")
    assert Comparison.from_yaml(file).training["focus"]["num_groups"] == 8, "one of the repository's, from anywhere"
    (tmp_path / "k8.yaml").write_text("focus: {num_groups: 5}\n")
    assert Comparison.from_yaml(file).training == {"focus": {"num_groups": 5}}, "one's own comes first"
    assert Comparison.from_yaml("mine.yaml") == Comparison.from_yaml(file)
    file.write_text("training: {like: unusual}\n")
    with pytest.raises(ValueError, match="no training recipe 'unusual'"):
        Comparison.from_yaml(file)


def test_merged_goes_into_mappings_and_over_lists():
    base = {"a": {"b": 1, "c": 2}, "d": [{"e": 1}, {"e": 2}]}
    assert merged(base, {"a": {"b": 3}, "d": {"f": 0}}) == {
        "a": {"b": 3, "c": 2},
        "d": [{"e": 1, "f": 0}, {"e": 2, "f": 0}],
    }
    assert base["a"] == {"b": 1, "c": 2}


@pytest.mark.parametrize("name", recipe_names())
def test_rows_named_by_their_steps_have_them(name):
    comparison = Comparison.from_yaml(find_recipe(name))
    for method in comparison.methods:
        named = re.search(r"(\d+) steps", method.name)
        if named is not None and method.focus is not None:
            assert training_recipe(comparison, method, seed=0).steps == int(named[1])


@pytest.mark.parametrize("text", ["", "methods: []\n", "name: mine\n"])
def test_a_file_without_rows_is_refused(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match="needs `methods`"):
        Comparison.from_yaml(tmp_path / "mine.yaml")


def test_learning_rates_without_a_dot_are_numbers(tmp_path):
    file = tmp_path / "lora.yaml"
    file.write_text("tuning: {lr: 1e-4}\nmethods: [{name: a, tune: {how: lora, lr: 2e-4}}]\n")
    comparison = Comparison.from_yaml(file)
    assert comparison.tuning["lr"] == 1e-4
    assert comparison.methods[1].tune == {"how": "lora", "lr": 2e-4}


def test_texts_are_changed_on_the_command_line():
    comparison = Comparison(data={"books": Dataset(test="a", train="b"), "wiki": Dataset(test="c", train="d")})
    changed = with_data(comparison, ["books.train=x.npy", "wiki=y.txt"], blocks=3).data
    assert (changed["books"].train, changed["books"].test) == ("x.npy", "a")
    assert (changed["wiki"].train, changed["wiki"].test) == (None, "y.txt")
    assert changed["books"].blocks == 3
    assert with_data(comparison, ["z"]).data["books"] == Dataset(test="z")
    with pytest.raises(ValueError, match=r"NAME\.train=PATH"):
        with_data(comparison, ["poems=x"])


def test_texts_no_longer_than_a_model_can_read():
    whole = Comparison.from_yaml(find_recipe("peers"))
    short = dataclasses.replace(whole, longest=2000)
    assert [one.lengths for one in short.data.values()] == [(2000,), (2000,)]
    for row in short.methods:
        if row.focus is not None:
            before, after = (training_recipe(comparison, row, seed=0) for comparison in (whole, short))
            assert max(after.lengths().values()) <= 2000
            for old, new in zip(before.stages, after.stages, strict=True):
                assert old.tokens <= new.tokens <= 2 * old.tokens  # pieces are whole
            assert after.start.blocks == 2 * before.start.blocks
            for old, new in ((before.start, after.start), *zip(before.stages, after.stages, strict=True)):
                if old.budget is not None:  # routers keep the same share of what they can choose from
                    shares = [_far_budget(one.budget, one.length, after.focus) for one in (old, new)]
                    assert shares[1] == pytest.approx(shares[0])
    lora = short.methods[-2]
    assert tuning_options(short, lora)["length"] == 2000
    assert tuning_options(short, lora)["sequences"] == 2 * tuning_options(whole, lora)["sequences"]
    assert training_recipe(dataclasses.replace(whole, longest=1 << 20), whole.methods[1], 0) == training_recipe(
        whole, whole.methods[1], 0
    )


def test_what_a_model_cannot_read_is_said_at_the_door():
    comparison, model = Comparison.from_yaml(find_recipe("dimension")), tiny_model("gpt2", max_position_embeddings=1024)
    with pytest.raises(ValueError, match=r"gpt2 has 1,024 positions.*texts of 2,048 tokens.*--longest 1024"):
        check_positions(comparison, "gpt2", model)
    check_positions(dataclasses.replace(comparison, longest=1024), "gpt2", model)


@pytest.mark.parametrize("name", recipe_names())
def test_what_was_not_run_could_be(name):
    """The commands on the page of reproductions fit GPT-2's 1,024 positions."""
    comparison = Comparison.from_yaml(find_recipe(name))
    for entry in comparison.not_run:
        if "gpt2" in entry["model"]:
            said = entry.get("command", f"focus compare {name} {entry.get('options', '')}")
            longest = re.search(r"--longest (\d+)", said)
            asked = Comparison.from_yaml(find_recipe(said.split()[2]))
            asked = dataclasses.replace(asked, longest=int(longest[1]) if longest else None)
            check_positions(asked, entry["model"], tiny_model("gpt2", max_position_embeddings=1024))


def test_only_some_rows_and_what_they_need():
    comparison = Comparison.from_yaml(find_recipe("peers"))
    names = [method.name for method in with_only(comparison, ["MoBA"])]
    costs = ["Focus, K=8", "Focus, K=8, as shipped"]  # what those are to cost
    assert names == [
        BASE,
        *costs,
        "MoBA",
        "MoBA + sinks",
        "MoBA + sinks, blocks of 8",
        "MoBA with sinks at the cost of k8",
    ]
    with pytest.raises(ValueError, match="no row is called so"):
        with_only(comparison, ["Reformer"])


def test_adapters_take_the_place_of_training():
    comparison = Comparison.from_yaml(find_recipe("peers"))
    methods = with_adapters(comparison, ["Focus, K=8=one", "Focus, K=8=two"])
    assert methods[1].adapters == ("one", "two")
    assert methods[1].focus is None
    assert comparison.seeds_of(methods[1]) == (0, 1)
    later = dataclasses.replace(comparison, seeds=(1, 2))  # what is not trained is no other for another seed
    assert {later.seeds_of(method) for method in later.methods} == {(0,), (1, 2)}
    with pytest.raises(ValueError, match="ROW=FOLDER"):
        with_adapters(comparison, ["MoBA=one"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "a comparison has fields such as `methods`.*got list"),
        ("just words", "got str"),
        ("training: k8", "`training` must hold fields and their values, got 'k8'"),
        ("methods: [null]", "methods"),
        ("methods: 3", "`methods` must be a list"),
    ],
)
def test_a_file_that_is_no_comparison(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        Comparison.from_yaml(tmp_path / "c.yaml")


def test_one_model_needs_no_brackets():
    assert Comparison.from_dict({"models": "default"}).models == ("default",)


def test_a_quick_form_is_quick_whatever_is_not_said():
    small = quick(Comparison(methods=(Method(name="LoRA", tune={"how": "lora"}),)))
    assert tuning_options(small, small.methods[1])["steps"] <= 2
