"""Recipes: what is read, what is refused, and that every one we ship is one."""

import dataclasses
from pathlib import Path

import pytest

from focus_attn import FocusConfig
from focus_attn.training import Recipe, Stage, Start

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_whole(path, tmp_path):
    recipe = Recipe.from_yaml(path)
    assert recipe.name == path.stem
    assert recipe.focus is not None and recipe.data.text
    recipe.to_yaml(tmp_path / "again.yaml")
    assert Recipe.from_yaml(tmp_path / "again.yaml") == recipe


def test_what_is_shipped():
    names = {path.stem for path in RECIPES}
    of_k8 = {"k8", "k8_without_repeats", "k8_dense_heads", "k8_nine_heads", "k8_facts", "k8_answers", "k8_distill"}
    assert names == of_k8 | set(
        "k16 k32_top2 two_phase from_scratch from_scratch_k4 paper quick_cpu gemma3_270m".split()
    )


def test_a_recipe_survives_its_dict_and_numbers_without_a_dot(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("stages:\n  - learning_rate: 1e-3\n    options: {balance_weight: 1e-2}\nstart:\n")
    recipe = Recipe.from_yaml(path)
    assert recipe.stages[0].learning_rate == 0.001
    assert recipe.stages[0].step_options().balance_weight == 0.01
    assert recipe.start is None
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("stages:\n  - learning_rat: 1", r"`stages\[0\]` has no field 'learning_rat': did you mean `learning_rate`\?"),
        ("stages: []\nstart:", "without `stages` and without a `start` does nothing"),
        ("stages:\n  - steps: 0", r"`stages\[0\]`: `steps` must be at least 1, got 0"),
        ("stages:\n  - steps: many", "`steps` must be an integer, got 'many'"),
        ("stages:\n  - learning_rate: fast", "`learning_rate` must be a number, got 'fast'"),
        ("stages:\n  - budget: 1.5", "`budget` must be between 0 and 1, got 1.5"),
        ("stages:\n  - objective: wish", "`objective` must be one of 'lm', 'distill', 'lm\\+distill', got 'wish'"),
        ("stages:\n  - options: {budget_wait: 1}", "did you mean `budget_weight`"),
        ("stages:\n  - options: {probes: -1}", "`probes`"),
        ("stages:\n  - {average: 0.5, trains: everything}", "`average`.*routers alone.*leave it out"),
        ("mean_of_stages: 3\nstages:\n  - {}\n  - {}", "`mean_of_stages` of 3.*lower it"),
        ("mean_of_stages: 2\nstages:\n  - {}\n  - {trains: everything}", "`mean_of_stages`.*routers alone"),
        ("stages:\n  - {average: 0.5, recluster_every: 2, bias_rate: 0}", "`average`.*`recluster_every`.*[Ll]eave one"),
        ("stages:\n  - {average: 0.5, centroid_rate: 0.1, bias_rate: 0}", "`average`.*`centroid_rate`.*[Ll]eave one"),
        ("stages:\n  - stop_gradient: 1", "`stop_gradient` must be true or false, got 1"),
        ("stages:\n  - options: {stop_gradient: 1}", r"`options` has no field 'stop_gradient'"),
        ("stages:\n  - centroid_rate: 2", "`centroid_rate` must be between 0 and 1, got 2"),
        ("stages:\n  - {centroid_rate: 0.1}", "`centroid_rate` sets the biases.*`bias_rate` .0.001.*`bias_rate: 0`"),
        ("stages:\n  - {recluster_every: 9}", "`recluster_every` sets the biases"),
        ("stages:\n  - {centroid_rate: 0.1, recluster_every: 9, bias_rate: 0}", "both move the centroids: leave one"),
        (
            "stages:\n  - {steps: 8, recluster_every: 9, bias_rate: 0}",
            "`recluster_every` of 9 steps never comes in a stage of 8",
        ),
        ("stages: 3", "`stages` must be a list"),
        ("focus: {num_groups: 0}", "`focus`: `num_groups` must be at least 1"),
        ("focus: {windw: 3}", "did you mean `window`"),
        ("start: {how: guess}", "`start`: `how` must be one of"),
        ("precision: fp8", "`precision` must be one of 'bf16', 'fp32', got 'fp8'"),
        ("gradient_checkpointing: perhaps", "must be true or false"),
        ("focus: {window: 128}\nstages:\n  - length: 200", "twice the window and the sinks, 264"),
        ("focus: {}\nstages:\n  - {length: 1024, budget: 0.1}", r"`stages\[0\]`: `budget` 0.1 leaves nothing"),
        ("focus: {}\nstart: {largest_group: 0.1}", "`start`: `largest_group` is a share of the keys, from"),
        ("data: {text: 3}", "`data`: `text` must be a non-empty string"),
        ("xyzzy: 1", "a recipe has no field 'xyzzy': the fields are"),
        ("- a list", "a recipe must hold fields"),
        ("a: [", "is not YAML"),
    ],
)
def test_mistakes_name_the_field_the_value_and_what_is_allowed(yaml, message, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml)
    with pytest.raises(ValueError, match=message):
        Recipe.from_yaml(path)


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="no recipe at"):
        Recipe.from_yaml(tmp_path / "absent.yaml")


def test_differences_name_the_fields():
    one = Recipe(stages=(Stage(),), focus=FocusConfig())
    other = dataclasses.replace(one, stages=(Stage(steps=7),), start=dataclasses.replace(Start(), blocks=3))
    assert one.differences(one) == []
    assert other.differences(one) == [
        ("start.blocks", "`start.blocks`: 3, 24"),
        ("stages[0].steps", "`stages[0].steps`: 7, 1500"),
    ]
