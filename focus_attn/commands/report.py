"""`focus report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from focus_attn.commands.options import Device, JsonFile, Model
from focus_attn.targets import check_targets


def report(
    adapter: Annotated[
        str | None, typer.Option(help="A saved adapter's folder, or a shipped adapter's name.", show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text that the routers were not fitted to: .txt, .md, .jsonl, a folder or hub:...; twice to compare "
            "two kinds of text. Without: the part of Python's documentation that the demo holds out.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
    json_file: JsonFile = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Make the page from such a file; nothing is measured.")
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens a block.")] = 2048,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of each text.")] = 8,
    queries: Annotated[int, typer.Option(min=0, help="Queries of each block to look at; 0: all of them.")] = 128,
    sample: Annotated[int, typer.Option(min=1, help="Tokens of each text whose groups are described.")] = 8192,
    browse: Annotated[int, typer.Option(min=1, help="Tokens of each text to click on.")] = 2048,
    device: Device = None,
) -> None:
    """Show what an adapter keeps of a model's attention and what its groups hold, on one page that opens offline.

    Word classes need the extra `report`. A machine without it can measure with --json; --from then makes the page
    elsewhere. docs/report.md says what the figures mean.
    """
    from rich.console import Console

    from focus_attn.bench.record import describe_run, write_json
    from focus_attn.report.measure import Sizes, describe
    from focus_attn.report.page import render_page
    from focus_attn.report.summary import print_report

    check_targets(out, json_file)
    console = Console()
    if source is not None:
        if adapter or text or model:
            raise ValueError("--from takes everything from its file: leave out --adapter, --text and --model")
        found = _read(source)
    elif adapter is None:
        raise ValueError("give --adapter FOLDER, as `focus train` or `save_pretrained` wrote it, or --from FILE.json")
    else:
        sizes = Sizes(length, blocks, queries or None, sample, browse)
        found = {"run": describe_run(), **_measure(console, adapter, text or [], model, sizes, device)}
    described = describe(found)
    written = {"page": out}
    if json_file is not None:
        write_json(json_file, described)
        written["numbers"] = json_file
    out.write_text(render_page(described), encoding="utf-8")
    print_report(console, described, written)


def _read(source: Path) -> dict[str, Any]:
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(source)!r} cannot be read as a report's JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{str(source)!r} holds no report: give a file that `focus report --json FILE` wrote")
    return found


def _measure(
    console: Any, adapter: str, texts: list[Path], model_name: str | None, sizes: Any, device: str | None
) -> dict[str, Any]:
    from focus_attn.adapters import adapter_digest
    from focus_attn.bench.options import read_device, read_dtype
    from focus_attn.pretrained import DEFAULT, load_with_adapter
    from focus_attn.report.measure import measure
    from focus_attn.report.terminal import StageBars
    from focus_attn.text import default_text
    from focus_attn.training.documents import documents_to_measure
    from focus_attn.zoo import find_adapter

    place, folder = read_device(device), find_adapter(adapter)
    documents = [(path.name, documents_to_measure(path)) for path in texts]
    if not documents:
        default = default_text()
        documents = [(default.name, default.held_out)]
    dtype = read_dtype("auto", place) if model_name in (None, DEFAULT) else None
    model, tokenizer = load_with_adapter(model_name, folder, dtype)
    model.to(place)
    with StageBars(console) as bars:
        measured = measure(model, tokenizer, documents, sizes, bars)
    named = {"adapter": Path(adapter).name, "adapter_digest": adapter_digest(folder)}
    return {**named, "device": str(place), **measured}
