"""`focus compare`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from focus_attn.commands.options import Device, Dtype, JsonFile
from focus_attn.targets import check_results


def compare(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a name: peers, table1 ... table10, dimension, ...")],
    quick: Annotated[bool, typer.Option("--quick", help="Tiny random model, a few steps: does it run?")] = False,
    model: Annotated[
        list[str] | None, typer.Option(help="default, gemma3-270m, a hub name or a folder, instead of the recipe's.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME.test=PATH, NAME.train=PATH, or PATH for all: files, folders, .npy tokens, hub:owner/name."
        ),
    ] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="ROW=FOLDER: take this adapter, train none.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the rows whose names hold this.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Blocks to measure on.")] = None,
    lengths: Annotated[str | None, typer.Option(help="As in 2048,8K.")] = None,
    longest: Annotated[
        int | None, typer.Option(min=2, help="No text longer than so many tokens, to train on too: GPT-2 has 1,024.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, of rows that are trained.")] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, help="This one alone, beside those measured before.")] = None,
    requests: Annotated[Path | None, typer.Option(help="Benchmarks, from `focus eval --write-requests`.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="Stop then; the same command goes on.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of finished cells; default: runs/compare/<name>.")] = None,
    known: Annotated[
        list[Path] | None, typer.Option(help="Measure only what these lack: cells.jsonl, or .json of --json.")
    ] = None,
    time_again: Annotated[
        bool, typer.Option("--time-again", help="Measure the time of --known rows anew, nothing else of them.")
    ] = False,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Quality over cost: .png or .svg.")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    show: Annotated[
        list[Path] | None,
        typer.Option(help="Run nothing: put together these cells.jsonl, or .json of --json, the newest last."),
    ] = None,
    write_tokens: Annotated[
        Path | None, typer.Option(help="Write the texts as token files into this folder and stop.")
    ] = None,
) -> None:
    """Methods x models x data in one table: perplexity with intervals, pairs, multiply-adds, time of the attention.

    Every finished cell is kept in --out: the same command goes on after an interruption, and does nothing twice.
    docs/reproduction.md has what came of the recipes.
    """
    from focus_attn.bench.options import read_device, read_dtype, read_numbers
    from focus_attn.bench.record import write_json
    from focus_attn.bench.terminal import make_console
    from focus_attn.compare.changes import with_adapters, with_data, with_only
    from focus_attn.compare.quick import quick as quick_form
    from focus_attn.compare.quick import quick_requests
    from focus_attn.compare.recipe import Comparison, find_recipe
    from focus_attn.compare.runner import Outcome, Settings, run
    from focus_attn.compare.table import make_rows, places, verdicts
    from focus_attn.compare.tasks_together import of_rows
    from focus_attn.compare.terminal import Bars, print_outcome
    from focus_attn.compare.together import put_together
    from focus_attn.evaluation.requests import Requests
    from focus_attn.evaluation.summary import BASE

    asked = {
        "--text": text,
        "--blocks": blocks,
        "--lengths": lengths,
        "--seeds": seeds,
        "--seed": seed,
        "--known": known,
        "--longest": longest,
        "--time-again": time_again,
    }
    comparison = Comparison.from_yaml(find_recipe(recipe))
    comparison = with_data(comparison, text or [], blocks, read_numbers("lengths", lengths) if lengths else None)
    changes: dict[str, Any] = {}
    if model:
        changes["models"] = tuple(model)
    if longest is not None:
        changes["longest"] = longest
    if seeds is not None and seed:
        raise ValueError("--seeds says how many, --seed which: give one of them")
    if show and (given := [name for name, value in asked.items() if value]):
        raise ValueError(f"--show runs nothing: leave {', '.join(given)} out")
    if seeds is not None or seed:
        changes["seeds"] = tuple(dict.fromkeys(seed or range(seeds or 0)))
    if adapter:
        comparison = dataclasses.replace(comparison, methods=with_adapters(comparison, adapter))
    if only:
        comparison = dataclasses.replace(comparison, methods=with_only(comparison, only))
    comparison = dataclasses.replace(comparison, **changes)
    if quick:
        comparison = quick_form(comparison)
    if time_again and not known:
        raise ValueError("--time-again is of rows that were measured before: give them with --known")
    if time_again and not comparison.timing:
        raise ValueError("--time-again: this comparison measures no times (`timing: false`)")
    check_results(json_file, plot)
    if write_tokens is not None:
        from focus_attn.compare.prepare import prepare_tokens

        prepare_tokens(comparison, write_tokens)
        return
    console = make_console()

    def log(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    asked_of_all = None if requests is None else Requests.load(requests)
    if quick and comparison.tasks and asked_of_all is None and not show:
        asked_of_all = quick_requests()
    if show:
        names = [method.name for method in comparison.methods]
        shown = put_together(show, comparison.tasks, asked_of_all, names)
        outcome = Outcome(shown.cells, shown.scored if comparison.tasks else [], shown.tasks)
        said: dict[str, Any] = {"note": shown.note or comparison.note, "models": shown.models or comparison.models}
        comparison = dataclasses.replace(comparison, **said)
        if only:
            outcome.cells = [cell for cell in outcome.cells if cell["row"] in names]
            outcome.scored = [one for one in outcome.scored if one["row"] in (BASE, *names)]
            outcome.tasks = [of_rows(row, (BASE, *names)) for row in outcome.tasks]
    else:
        place = read_device("cpu" if quick else device)
        with Bars(console) as bars:
            before = put_together(known, tasks=False) if known else None
            settings = Settings(
                out or Path("runs/compare") / (comparison.name + ("-quick" if quick else "")),
                place,
                read_dtype("fp32" if quick else dtype, place),
                seconds=math.inf if seconds is None else seconds,
                requests=asked_of_all,
                known=before.cells if before else (),
                known_scores=before.scored if before else (),
                time_again=time_again,
                progress=bars,
                log=log,
            )
            outcome = run(comparison, settings)
    print_outcome(console, comparison, outcome)
    rows = make_rows(outcome.cells)
    if json_file is not None:
        table = {
            "rows": [row.to_dict() for row in rows],
            "verdicts": {str(tuple(at)): verdicts(rows, at) for at in places(rows)},
        }
        cells = {"tasks": outcome.tasks, "scores": outcome.scored, "cells": outcome.cells}
        whole = {"comparison": comparison.to_dict(), "stopped": outcome.stopped, **table, **cells}
        write_json(json_file, whole)
    if plot is not None and rows:
        from focus_attn.compare.plot import draw

        log(f"drawn: {', '.join(map(str, draw(comparison, outcome.cells, plot)))}")
