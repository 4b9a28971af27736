"""The command line: `focus`, a command for each thing it does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from focus_attn.bench import command as bench_command
from focus_attn.compare import command as compare_command
from focus_attn.evaluation import command as evaluation_command
from focus_attn.report import command as report_command
from focus_attn.targets import check_targets
from focus_attn.training import command as training_command
from focus_attn.version import __version__

app = typer.Typer(
    help="Focus: sparse attention for pretrained causal LMs, by learning which token pairs matter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What a user can cause and mend; anything else is a bug, whose traceback we want to see.
USER_ERRORS = (ValueError, TypeError, ImportError, OSError)


@contextmanager
def plain_errors() -> Iterator[None]:
    """A user's mistake becomes one sentence and exit code 1."""
    try:
        yield
    except USER_ERRORS as error:
        Console(stderr=True).print(f"focus: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"focus-attn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
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
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number to this file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the fit.")] = None,
    fast: Annotated[bool, typer.Option(help="A tiny random model and a few steps: a trial of the program.")] = False,
) -> None:
    """Measure the shipped adapter, fit another, and see what each costs and saves, on this machine.

    Takes about five minutes on two cores with units for matrices, a quarter of an hour on two without. The first run
    converts the model (SmolLM2-135M-Instruct) into the cache folder, which the environment variable FOCUS_CACHE can
    move.
    """
    with plain_errors():
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


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue, or what to ask an instruct model.")],
    adapter: Annotated[
        str | None, typer.Option(help="A saved adapter's folder, or a shipped adapter's name. Without: no Focus.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face model's name or folder. By default the embedded one.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="When to stop at the latest.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template, if it has one.")] = True,
) -> None:
    """Answer a prompt (--no-chat: continue it), printed as it is made."""
    with plain_errors():
        from focus_attn.generation import stream

        if not prompt.strip():
            raise ValueError("the prompt is empty: say what to continue")
        with warnings.catch_warnings():
            # A prompt shorter than the window is nothing to hint at on the command line.
            warnings.simplefilter("ignore", UserWarning)
            stream(prompt, adapter, model, max_new_tokens, temperature, seed, chat)


@app.command()
def average(
    adapters: Annotated[list[str], typer.Argument(help="Two or more: folders, or shipped ones' names.")],
    output: Annotated[Path, typer.Option(help="Folder for their mean.")],
    weights: Annotated[str | None, typer.Option(help="How much each counts, as in 2,1. Without: alike.")] = None,
) -> None:
    """The mean of adapters that one start led to: often better than each of them, at the cost of one.

    For example an adapter and what came of training it further, or two recipes with the same `focus`, seed, text and
    `start`.
    """
    with plain_errors():
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


bench = typer.Typer(
    help="Speed on this machine: attention alone, or a whole model's prefill.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
bench.command("attention")(plain_errors()(bench_command.attention))
bench.command("prefill")(plain_errors()(bench_command.prefill))

app.command("train")(plain_errors()(training_command.train))
app.command("compare")(plain_errors()(compare_command.compare))
app.command("report")(plain_errors()(report_command.report))
app.command("eval")(plain_errors()(evaluation_command.evaluate))


if __name__ == "__main__":
    app()
