"""The quick form of a comparison: every row on a tiny random model, in about a minute on two cores.

It shows that the comparison runs from end to end. Its figures mean nothing, and it says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from focus_attn.compare.models import TINY, load_model
from focus_attn.compare.recipe import Comparison, Dataset, Method, merged
from focus_attn.compare.training import TUNING
from focus_attn.evaluation.requests import Requests
from focus_attn.evaluation.retrieval import retrieval
from focus_attn.text import default_text

SHRINK = 8  # lengths and windows are divided by it, so that shares of pairs stay what they are
TOKENS = ("window", "num_sinks", "keys", "heavy", "recent", "block_size", "length")  # options counted in tokens
PLACES = ("dense_layers", "dense_heads")  # of a larger model than the tiny one
NOTE = "QUICK FORM: a tiny random model on Python's documentation, a few steps. The figures mean nothing."
STEPS = 2
QUESTION = 512  # tokens
# Where a comparison says nothing of training: the defaults are for larger models and texts.
UNSAID = {"start": {"how": "random"}, "stages": [{"steps": STEPS, "length": 128, "sequences": 1, "warmup": 1}]}


def quick(comparison: Comparison) -> Comparison:
    if comparison.bench is not None:
        small = {"lengths": "512,1024", "heads": 2, "kv_heads": 2, "width": 16, "repeats": 1, "device": "cpu"}
        return dataclasses.replace(comparison, bench={**comparison.bench, **small}, note=NOTE)
    return dataclasses.replace(
        comparison,
        models=(TINY,),
        data={name: _small_data(one) for name, one in comparison.data.items()},
        methods=tuple(map(_small_method, comparison.methods)),
        training=_small_training(comparison.training) or UNSAID,
        tuning=_small_tuning({**TUNING, **comparison.tuning}),
        seeds=comparison.seeds[:1],
        window=comparison.window // SHRINK,
        note=NOTE,
    )


def quick_requests() -> Requests:
    """A few questions in place of benchmarks, which need files or the hub."""
    _, tokenizer = load_model(TINY, torch.float32, torch.device("cpu"))
    return retrieval(tokenizer, "needle", default_text().held_out, [QUESTION], depths=[0.0, 0.5], per_cell=3)


def _small_data(dataset: Dataset) -> Dataset:
    lengths = tuple(dict.fromkeys(max(128, length // SHRINK) for length in dataset.lengths))
    return Dataset(lengths=lengths, blocks=min(3, dataset.blocks))


def _small_method(method: Method) -> Method:
    focus = None if method.focus is None else {**_small_counts(method.focus), "window": _window(method.focus)}
    if method.adapter is not None:  # it belongs to another model: random routers stand in for it
        focus = {"window": _window({})}
    return dataclasses.replace(
        method,
        adapter=None,
        focus=focus,
        options=_small_counts(method.options),
        training=_small_training(method.training),
        tune=None if method.tune is None else _small_tuning(method.tune),
        serve=_small_counts(method.serve),
    )


def _window(focus: Mapping[str, Any]) -> int:
    return focus.get("window", 128) // SHRINK


def _small_training(training: Mapping[str, Any]) -> dict[str, Any]:
    small = _small_counts(training)
    if isinstance(small.get("start"), Mapping):
        small["start"] = _fewer(small["start"], {"blocks": 2, "steps": STEPS})
    if "stages" in small:
        stages = small["stages"]
        few = {"steps": STEPS, "sequences": 1, "micro_batch": 1, "warmup": 1, "recluster_every": 1}
        small["stages"] = _fewer(stages, few) if isinstance(stages, Mapping) else [_fewer(one, few) for one in stages]
    return small


def _small_tuning(tuning: Mapping[str, Any]) -> dict[str, Any]:
    return _fewer(_small_counts(tuning), {"steps": STEPS, "sequences": 1})


def _fewer(values: Mapping[str, Any], most: Mapping[str, int]) -> dict[str, Any]:
    return merged(values, {name: min(value, values[name]) for name, value in most.items() if name in values})


def _small_counts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Every count of tokens, however deep, divided; layers and heads are not named."""
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in PLACES:
            continue
        if isinstance(value, Mapping):
            small[name] = _small_counts(value)
        elif isinstance(value, list | tuple):
            small[name] = [_small_counts(one) if isinstance(one, Mapping) else one for one in value]
        elif name in TOKENS and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, max(1, value // SHRINK))
        else:
            small[name] = value
    return small
