"""`focus train`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from focus_attn.commands.options import Device, Model
from focus_attn.targets import check_targets


def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, such as those in recipes/.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A .txt, .md or .jsonl file, a folder of them, hub:owner/name, or a token file (.npy). May be given "
            "several times: all of it is read, what is named twice counts twice."
        ),
    ] = None,
    model: Model = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the adapter, checkpoints and logs; default: runs/<name>.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Go on from this adapter: a folder or a shipped one's name. No start then.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint there; --no-resume starts anew.")] = True,
    time_limit: Annotated[
        float | None, typer.Option(min=0.001, help="Minutes after which to stop, with a checkpoint and the adapter.")
    ] = None,
    device: Device = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """Train Focus on a model as a recipe says, and save the adapter.

    Ctrl-C stops with a checkpoint. After that, or a crash, the same command goes on where it was. Several GPUs:
    torchrun --nproc_per_node 8 -m focus_attn.cli train RECIPE.yaml; docs/training.md says more.
    """
    from rich.console import Console

    from focus_attn.bench.record import write_json
    from focus_attn.report.terminal import StageBars
    from focus_attn.training import loop
    from focus_attn.training.data import Sources
    from focus_attn.training.distributed import leave_processes, rank
    from focus_attn.training.recipe import Recipe
    from focus_attn.zoo import find_adapter

    chosen = Recipe.from_yaml(recipe)
    chosen = dataclasses.replace(chosen, model=model or chosen.model, seed=chosen.seed if seed is None else seed)
    if adapter is not None:
        chosen = dataclasses.replace(chosen, adapter=adapter, start=None)
    named = text or ([] if chosen.data.text is None else [chosen.data.text])
    if not named:
        raise ValueError(f"{str(recipe)!r} names no text (`data: {{text: ...}}`): give --text FILE_OR_FOLDER")
    check_targets(json_file)
    if chosen.adapter is not None:
        find_adapter(chosen.adapter)  # before the model, which takes longer
    base, tokenizer = load_base(chosen)
    console = Console()
    try:
        with StageBars(console) as bars:
            result = loop.train(
                base,
                Sources(named),
                chosen,
                tokenizer=tokenizer,
                output=output or Path("runs") / chosen.name,
                resume=resume,
                device=device,
                time_limit=None if time_limit is None else 60 * time_limit,
                log=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
                progress=bars,
            )
        if json_file is not None and rank() == 0:
            write_json(json_file, {"recipe": chosen.to_dict(), **result.to_dict()})
        if result.signal is not None and not result.finished:
            raise typer.Exit(128 + result.signal)  # what waits for it must not take it for done
    finally:
        leave_processes()


def load_base(recipe: Any) -> tuple[Any, Any]:
    """The model that a recipe names, with its own weights or fresh ones, and its tokenizer."""
    from focus_attn.pretrained import find_pretrained

    base = find_pretrained(recipe.model)
    return (base.with_fresh_weights(recipe.seed), base.tokenizer()) if recipe.fresh_weights else base.load()
