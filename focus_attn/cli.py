"""The command line: `focus`, a command for each thing it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from focus_attn.commands.average import average
from focus_attn.commands.bench import attention, prefill
from focus_attn.commands.compare import compare
from focus_attn.commands.demo import demo
from focus_attn.commands.eval import evaluate
from focus_attn.commands.generate import generate
from focus_attn.commands.report import report
from focus_attn.commands.train import train
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


bench = typer.Typer(
    help="Speed on this machine: attention alone, or a whole model's prefill.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for group, name, command in (
    (app, "demo", demo),
    (app, "generate", generate),
    (app, "average", average),
    (bench, "attention", attention),
    (bench, "prefill", prefill),
    (app, "train", train),
    (app, "compare", compare),
    (app, "report", report),
    (app, "eval", evaluate),
):
    group.command(name)(plain_errors()(command))
app.add_typer(bench, name="bench")


if __name__ == "__main__":
    app()
