"""Comparison: which methods, on which models and texts, and what is measured; read from YAML, checked when made."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from focus_attn.baselines import BASELINES
from focus_attn.training.fields import check_fields, flag, integer, read_record, refuse_unknown, string
from focus_attn.training.recipe import _yaml

How = Literal["lora", "dora", "full"]
FOLDERS = (Path("recipes/compare"), Path(__file__).parents[2] / "recipes" / "compare")
NOT_LIKE = ("name", "model", "data")  # what a training recipe says that a comparison says itself
BASE = "full attention"  # the row that every other is compared with; each comparison has it


@dataclass(frozen=True)
class Dataset:
    """A text, the part that is trained on and the part that is measured on."""

    test: str = string("builtin", "file, folder, token file (.npy), hub:owner/name[:split[:subset]], or builtin")
    train: str | None = string(None, "the same kinds; none: `test` is split, and nothing of it is in both parts")
    lengths: tuple[int, ...] = (2048,)  # tokens a block
    blocks: int = integer(24, "blocks to measure on, evenly spread over the text", 1)
    field: str = string("text", "the field of a JSONL line or of a hub dataset that holds the text")
    join: bool = flag(False, "the rows of the source are lines of one document, as WikiText's are on the hub")

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "lengths", _whole_numbers("lengths", self.lengths, lowest=2))

    def within(self, longest: int) -> Dataset:
        lengths = dict.fromkeys(min(length, longest) for length in self.lengths)
        return dataclasses.replace(self, lengths=tuple(lengths))


@dataclass(frozen=True)
class Method:
    """One row: what attends, what is trained for it, and how it is served.

    Either a peer (`attention`, by its name in `focus_attn.baselines`) or Focus (`focus`: trained in the run, `adapter`:
    a folder). `tune` trains the model's own weights under whatever attends, "lora", "dora" or "full".
    """

    name: str = string("", "the row's name")
    attention: str = string("full", "a peer of focus_attn.baselines")
    options: Mapping[str, Any] = field(default_factory=dict)  # of the peer
    budget: float | str | None = None  # share of the dense multiply-adds, or the name of the row to cost as much as
    focus: Mapping[str, Any] | None = None  # fields of FocusConfig; `preset: paper` starts from the published ones
    adapter: str | None = string(None, "a saved adapter's folder or a shipped one's name; of several seeds: a,b,c")
    training: Mapping[str, Any] = field(default_factory=dict)  # what differs from the comparison's `training`
    tune: Mapping[str, Any] | None = None  # `how`, and what differs from the comparison's `tuning`
    serve: Mapping[str, Any] = field(default_factory=dict)  # fields of FocusConfig changed after training
    train_on: str | None = string(None, "the dataset to train on; none: the comparison's")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tune is not None:
            object.__setattr__(self, "tune", _numbers("tune", self.tune))
        if sum((self.attention != "full", self.focus is not None, self.adapter is not None)) > 1:
            raise ValueError(f"{self.name!r}: `attention`, `focus` and `adapter` exclude each other: give one of them")
        if self.serve and not self.is_focus:
            raise ValueError(f"{self.name!r}: `serve` changes how Focus is served, and this row has no Focus")
        if self.training and self.focus is None:
            raise ValueError(f"{self.name!r}: `training` is for rows with `focus`; peers are trained by `tune`")
        if self.tune is not None:
            if self.is_focus:
                raise ValueError(
                    f"{self.name!r}: to train the model's weights with Focus, give a stage `trains: everything`"
                )
            if isinstance(self.budget, str):
                raise ValueError(f"{self.name!r}: a peer that is trained needs a share as `budget`, such as 0.2")
            if self.tune.get("how") not in get_args(How):
                raise ValueError(f"{self.name!r}: `tune.how` must be one of {', '.join(get_args(How))}")
        self._check_peer()

    def _check_peer(self) -> None:
        """What a row would otherwise be told after those above it were trained and measured."""
        if isinstance(self.budget, bool) or not isinstance(self.budget, float | int | str | None):
            raise TypeError(f"{self.name!r}: `budget` must be a share or the name of a row, got {self.budget!r}")
        if isinstance(self.budget, float | int) and not 0 < self.budget <= 1:
            raise ValueError(f"{self.name!r}: `budget` is a share of the dense multiply-adds, got {self.budget}")
        if self.budget is not None and (self.is_focus or self.attention == "full"):
            raise ValueError(f"{self.name!r}: `budget` is for peers; Focus has one in its `training` stages")
        _check_mapping(f"{self.name}: options", self.options)
        if self.options and self.attention == "full":
            raise ValueError(f"{self.name!r}: `options` are a peer's: name one as `attention`")
        if self.attention not in BASELINES:
            names = ", ".join(sorted(BASELINES))
            raise ValueError(f"{self.name!r}: no baseline {self.attention!r}; there are {names}")
        known = options_of(self.attention, budget=self.budget is not None)
        if unknown := sorted(self.options.keys() - set(known)):
            where = " beside a `budget`" if self.budget is not None else ""
            names = ", ".join(known) or "none"
            raise ValueError(f"{self.name!r}: {self.attention} has no option {unknown[0]!r}{where}; it has {names}")
        for name, value in self.options.items():
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{self.name!r}: `{name}` must not be negative, got {value}")

    @property
    def is_focus(self) -> bool:
        return self.focus is not None or self.adapter is not None

    @property
    def adapters(self) -> tuple[str, ...]:
        """One for each seed."""
        return () if self.adapter is None else tuple(part.strip() for part in self.adapter.split(","))

    @property
    def is_trained(self) -> bool:
        """Whether seeds change it."""
        return self.focus is not None or self.tune is not None

    @property
    def is_base(self) -> bool:
        return self == Method(name=self.name)

    def to_dict(self) -> dict[str, Any]:
        return plain(dataclasses.asdict(self))


@dataclass(frozen=True)
class Comparison:
    """Methods x models x data. Frozen: use `dataclasses.replace` to vary one."""

    methods: tuple[Method, ...] = ()
    data: Mapping[str, Dataset] = field(default_factory=lambda: {"text": Dataset()})
    models: tuple[str, ...] = ("default",)
    training: Mapping[str, Any] = field(default_factory=dict)  # a training recipe's fields, for every `focus` row
    tuning: Mapping[str, Any] = field(default_factory=dict)  # steps, length, ..., for every `tune` row
    train_on: str | None = string(None, "the dataset to train on; none: the first")
    seeds: tuple[int, ...] = (0,)  # of the trained rows
    longest: int | None = integer(None, "tokens; longer texts, to train on too, are taken in pieces of so many", 2)
    window: int = integer(128, "predictions up to this position are not counted: nearer ones see everything anyway")
    timing: bool = flag(True, "measure the time of the attention, on the queries and keys of the text")
    groups: bool = flag(False, "keep the tokens that stand out in each group")
    curves: bool = flag(False, "draw the largest group over the steps of training, not quality over cost")
    stepwise: bool = flag(False, "each row adds to the one above it: show them in this order, not the best first")
    tasks: bool = flag(False, "score the benchmarks of --requests too")
    asks: str = string("--tasks all --long 4096", "options of `focus eval` for `tasks`, that write such a file")
    bench: Mapping[str, Any] | None = None  # options of `focus bench attention`, where the table is one of speed
    name: str = string("comparison", "for people, and for the folder of its results")
    title: str = string("Comparison", "the table's heading")
    published: tuple[Mapping[str, Any], ...] = ()  # what the paper has: `what`, `figure`, and our `row` beside it
    explains: str | None = string(None, "what explains a difference to the published figures")
    not_run: tuple[Mapping[str, Any], ...] = ()  # models of the published table that need a larger machine
    note: str | None = None  # what the reader must know of a run, such as that it is the quick form

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.models, str):
            object.__setattr__(self, "models", (self.models,))
        for name in ("methods", "models", "published", "not_run"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "seeds", _whole_numbers("seeds", self.seeds))
        object.__setattr__(self, "tuning", _numbers("tuning", self.tuning))
        if self.longest is not None:
            data = {name: dataset.within(self.longest) for name, dataset in self.data.items()}
            object.__setattr__(self, "data", data)
        if self.bench is None:
            self._check_methods()
        elif self.methods:
            raise ValueError("`bench` measures speed alone: leave `methods` out")

    def _check_methods(self) -> None:
        if not any(method.is_base for method in self.methods):
            object.__setattr__(self, "methods", (Method(name=BASE), *self.methods))
        names = [method.name for method in self.methods]
        for method in self.methods:
            if not method.name or names.count(method.name) > 1:
                raise ValueError(f"every method needs a `name` of its own, got {method.name!r}")
            if isinstance(method.budget, str) and method.budget not in names[: names.index(method.name)]:
                raise ValueError(
                    f"{method.name!r}: `budget` must be a share such as 0.2 or the name of a row above it, got "
                    f"{method.budget!r}"
                )
            if isinstance(method.budget, str) and self.tasks:
                raise ValueError(
                    f"{method.name!r}: benchmarks have prompts of many lengths, for which no row's cost is known: give "
                    "a share as `budget`, such as 0.2"
                )
        if not self.data or not self.models:
            raise ValueError("a comparison needs at least one of `data` and one of `models`")
        for where in (self.train_on, *(method.train_on for method in self.methods)):
            if where is not None and where not in self.data:
                raise ValueError(f"`train_on` must be one of {', '.join(self.data)}, got {where!r}")

    def seeds_of(self, method: Method) -> tuple[int, ...]:
        if method.adapter is not None:
            return tuple(range(len(method.adapters)))
        return self.seeds if method.is_trained else (0,)

    def train_set(self, method: Method) -> str:
        return method.train_on or self.train_on or next(iter(self.data))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` reads them back."""
        return plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Comparison:
        refuse_unknown(values, [spec.name for spec in dataclasses.fields(cls)], "a comparison")
        given = {name: value for name, value in values.items() if value is not None}
        if not isinstance(given.get("methods", []), list | tuple) or not isinstance(given.get("data", {}), Mapping):
            raise TypeError("`methods` must be a list, and `data` hold datasets by their names")
        given["methods"] = [
            read_record(Method, one, f"`methods[{index}]`") for index, one in enumerate(given.get("methods", []))
        ]
        if "data" in given:
            given["data"] = {name: read_record(Dataset, one, f"`data.{name}`") for name, one in given["data"].items()}
        return cls(**given)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Comparison:
        yaml, path = _yaml(), Path(path)
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            if not isinstance(values, dict):
                raise TypeError(f"a comparison has fields such as `methods` and `data`, got {type(values).__name__}")
            methods = values.get("methods") or []
            for holder in (values, *(methods if isinstance(methods, list) else ())):
                if isinstance(holder, dict) and "training" in holder:
                    holder["training"] = _like(holder["training"], path.parent)
            if not methods and not values.get("bench"):
                raise ValueError("a comparison needs `methods`, the rows to measure beside full attention")
            return cls.from_dict(values)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r}: {error}") from None


