"""Dataclass fields that carry what they allow, and the reading of such dataclasses from plain values.

Whatever is wrong is one sentence with the field, the value and what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

Record = TypeVar("Record")


def integer(default: Any, help: str, lowest: int = 0) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "kind": "integer", "lowest": lowest})


def number(default: Any, help: str, lowest: float = 0.0, highest: float = math.inf) -> Any:
    allowed = {"kind": "number", "lowest": lowest, "highest": highest}
    return dataclasses.field(default=default, metadata={"help": help, **allowed})


def choice(default: Any, help: str, literal: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "kind": "choice", "choices": get_args(literal)})


def flag(default: bool, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "kind": "flag"})


def string(default: str | None, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "kind": "text"})


def check_fields(record: Any) -> None:
    """Check every field made by the functions above. None is allowed where it is the default."""
    for spec in dataclasses.fields(record):
        if "kind" not in spec.metadata:
            continue
        value = getattr(record, spec.name)
        if value is None and spec.default is None:
            continue
        object.__setattr__(record, spec.name, _checked(spec.name, value, spec.metadata))


def _checked(name: str, value: Any, allowed: Mapping[str, Any]) -> Any:
    kind = allowed["kind"]
    if kind == "choice":
        if value not in allowed["choices"]:
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed['choices']))}, got {value!r}")
    elif kind == "flag":
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be true or false, got {value!r}")
    elif kind == "text":
        if not isinstance(value, str) or not value:
            raise TypeError(f"`{name}` must be a non-empty string, got {value!r}")
    elif kind == "integer":
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{name}` must be an integer, got {value!r}")
        if value < allowed["lowest"]:
            raise ValueError(f"`{name}` must be at least {allowed['lowest']}, got {value}")
    else:
        value = as_number(name, value)
        lowest, highest = allowed["lowest"], allowed["highest"]
        if not (math.isfinite(value) and lowest <= value <= highest):
            bounds = f"at least {lowest:g}" if highest == math.inf else f"between {lowest:g} and {highest:g}"
            raise ValueError(f"`{name}` must be {bounds}, got {value!r}")
        value = float(value)
    return value


def as_number(name: str, value: Any) -> int | float:
    if isinstance(value, str):  # YAML takes 1e-3, which has no dot, for a string
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    return value


def refuse_unknown(values: Any, known: list[str], where: str) -> None:
    """ValueError unless `values` is a mapping whose keys are all `known`; it names the nearest known one."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{where} must hold fields and their values, got {values!r}")
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"the fields are {', '.join(known)}"
            raise ValueError(f"{where} has no field {key!r}: {hint}")


def read_record(cls: type[Record], values: Any, where: str) -> Record:
    """A flat dataclass from a mapping; errors say where in the recipe it stands."""
    known = [spec.name for spec in dataclasses.fields(cls)]  # type: ignore[arg-type]
    refuse_unknown(values, known, where)
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
