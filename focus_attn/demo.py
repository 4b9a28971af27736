"""`focus demo`: the main job on the embedded default model, measured on the machine at hand."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from focus_attn.baselines import RandomGroups, window_and_sinks
from focus_attn.bench import AttentionShape, Timing, describe_run, fastest_dtype, time_attention, time_prefill
from focus_attn.config import FocusConfig
from focus_attn.evaluation import (
    Perplexity,
    RouterGroups,
    block_perplexity,
    group_shares,
    observe_routing,
    token_blocks,
    top_tokens,
)
from focus_attn.model import FocusModel, get_focus_model
from focus_attn.progress import Progress
from focus_attn.text import TextSplit, default_text, read_text, split_documents
from focus_attn.training import CoverageFit, fit_coverage
from focus_attn.training.coverage import check_budget
from focus_attn.zoo import find_adapter, load_default_model, tiny_random_model

FULL, FOCUS, WINDOW, RANDOM = "full attention", "Focus, fitted now", "window + sinks", "random groups, same sizes"
SHIPPED = "Focus, shipped adapter"

MOST_BLOCKS = 8  # held-out ones that perplexity is measured on
SLOW = 5.0  # seconds a block: half of them then


@dataclass(frozen=True)
class DemoOptions:
    """Sizes of a demo. The defaults take about five minutes on two cores with units for matrices, a quarter of an hour
    on two without."""

    length: int = 2048
    blocks: int | None = None  # held-out blocks to measure perplexity on; None: 8, or 4 on a slow machine
    train_blocks: int = 24
    steps: int = 240
    budget: float = 0.293  # of the causal pairs, at `length`; hard ids keep a little more
    attention_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    prefill_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    attention_seconds: float = 25.0
    prefill_seconds: float = 60.0
    seed: int = 0
    text: Path | None = None
    shipped: str | Path | None = "k8"  # a trained adapter to measure before anything is fitted
    fast: bool = False
    config: FocusConfig = field(default_factory=FocusConfig)

    def __post_init__(self) -> None:
        """Now, not when the fit begins."""
        for name in ("steps", "train_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        check_budget(self.budget)

    @classmethod
    def for_tests(cls, **changes: Any) -> DemoOptions:
        """A tiny random model and a few steps: everything runs, nothing is worth reading."""
        small: dict[str, Any] = {
            "length": 192,
            "blocks": 2,
            "train_blocks": 2,
            "steps": 5,
            "budget": 0.5,
            "attention_lengths": (64, 128),
            "prefill_lengths": (64, 128),
            "shipped": None,
            "fast": True,
            "config": FocusConfig(num_groups=4, window=16, num_sinks=2, router_dim=4),
        }
        return cls(**{**small, **changes})


@dataclass(frozen=True)
class DemoResult:
    """Everything a demo measured."""

    model: str
    dtype: str
    parameters: int
    router_parameters: int
    config: FocusConfig
    text: str
    machine: dict[str, Any]
    perplexity: dict[str, Perplexity]
    fit: CoverageFit
    attention: list[Timing]
    attention_shape: str
    prefill: list[Timing]
    groups: RouterGroups
    stage_seconds: dict[str, float]

    @property
    def gap_closed(self) -> float | None:
        """How much of the perplexity that random groups cost the fit gives back; None if they cost nothing."""
        full, focus, random = (self.perplexity[name].ppl for name in (FULL, FOCUS, RANDOM))
        return (random - focus) / (random - full) if random > full else None

    @property
    def seconds(self) -> float:
        return sum(self.stage_seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Every number as plain JSON values; `write_json` puts the machine beside them."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if spec.name != "machine"}
        plain = json.loads(json.dumps(values, default=_plain))
        for name in ("attention", "prefill"):
            plain[name] = [{**timing._asdict(), "speedup": timing.speedup} for timing in getattr(self, name)]
        plain["fit"]["layers"] = [layer._asdict() for layer in self.fit.layers]
        plain["groups"] = {**self.groups._asdict(), "groups": [group._asdict() for group in self.groups.groups]}
        return {**plain, "gap_closed": self.gap_closed, "seconds": self.seconds}


def run_demo(
    options: DemoOptions, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> tuple[DemoResult, FocusModel]:
    """Fit routers to the default model and measure quality and speed. The second result is the fitted model.

    Args:
        say: is given what can be said before the end.
    """
    report = progress or (lambda what, done, total: None)
    stages: dict[str, float] = {}

    with _timed(stages, "load the model and the text"):
        report("loading the model and the text", 0, 1)
        base, tokenizer, dtype = _load(options)
        text = _text(options)
        train = token_blocks(tokenizer, text.train, options.length, options.train_blocks)
        blocks = MOST_BLOCKS if options.blocks is None else options.blocks
        held_out = token_blocks(tokenizer, text.held_out, options.length, blocks)
        if options.blocks is None and (seconds := _seconds_a_block(base, held_out)) > SLOW:
            held_out = held_out[::2]  # still spread over the text
            if say is not None:
                say(f"{options.length:,} tokens take about {seconds:.0f} s here: {len(held_out)} blocks are measured.")
        model = get_focus_model(base, options.config)
        report("loading the model and the text", 1, 1)

    measured: dict[str, Perplexity] = {}
    with _timed(stages, "measure the shipped adapter"):
        measure = _Measure(model, held_out, 5 if options.shipped else 4, report)
        with model.disable_focus():
            measured[FULL] = measure()
        if options.shipped is not None:
            with _adapter_for_now(model, find_adapter(options.shipped)):
                measured[SHIPPED] = measure()
            if say is not None:
                say(_at_once(options.shipped, measured[SHIPPED], measured[FULL], text))

    with _timed(stages, "fit the routers"):
        # Nothing trains on from here, so groups need not be even: without a cap the fit keeps more of the attention.
        fit = fit_coverage(
            model,
            train,
            steps=options.steps,
            budget=options.budget,
            start="heads",  # better than the others here (results/demo_start_cpu.json)
            largest_group=1.0,
            seed=options.seed,
            progress=report,
        )

    with _timed(stages, "measure perplexity"):
        measured[FOCUS] = measure()
        for name, routing in ((WINDOW, window_and_sinks), (RANDOM, RandomGroups(options.seed))):
            with model.override_routing(routing):  # type: ignore[arg-type]
                measured[name] = measure()

    with _timed(stages, "look at the groups"):
        report("looking at the groups", 0, 1)
        sample = held_out[:2]
        routings = observe_routing(model, sample)
        # Where the fit gained most over the window and the sinks there is most to see.
        shown = max(fit.layers, key=lambda layer: layer.covered - layer.covered_nearby).layer_idx
        key_shares = group_shares(routings[shown].key_groups, options.config.num_groups)
        evenest = int(key_shares.amax(-1).argmin())
        groups = top_tokens(
            routings[shown], sample, tokenizer, options.config.num_groups, layer_idx=shown, router=evenest
        )
        report("looking at the groups", 1, 1)

    with _timed(stages, "time one layer's attention"):
        router = next(layer.router for layer in model.focus_layers() if layer.spec.layer_idx == shown)
        assert router is not None
        shape = AttentionShape(
            *_attention_sizes(base),
            dtype,
            group_shares(routings[shown].query_groups, options.config.num_groups),
            key_shares,
        )
        attention = _collect(
            "timing one layer's attention",
            time_attention(shape, router, options.attention_lengths, seconds=options.attention_seconds),
            len(options.attention_lengths),
            report,
        )

    with _timed(stages, "time whole-model prefill"):
        prefill = _collect(
            "timing whole-model prefill",
            time_prefill(model, held_out.flatten(), options.prefill_lengths, seconds=options.prefill_seconds),
            len(options.prefill_lengths),
            report,
        )

    trainable, total = model.get_nb_trainable_parameters()
    result = DemoResult(
        model="a tiny random model" if options.fast else base.config._name_or_path,
        dtype=str(dtype).removeprefix("torch."),
        parameters=total - trainable,
        router_parameters=trainable,
        config=options.config,
        text=text.name,
        machine=describe_run(),
        perplexity=measured,
        fit=fit,
        attention=attention,
        attention_shape=f"{shape.heads} query and {shape.kv_heads} key/value heads of {shape.width}, {dtype}, batch 1",
        prefill=prefill,
        groups=groups,
        stage_seconds=stages,
    )
    return result, model


def _load(options: DemoOptions) -> tuple[Any, Any, torch.dtype]:
    if options.fast:
        model, tokenizer = tiny_random_model(options.seed)
        return model, tokenizer, torch.float32
    dtype = fastest_dtype()
    model, tokenizer = load_default_model(dtype=dtype)
    return model, tokenizer, dtype


@torch.no_grad()
def _seconds_a_block(base: Any, blocks: Tensor) -> float:
    """Of a whole one, from an eighth."""
    part = blocks[:1, : max(1, blocks.shape[1] // 8)]
    base(part[:, :1])  # the first forward also reads the weights from the disk
    start = time.perf_counter()
    base(part)
    return 8 * (time.perf_counter() - start)


def _text(options: DemoOptions) -> TextSplit:
    if options.text is None:
        return default_text()
    return split_documents(read_text(options.text), name=str(options.text))


class _Measure:
    """Perplexity of a model as it stands, on the same blocks each time, under one progress bar."""

    def __init__(self, model: FocusModel, held_out: Tensor, times: int, report: Progress) -> None:
        self.model, self.held_out, self.total, self.report = model, held_out, times * len(held_out), report
        self.done = 0

    def __call__(self) -> Perplexity:
        already = self.done
        self.done += len(self.held_out)
        return block_perplexity(
            self.model,
            self.held_out,
            progress=lambda done, _: self.report("measuring perplexity", already + done, self.total),
        )


@contextmanager
def _adapter_for_now(model: FocusModel, folder: Path) -> Iterator[None]:
    own, other = model.active_adapter, "shipped"
    model.load_adapter(folder, other)
    try:
        model.set_adapter(other)
        yield
    finally:
        model.set_adapter(own)
        model.delete_adapter(other)


def _at_once(adapter: str | Path, shipped: Perplexity, full: Perplexity, text: TextSplit) -> str:
    kept = "all" if shipped.pairs_kept is None else f"{shipped.pairs_kept:.0%}"
    return (
        f"The shipped adapter {str(adapter)!r}: perplexity {shipped.ppl:.2f} at {kept} of the token pairs, "
        f"{full.ppl:.2f} with full attention, on {text.name} (docstrings were part of what the shipped ones were "
        "trained on). Now a short fit beside it:"
    )


def _attention_sizes(base: Any) -> tuple[int, int, int]:
    config = base.config
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


def _collect(what: str, timings: Iterator[Timing], total: int, report: Progress) -> list[Timing]:
    measured: list[Timing] = []
    report(what, 0, total)
    for timing in timings:
        measured.append(timing)
        report(what, len(measured), total)
    report(what, total, total)
    return measured


@contextmanager
def _timed(stages: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    stages[name] = time.perf_counter() - start


def _plain(value: Any) -> Any:
    """What json cannot write by itself."""
    if isinstance(value, FocusConfig):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
