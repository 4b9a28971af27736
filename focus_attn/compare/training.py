"""What a row is trained with: the recipe of its routers, or the options of its fine-tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from focus_attn.compare.recipe import Comparison, Method, merged, plain
from focus_attn.config import FocusConfig
from focus_attn.hf import text_config
from focus_attn.training.coverage import budget_at
from focus_attn.training.recipe import Recipe, Stage, Start

Part = TypeVar("Part", Start, Stage)

# What a run of this kind has no use for: nothing is held back, the rows are measured on text of their own.
TRAINING: dict[str, Any] = {"evaluate_every": 0, "data": {"held_out": 0}}

TUNING: dict[str, Any] = {"steps": 400, "length": 1024, "sequences": 8}

# Fields that came after cells were first written. At their defaults they change nothing, so runs go on that know
# nothing of them.
LATER: dict[type, tuple[str, ...]] = {
    Start: ("first", "repeats", "output_steps", "output_learning_rate"),
    Stage: ("repeats", "strange", "stop_gradient", "centroid_rate", "recluster_every", "average"),
    FocusConfig: ("dense_heads",),
}


def identity_of(recipe: Recipe) -> dict[str, Any]:
    """All that decides what a training makes."""
    values = recipe.to_dict()
    parts: list[tuple[type, dict[str, Any]]] = [(Stage, stage) for stage in values["stages"]]
    if values["start"] is not None:
        parts.append((Start, values["start"]))
    if values["focus"] is not None:
        parts.append((FocusConfig, values["focus"]))
    for name, usual in (("adapter", None), ("mean_of_stages", 1)):  # later too
        if values[name] == usual:
            del values[name]
    for kind, part in parts:
        for name in LATER[kind]:
            if plain(part[name]) == plain(getattr(kind, name)):
                del part[name]
    return values


def training_recipe(comparison: Comparison, method: Method, seed: int) -> Recipe:
    values = merged(merged(TRAINING, comparison.training), method.training)
    config = focus_config(method, values.get("focus") or {})
    recipe = Recipe.from_dict({**values, "focus": config.to_dict(), "seed": seed})
    return recipe if comparison.longest is None else _in_pieces(recipe, comparison.longest)


def check_positions(comparison: Comparison, name: str, model: nn.Module) -> None:
    """ValueError: some text, to measure on or to train on, is longer than the model can read."""
    most = getattr(text_config(model), "max_position_embeddings", None)
    lengths = [length for dataset in comparison.data.values() for length in dataset.lengths]
    for method in comparison.methods:
        if method.tune is not None:
            lengths.append(tuning_options(comparison, method)["length"])
        elif method.focus is not None:
            lengths += training_recipe(comparison, method, 0).lengths().values()
    if most is not None and max(lengths, default=0) > most:
        raise ValueError(
            f"{name} has {most:,} positions, and this comparison has texts of {max(lengths):,} tokens, to measure "
            f"or to train on: give --longest {most}"
        )


def tuning_options(comparison: Comparison, method: Method) -> dict[str, Any]:
    assert method.tune is not None
    options = {**TUNING, **comparison.tuning, **method.tune}
    length, pieces = _pieces(options["length"], comparison.longest)
    return {**options, "length": length, "sequences": options["sequences"] * pieces}


def _in_pieces(recipe: Recipe, longest: int) -> Recipe:
    """As many tokens or, where pieces do not come out even, some more, and of the far pairs the same share."""
    return dataclasses.replace(
        recipe,
        start=None if recipe.start is None else _shortened(recipe.start, longest, recipe.focus, "blocks"),
        stages=tuple(_shortened(one, longest, recipe.focus, "sequences", "micro_batch") for one in recipe.stages),
    )


def _shortened(part: Part, longest: int, focus: FocusConfig | None, *counts: str) -> Part:
    """counts: the fields that say how many texts."""
    length, pieces = _pieces(part.length, longest)
    if pieces == 1:
        return part
    assert focus is not None
    budget = None if part.budget is None else budget_at(length, part.budget, part.length, focus)
    more = {name: getattr(part, name) * pieces for name in counts}
    return dataclasses.replace(part, length=length, budget=budget, **more)


def _pieces(length: int, longest: int | None) -> tuple[int, int]:
    """(how long a piece is, how many it takes)."""
    return (length, 1) if longest is None else (min(length, longest), -(-length // longest))


def focus_config(method: Method, usual: Mapping[str, Any]) -> FocusConfig:
    """The row's own fields over the training's usual ones, or over the published setting."""
    assert method.focus is not None
    fields = dict(method.focus)
    preset = fields.pop("preset", None)
    if preset not in (None, "paper"):
        raise ValueError(f"{method.name!r}: `focus.preset` can be paper, got {preset!r}")
    return FocusConfig.paper(**fields) if preset else FocusConfig.from_dict({**usual, **fields})
