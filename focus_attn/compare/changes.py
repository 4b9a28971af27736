"""What a user changes in a recipe on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from focus_attn.compare.recipe import Comparison, Dataset, Method


def with_data(
    comparison: Comparison, texts: Sequence[str], blocks: int | None = None, lengths: Sequence[int] | None = None
) -> Comparison:
    """`texts` are "NAME.test=PATH", "NAME.train=PATH", "NAME=PATH" (both parts, split) or "PATH" (every dataset)."""
    data = dict(comparison.data)
    for text in texts:
        target, equals, path = text.partition("=")
        if not equals:
            data = {name: dataclasses.replace(one, test=text, train=None) for name, one in data.items()}
            continue
        name, _, part = target.partition(".")
        if name not in data or part not in ("", "train", "test") or not path:
            names = ", ".join(data)
            raise ValueError(
                f"--text must be PATH, NAME=PATH, NAME.train=PATH or NAME.test=PATH with a name of this recipe "
                f"({names}), got {text!r}"
            )
        data[name] = _part_replaced(data[name], part, path)
    more = {key: value for key, value in (("blocks", blocks), ("lengths", lengths)) if value is not None}
    data = {name: dataclasses.replace(one, **more) for name, one in data.items()}  # type: ignore[arg-type]
    return dataclasses.replace(comparison, data=data)


def with_adapters(comparison: Comparison, adapters: Sequence[str]) -> tuple[Method, ...]:
    """`adapters` are "ROW=FOLDER": that row is not trained any more. One named several times has as many seeds."""
    folders: dict[str, list[str]] = {}
    for adapter in adapters:
        name, _, folder = adapter.rpartition("=")
        folders.setdefault(name, []).append(folder)
    rows = [method.name for method in comparison.methods if method.is_focus]
    for name in folders:
        if name not in rows:
            raise ValueError(f"--adapter must be ROW=FOLDER with a row of Focus ({'; '.join(rows)}), got {name!r}")
    return tuple(
        dataclasses.replace(method, focus=None, training={}, adapter=",".join(folders[method.name]))
        if method.name in folders
        else method
        for method in comparison.methods
    )


def with_only(comparison: Comparison, parts: Sequence[str]) -> tuple[Method, ...]:
    """The rows whose names hold one of `parts`, full attention, and the rows whose cost those are to have."""
    chosen = [method for method in comparison.methods if any(part in method.name for part in parts)]
    if not chosen:
        names = ", ".join(method.name for method in comparison.methods)
        raise ValueError(f"--only {', '.join(parts)}: no row is called so; there are {names}")
    needed = {method.name for method in chosen} | {str(method.budget) for method in chosen}
    return tuple(method for method in comparison.methods if method.is_base or method.name in needed)


def _part_replaced(dataset: Dataset, part: str, path: str) -> Dataset:
    if part == "train":
        return dataclasses.replace(dataset, train=path)
    return dataclasses.replace(dataset, test=path, train=dataset.train if part else None)
