"""`focus generate`."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from focus_attn.commands.options import Model


def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue, or what to ask an instruct model.")],
    adapter: Annotated[
        str | None, typer.Option(help="A saved adapter's folder, or a shipped adapter's name. Without: no Focus.")
    ] = None,
    model: Model = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="When to stop at the latest.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template, if it has one.")] = True,
) -> None:
    """Answer a prompt (--no-chat: continue it), printed as it is made."""
    from focus_attn.generation import stream

    if not prompt.strip():
        raise ValueError("the prompt is empty: say what to continue")
    with warnings.catch_warnings():
        # A prompt shorter than the window is nothing to hint at on the command line.
        warnings.simplefilter("ignore", UserWarning)
        stream(prompt, adapter, model, max_new_tokens, temperature, seed, chat)
