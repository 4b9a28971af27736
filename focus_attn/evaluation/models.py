"""The models that are set beside each other: a base model as it is, and the same with each of several adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from focus_attn.adapters import adapter_digest
from focus_attn.evaluation.summary import BASE
from focus_attn.model import FocusModel
from focus_attn.pretrained import find_pretrained
from focus_attn.zoo import find_adapter


@dataclass(frozen=True)
class Compared:
    """One set of weights in memory: Focus is switched off for the base model, adapters take turns."""

    model: Any
    tokenizer: Any
    name: str  # of the base model
    adapters: dict[str, str]  # short name -> digest of its files

    @property
    def names(self) -> list[str]:
        return [BASE, *self.adapters]

    @contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """The model of this name."""
        if not self.adapters:
            yield self.model
        elif name == BASE:
            with self.model.disable_focus():
                yield self.model
        else:
            self.model.set_adapter(name)
            yield self.model

    def facts(self, name: str) -> dict[str, Any]:
        """What scores of this model are known by."""
        return {
            "model": self.name,
            "adapter": self.adapters.get(name),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
        }


def load_compared(
    model_name: str | None, adapters: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Compared:
    folders = [find_adapter(adapter) for adapter in adapters]  # before the model, which takes longer
    names = short_names([Path(adapter) for adapter in adapters])  # on the Hub's side a folder is called by its commit
    base = find_pretrained(model_name)
    model, tokenizer = base.load(dtype)
    model = model.to(device)
    name = base.name if base.in_wheel else Path(base.name).name or base.name
    if folders:
        model = FocusModel.from_pretrained(model, str(folders[0]), names[0])
        for folder, short in zip(folders[1:], names[1:], strict=True):
            model.load_adapter(str(folder), short)
    digests = {short: adapter_digest(folder) for short, folder in zip(names, folders, strict=True)}
    return Compared(model, tokenizer, name, digests)


def short_names(folders: Sequence[Path]) -> list[str]:
    """A name for each adapter: that of its folder, "focus" where that would not do."""
    names: list[str] = []
    for folder in folders:
        name = folder.resolve().name.replace(".", "_")
        name = "focus" if name in (BASE, "adapter", "") else name
        while name in (*names, "items"):  # what is asked has that name, in a folder of scores
            name += "+"
        names.append(name)
    return names
