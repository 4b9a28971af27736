"""Recipe: everything that defines a training run, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from focus_attn.config import FocusConfig
from focus_attn.training.coverage import _far_budget, _key_cap
from focus_attn.training.fields import (
    as_number,
    check_fields,
    choice,
    flag,
    integer,
    number,
    read_record,
    refuse_unknown,
    string,
)
from focus_attn.training.start_layer import LayerStart
from focus_attn.training.starts import How
from focus_attn.training.step import StepOptions

Objective = Literal["lm", "distill", "lm+distill"]
Trains = Literal["routers", "everything"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["bf16", "fp32"]
Sharding = Literal["none", "fsdp"]


@dataclass(frozen=True)
class Data:
    """The text, and how it is cut into blocks."""

    text: str | None = string(
        None,
        "a .txt, .md or .jsonl file, a folder of them, a token file, hub:owner/name[:split[:subset]], or builtin "
        "(Python's own documentation)",
    )
    field: str = string("text", "the field of a JSONL line or of a hub dataset that holds the text")
    join: bool = flag(False, "the rows of a JSONL file or a dataset are the lines of one text: put them together again")
    packing: bool = flag(False, "fill blocks with several short documents; otherwise what fills no block is dropped")
    held_out: int = integer(8, "blocks kept back for the evaluation on the fly, never trained on")
    held_out_text: str | None = string(None, "text to take them from instead, read like `text`")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Start:
    """Where the routers start from, before any step through the model."""

    how: How = choice("coverage", "random, or from the frozen model's hidden states or attention", How)
    first: LayerStart = choice("random", "where the coverage fit itself starts from", LayerStart)
    blocks: int = integer(24, "blocks of text to look at", 1)
    length: int = integer(2048, "tokens a block", 1)
    repeats: float = number(0.0, "share of the tokens that repeat a passage from beyond the window", 0, 0.5)
    steps: int = integer(240, "of Adam, for each layer (coverage)", 1)
    learning_rate: float = number(2e-3, "of the fit (coverage)")
    budget: float | None = number(
        None, "share of the causal pairs to keep at `length`, of layers and heads that are not dense (coverage)", 0, 1
    )
    largest_group: float | None = number(
        None, "share of the keys that one group should hold at most (coverage); none: 1.6 / `num_groups`", 0, 1
    )
    output_steps: int = integer(0, "further steps for each layer, by what its output loses (coverage)")
    output_learning_rate: float = number(1e-3, "of those")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Stage:
    """Steps through the model with one objective and one schedule."""

    objective: Objective = choice("lm", "next token, or the base model's own predictions, or both", Objective)
    trains: Trains = choice("routers", "the routers alone, or every weight of the model with them", Trains)
    steps: int = integer(1500, "optimiser steps", 1)
    length: int = integer(8192, "tokens a sequence", 2)
    sequences: int = integer(4, "sequences a step, over all devices", 1)
    micro_batch: int = integer(1, "sequences of one forward on one device at most; the rest is accumulated", 1)
    learning_rate: float = number(2e-3, "of the routers, at its highest")
    base_learning_rate: float = number(2e-5, "of the other weights, where they are trained")
    warmup: int = integer(50, "steps from 0 to the highest learning rate; at most half of the stage's")
    schedule: Schedule = choice("cosine", "the learning rate after the warm-up", Schedule)
    max_grad_norm: float = number(1.0, "gradients are clipped to this length; 0: never")
    weight_decay: float = number(0.0, "of the other weights; routers have none")
    budget: float | None = number(None, "share of the causal pairs to keep at `length`", 0, 1)
    repeats: float = number(0.0, "share of the tokens that repeat a passage from beyond the window", 0, 0.5)
    strange: float = number(0.0, "share of the repeated passages that are random tokens, which nothing foretells", 0, 1)
    bias_rate: float = number(1e-3, "how far a group's bias moves against its load in a step; 0: never")
    stop_gradient: bool = flag(False, "what routers learn does not go back into the hidden states they see")
    centroid_rate: float = number(
        0.0,
        "share of the way to the mean of its vectors that a centroid goes in a step; 0: it follows its gradient",
        0,
        1,
    )
    recluster_every: int = integer(0, "steps after which k-means fits the centroids anew; 0: never")
    average: float = number(
        0.0, "share of the steps, the last ones, whose routers are averaged; the stage ends with their mean", 0, 1
    )
    exploration_end: float = number(1.0, "what is left of the probes' weight at the last step, falling evenly", 0, 1)
    options: dict[str, float] = dataclasses.field(
        default_factory=dict, metadata={"help": "further fields of `StepOptions`, by name"}
    )

    def __post_init__(self) -> None:
        check_fields(self)
        refuse_unknown(self.options, _FURTHER_OPTIONS, "`options`")
        object.__setattr__(self, "options", {name: as_number(name, value) for name, value in self.options.items()})
        self.step_options()
        if self.average:
            self.check_mean("average", self.average)
        self._check_centroids()

    def step_options(self) -> StepOptions:
        own = {name: getattr(self, name) for name in _OWN_FIELDS}
        return StepOptions(**own, **self.options)  # type: ignore[arg-type]

    @property
    def averaged_steps(self) -> int:
        return max(1, round(self.average * self.steps)) if self.average else 0

    def check_mean(self, name: str, value: float) -> None:
        """Whether routers of this stage have a mean, which the field `name` asks for."""
        if self.trains == "everything":
            raise ValueError(
                f"`{name}` ({value:g}) is of the routers alone, and the other weights would not fit them: "
                "leave it out where `trains` is 'everything'"
            )
        if self.centroid_rate or self.recluster_every:
            other = "centroid_rate" if self.centroid_rate else "recluster_every"
            raise ValueError(
                f"`{name}` ({value:g}) and `{other}` do not go together: the mean of biases is not the bias of "
                "mean centroids, and groups that are clustered anew are others. Leave one of them out"
            )

    def _check_centroids(self) -> None:
        if self.centroid_rate and self.recluster_every:
            raise ValueError(
                f"`centroid_rate` ({self.centroid_rate:g}) and `recluster_every` ({self.recluster_every}) both move "
                "the centroids: leave one of them out"
            )
        if self.recluster_every > self.steps:
            raise ValueError(
                f"`recluster_every` of {self.recluster_every} steps never comes in a stage of {self.steps}: lower it"
            )
        if self.bias_rate and (self.centroid_rate or self.recluster_every):
            name = "centroid_rate" if self.centroid_rate else "recluster_every"
            raise ValueError(
                f"`{name}` sets the biases with the centroids, and `bias_rate` ({self.bias_rate:g}) would move them "
                "elsewhere: set `bias_rate: 0`"
            )

    @property
    def tokens(self) -> int:
        """In all steps together."""
        return self.steps * self.sequences * self.length


_OWN_FIELDS = ("objective", "budget", "stop_gradient")  # of `StepOptions` that a stage has by the same name
_FURTHER_OPTIONS = [spec.name for spec in dataclasses.fields(StepOptions) if spec.name not in _OWN_FIELDS]


@dataclass(frozen=True)
class Recipe:
    """A training run. Frozen: use `dataclasses.replace` to vary one."""

    stages: tuple[Stage, ...] = (Stage(),)  # none: the start is all
    start: Start | None = Start()  # None: the routers go on from where they are
    focus: FocusConfig | None = None  # None: what the model has, else the defaults
    data: Data = Data()
    name: str = string("focus", "for people")
    model: str | None = string(None, "a Hugging Face model's name or folder, or gemma3-270m; none: the embedded one")
    adapter: str | None = string(None, "go on from it, a folder or a shipped one's name, instead of a `start`")
    fresh_weights: bool = flag(False, "start the model itself from random weights")
    precision: Precision = choice(
        "bf16", "bf16: a frozen base is kept in it, a trained one computes in it from fp32 weights", Precision
    )
    gradient_checkpointing: bool = flag(True, "compute activations again in the backward pass instead of keeping them")
    mean_of_stages: int = integer(
        1, "the run ends with the mean of what so many stages, the last ones, ended with; 1: with the last one", 1
    )
    sharding: Sharding = choice("none", "fsdp: the base's layers are spread over the devices", Sharding)
    seed: int = integer(0, "of the start, of the order of the blocks and of the exploration")
    log_every: int = integer(10, "steps", 1)
    save_every: int = integer(100, "steps", 1)
    evaluate_every: int = integer(250, "steps; 0: never")
    keep_checkpoints: int = integer(2, "older ones are removed", 1)

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.data, Data):
            raise TypeError(f"`data` must be a Data, got {self.data!r}")
        for name, kind in (("focus", FocusConfig), ("start", Start)):
            if not isinstance(getattr(self, name), kind | None):
                raise TypeError(f"`{name}` must be a {kind.__name__} or None, got {getattr(self, name)!r}")
        if isinstance(self.stages, Stage):
            raise TypeError("`stages` must be several in a row, of one too: (Stage(...),)")
        object.__setattr__(self, "stages", tuple(self.stages))
        if not all(isinstance(stage, Stage) for stage in self.stages):
            raise TypeError(f"`stages` must be Stages, got {self.stages!r}")
        if self.adapter is not None:
            self._check_adapter()
        if not self.stages and self.start is None:
            raise ValueError("a recipe without `stages` and without a `start` does nothing: give one of them")
        if self.mean_of_stages > 1:
            self._check_mean()
        if self.focus is not None:
            self.check_lengths(self.focus)

    def _check_mean(self) -> None:
        if self.mean_of_stages > len(self.stages):
            raise ValueError(f"`mean_of_stages` of {self.mean_of_stages} is more than there are `stages`: lower it")
        for stage in self.stages[-self.mean_of_stages :]:
            stage.check_mean("mean_of_stages", self.mean_of_stages)

    def _check_adapter(self) -> None:
        if self.start is not None:
            raise ValueError("`adapter` has routers to go on from, `start` would make others: leave `start:` empty")
        if self.fresh_weights:
            raise ValueError("`adapter` and `fresh_weights` do not go together: routers belong to a model's weights")
        if not self.stages:
            raise ValueError("going on from an `adapter` leaves the start out: there is nothing to do without `stages`")

    def check_lengths(self, focus: FocusConfig) -> None:
        least = 2 * (focus.window + focus.num_sinks)
        for where, length in self.lengths().items():
            if length < least:
                raise ValueError(
                    f"`{where}.length` of {length} tokens leaves the routers next to nothing to choose from: take at "
                    f"least twice the window and the sinks, {least}"
                )
        if self.start is not None and self.start.how == "coverage":
            try:
                _key_cap(self.start.largest_group, focus)
            except ValueError as error:
                raise ValueError(f"`start`: {error}") from None
        for where, stage in self._budgeted():
            try:
                _far_budget(stage.budget, stage.length, focus)  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(f"`{where}`: {error}") from None

    def _budgeted(self) -> Iterator[tuple[str, Start | Stage]]:
        if self.start is not None and self.start.how == "coverage" and self.start.budget is not None:
            yield "start", self.start
        for index, stage in enumerate(self.stages):
            if stage.budget is not None:
                yield f"stages[{index}]", stage

    def lengths(self) -> dict[str, int]:
        """The block lengths by where they stand."""
        start = {} if self.start is None or self.start.how == "random" else {"start": self.start.length}
        return {**start, **{f"stages[{index}]": stage.length for index, stage in enumerate(self.stages)}}

    @property
    def served_length(self) -> int:
        """Tokens a block that is evaluated has: the last stage's, which most likely are served."""
        if self.stages:
            return self.stages[-1].length
        assert self.start is not None  # a recipe has one or the other
        return self.start.length

    @property
    def takes_held_out(self) -> bool:
        """Whether what is evaluated on is taken from the text itself."""
        return self.data.held_out > 0 and self.data.held_out_text is None

    @property
    def trains_base(self) -> bool:
        return any(stage.trains == "everything" for stage in self.stages)

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` reads them back."""
        own = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if "kind" in spec.metadata}
        return {
            **own,
            "focus": None if self.focus is None else self.focus.to_dict(),
            "data": dataclasses.asdict(self.data),
            "start": None if self.start is None else dataclasses.asdict(self.start),
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        refuse_unknown(values, [spec.name for spec in dataclasses.fields(cls)], "a recipe")
        given = dict(values)
        for name, kind in (("focus", FocusConfig), ("data", Data), ("start", Start)):
            if given.get(name) is not None:
                given[name] = read_record(kind, given[name], f"`{name}`")
        if given.get("data", ...) is None:  # an empty section of a YAML file
            del given["data"]
        if "stages" in given:
            if not isinstance(given["stages"], (list, tuple)):
                raise TypeError(f"`stages` must be a list, got {given['stages']!r}")
            given["stages"] = tuple(
                read_record(Stage, stage, f"`stages[{index}]`") for index, stage in enumerate(given["stages"])
            )
        return cls(**given)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Recipe:
        yaml = _yaml()
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"no recipe at {str(path)!r}: see the folder recipes/ for examples")
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
        try:
            return cls.from_dict({} if values is None else values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r}: {error}") from None

    def to_yaml(self, path: str | Path) -> None:
        """Every field, defaults included."""
        Path(path).write_text(_yaml().safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    def differences(self, other: Recipe) -> list[tuple[str, str]]:
        """(field, "`field`: here, there") of all that is not the same."""
        mine, theirs = self.to_dict(), other.to_dict()
        if (mine["start"] is None) != (theirs["start"] is None):  # not all its fields one by one
            mine["start"], theirs["start"] = ("none" if one["start"] is None else "one" for one in (mine, theirs))
        mine, theirs = _flat(mine), _flat(theirs)
        names = [*mine, *(name for name in theirs if name not in mine)]
        nothing = object()
        return [
            (name, f"`{name}`: {mine.get(name)!r}, {theirs.get(name)!r}")
            for name in names
            if mine.get(name, nothing) != theirs.get(name, nothing)
        ]


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    items: Any = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        name = f"{prefix}[{key}]" if isinstance(values, list) else f"{prefix}.{key}".lstrip(".")
        flat.update(_flat(value, name) if isinstance(value, (dict, list)) else {name: value})
    return flat


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ImportError("recipes in YAML need PyYAML: pip install pyyaml") from None
    return yaml