def options_of(attention: str, budget: bool) -> list[str]:
    """The options that a row may give a peer: its settings, without what it fits to text; of one at a cost those that
    its cost does not settle."""
    maker: Any = BASELINES[attention]
    of = dataclasses.fields(maker) if dataclasses.is_dataclass(maker) else ()
    fitted = {"budget", *(one.name for one in of if one.default_factory is not dataclasses.MISSING)}
    own = [name for name in inspect.signature(maker).parameters if name not in fitted]
    if not budget:
        return own
    within = getattr(maker, "within", None)
    if within is None:
        raise ValueError(f"{attention} has no knob that a `budget` could turn: leave it out")
    settled = inspect.signature(within).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in settled.values()):
        return own
    return [name for name in settled if name not in ("budget", "shape")]


def find_recipe(name: str) -> Path:
    """The file of a path, or of a name such as table1."""
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in FOLDERS)):
        if path.is_file():
            return path
    known = ", ".join(recipe_names()) or "none: they stand in the repository's folder recipes/compare"
    raise ValueError(f"no comparison {name!r}: give a YAML file or one of the names ({known})")


def recipe_names() -> list[str]:
    return sorted({file.stem for folder in FOLDERS for file in folder.glob("*.yaml")})


def _like(training: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`like: NAME` stands for what the training recipe NAME.yaml says, beside this file or one of the repository's; the
    rest changes it."""
    _check_mapping("training", training)
    name = training.pop("like", None)
    if name is None:
        return training
    for place in (folder.resolve(), *FOLDERS):
        for file in (place / "training" / f"{name}.yaml", place / f"{name}.yaml", place.parent / f"{name}.yaml"):
            if file.is_file():
                recipe = _yaml().safe_load(file.read_text(encoding="utf-8"))
                return merged({key: recipe[key] for key in recipe if key not in NOT_LIKE}, training)
    raise ValueError(
        f"`training.like`: no training recipe {name!r} in {str(folder / 'training')!r}, one folder up or in recipes/"
    )


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`: mappings field by field, a single mapping over each element of a list."""
    result = dict(base)
    for name, value in changes.items():
        there = result.get(name)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            result[name] = merged(there, value)
        elif isinstance(value, Mapping) and isinstance(there, list | tuple):
            result[name] = [merged(one, value) for one in there]
        else:
            result[name] = value
    return result


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def _check_mapping(name: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise TypeError(f"`{name}` must hold fields and their values, got {values!r}")


def _numbers(field_name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """YAML takes 1e-4, which has no dot, for a string."""
    _check_mapping(field_name, values)
    read: dict[str, Any] = dict(values)
    for name, value in values.items():
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                read[name] = float(value)
    return read


def _whole_numbers(name: str, values: Any, lowest: int = 0) -> tuple[int, ...]:
    values = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ValueError(f"`{name}` must be whole numbers of at least {lowest}, got {value!r}")
    if not values:
        raise ValueError(f"`{name}` must hold at least one number")
    return tuple(values)
