"""`focus average`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def average(
    adapters: Annotated[list[str], typer.Argument(help="Two or more: folders, or shipped ones' names.")],
    output: Annotated[Path, typer.Option(help="Folder for their mean.")],
    weights: Annotated[str | None, typer.Option(help="How much each counts, as in 2,1. Without: alike.")] = None,
) -> None:
    """The mean of adapters that one start led to: often better than each of them, at the cost of one.

    For example an adapter and what came of training it further, or two recipes with the same `focus`, seed, text and
    `start`.
    """
    from focus_attn.adapter_mean import mean_of_adapters
    from focus_attn.adapters import BASE_FOLDER, CONFIG_FILE, read_adapter, write_adapter
    from focus_attn.zoo import find_adapter

    if (output / CONFIG_FILE).exists():
        raise ValueError(f"{str(output)!r} already holds an adapter: choose another folder, or delete it")
    try:
        shares = None if weights is None else [float(weight) for weight in weights.split(",")]
    except ValueError:
        raise ValueError(f"--weights takes numbers, as in 2,1; got {weights!r}") from None
    folders = [find_adapter(adapter) for adapter in adapters]
    if own := [folder for folder in folders if (folder / BASE_FOLDER).is_dir()]:
        raise ValueError(f"{str(own[0])!r} was trained together with its model: the mean would fit neither model")
    mean = mean_of_adapters([read_adapter(folder) for folder in folders], shares)
    write_adapter(mean.adapter, output)
    Console().print(
        f"The mean of {len(adapters)} adapters, at most {mean.apart:.2f} of their size apart, is in {output}.\n"
        f"What it loses: focus eval --adapter {output} --text FILE (and the --model, if not the embedded one)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
