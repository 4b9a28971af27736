"""Options that several commands have, each with one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None, typer.Option(help="A Hugging Face model's name or folder, or gemma3-270m. By default the embedded one.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")]
Dtype = Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every number to this file.")]
