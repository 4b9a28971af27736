"""`focus demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from focus_attn.commands.options import JsonFile
from focus_attn.targets import check_targets


def demo(
    report: Annotated[Path, typer.Option(help="Where to write the HTML report.")] = Path("focus-report.html"),
    length: Annotated[int | None, typer.Option(help="Tokens a block, for the fit and for perplexity.")] = None,
    blocks: Annotated[
        int | None, typer.Option(help="Held-out blocks to measure perplexity on; 8, or 4 if slow.")
    ] = None,
    train_blocks: Annotated[int | None, typer.Option(help="Blocks to fit the routers to.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the fit, for each layer.")] = None,
    budget: Annotated[float | None, typer.Option(help="Share of the token pairs to keep, 0 to 1.")] = None,
    text: Annotated[Path | None, typer.Option(help="Your own text: .txt, .md, .jsonl or a folder of them.")] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the fitted adapter in this folder.")] = None,
    json_file: JsonFile = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the fit.")] = None,
    fast: Annotated[bool, typer.Option(help="A tiny random model and a few steps: a trial of the program.")] = False,
) -> None:
    """Measure the shipped adapter, fit another, and see what each costs and saves, on this machine.

    Takes about five minutes on two cores with units for matrices, a quarter of an hour on two without. The first run
    converts the model (SmolLM2-135M-Instruct) into the cache folder, which the environment variable FOCUS_CACHE can
    move.
    """
    from focus_attn.bench import write_json
    from focus_attn.demo import DemoOptions, run_demo
    from focus_attn.report import write_report
    from focus_attn.report.plots import check_matplotlib
    from focus_attn.report.terminal import StageBars, print_closing_table

    check_matplotlib()  # now, not after five minutes
    check_targets(report, json_file)
    if save is not None and save.exists() and not save.is_dir():
        raise ValueError(f"an adapter is saved into a folder, but {str(save)!r} is a file")
    given = {
        "length": length,
        "blocks": blocks,
        "train_blocks": train_blocks,
        "steps": steps,
        "budget": budget,
        "text": text,
        "seed": seed,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options = DemoOptions.for_tests(**chosen) if fast else DemoOptions(**chosen)
    console = Console()
    with StageBars(console) as bars:
        result, model = run_demo(
            options, bars, lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)
        )
    written = {"report": write_report(result, report)}
    if json_file is not None:
        write_json(json_file, result.to_dict())
        written["numbers"] = json_file
    if save is not None:
        model.save_pretrained(save)
        written["adapter"] = save
    print_closing_table(console, result, written)
