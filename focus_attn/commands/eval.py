"""`focus eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from focus_attn.commands.options import Device, Dtype
from focus_attn.targets import check_results

if TYPE_CHECKING:
    from focus_attn.evaluation.requests import Requests


def evaluate(
    model: Annotated[str | None, typer.Option(help="Name, folder or gemma3-270m; else the embedded one.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="DIR", help="Or a shipped one's name; repeat it.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A .txt, .md, .jsonl, a folder of them, or hub:owner/name[:split].")
    ] = None,
    no_perplexity: Annotated[bool, typer.Option("--no-perplexity", help="Leave the text's own out.")] = False,
    length: Annotated[str, typer.Option(help="Tokens a block, as in 2048,8K.")] = "2048",
    stride: Annotated[int | None, typer.Option(help="Also windows that move by this.")] = None,
    blocks: Annotated[int, typer.Option(help="At most, spread over the text.")] = 16,
    window: Annotated[int | None, typer.Option(help="Predictions past it count.")] = None,
    tasks: Annotated[str | None, typer.Option(help="hellaswag,arc,piqa,lambada,... or all.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of task files; else the Hub.")] = None,
    limit: Annotated[int | None, typer.Option(help="Items a task, spread over it.")] = None,
    long: Annotated[str | None, typer.Option(help="Tokens of long forms, as in 4096.")] = None,
    forms: Annotated[str, typer.Option(help="short; shots, text: with --long.")] = "short,shots",
    retrieval: Annotated[str | None, typer.Option(help="needle,multi_key,... or all.")] = None,
    lengths: Annotated[str, typer.Option(help="Of retrieval.")] = "1K,2K,4K",
    depths: Annotated[str, typer.Option(help="Percent; near 100 the window shows it.")] = "0,20,40,60,80",
    per_cell: Annotated[int, typer.Option(help="Items a length and depth.")] = 20,
    seed: Annotated[int, typer.Option(help="Of retrieval and shots.")] = 0,
    write_requests: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what is asked; stop.")] = None,
    score_requests: Annotated[Path | None, typer.Option(metavar="FILE", help="Ask what it has; no lm-eval.")] = None,
    from_scores: Annotated[Path | None, typer.Option(metavar="DIR", help="Sum up; no model.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Of the scores, to go on with.")] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens at once.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every number.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw retrieval: .png, .svg.")] = None,
) -> None:
    """What a model loses by Focus, with intervals: perplexity, tasks in short and long form, retrieval.

    Base and adapters answer the same items; differences are paired, with 1,000-fold bootstrap intervals. The same
    command goes on after an interruption. docs/evaluation.md says how to read it.
    """
    from focus_attn.bench.options import read_device, read_dtype, read_numbers
    from focus_attn.bench.record import write_json
    from focus_attn.bench.terminal import make_console
    from focus_attn.evaluation.asked import FORMS, Asked, build
    from focus_attn.evaluation.heatmap import draw_heatmaps
    from focus_attn.evaluation.models import load_compared
    from focus_attn.evaluation.requests import Requests
    from focus_attn.evaluation.retrieval import KINDS
    from focus_attn.evaluation.run import score_all, sum_up
    from focus_attn.evaluation.tasks import read_task_names
    from focus_attn.evaluation.terminal import print_grids, print_positions, print_rows
    from focus_attn.pretrained import find_pretrained
    from focus_attn.report.terminal import StageBars

    check_results(json_file, plot)
    if write_requests is not None and write_requests.is_dir():
        raise ValueError(f"--write-requests names a file, but {str(write_requests)!r} is a folder")
    if output is not None and output.exists() and not output.is_dir():
        raise ValueError(f"--output is a folder, but {str(output)!r} is a file")
    counts = {"stride": stride, "blocks": blocks, "limit": limit, "per-cell": per_cell, "batch-tokens": batch_tokens}
    for option, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"--{option} must be at least 1, got {value}")
    if sum(option is not None for option in (write_requests, score_requests, from_scores)) > 1:
        raise ValueError("--write-requests, --score-requests and --from-scores are three steps: give one of them")
    if score_requests is not None and (text or tasks or retrieval or long or stride):
        raise ValueError("--score-requests asks what its file has: --text, --tasks and the like go to --write-requests")
    if from_scores is not None and (adapter or text or tasks or retrieval):
        raise ValueError("--from-scores sums up what is in its folder: leave adapters, texts and tasks out")
    console = make_console()
    order: list[str] = []
    if from_scores is None:
        compared = None
        if write_requests is None:
            place = read_device(device)
            compared = load_compared(model, adapter or [], read_dtype(dtype, place), place)
        if score_requests is not None:
            requests = Requests.load(score_requests)
        else:
            tokenizer = compared.tokenizer if compared else find_pretrained(model).tokenizer()
            asked = Asked(
                text=text,
                lengths=read_numbers("length", length) if not no_perplexity else (),
                stride=stride,
                blocks=blocks,
                window=_window(window, adapter or []),
                tasks=tuple(read_task_names(tasks)) if tasks else (),
                data=data,
                limit=limit,
                long=read_numbers("long", long) if long else (),
                forms=_read_names("forms", forms, FORMS),
                retrieval=_read_names("retrieval", retrieval, KINDS) if retrieval else (),
                retrieval_lengths=read_numbers("lengths", lengths),
                depths=_read_depths(depths),
                per_cell=per_cell,
                seed=seed,
            )
            with StageBars(console) as bars:
                requests = build(tokenizer, asked, bars)
        if write_requests is not None:
            requests.save(write_requests)
            console.print(f"{len(requests.items):,} items in {len(requests.tasks)} tasks: {write_requests}")
            return
        assert compared is not None
        order = compared.names
        from_scores = output or Path("runs") / f"eval-{_short_digest(requests, compared)}"
        with StageBars(console) as bars:
            score_all(compared, requests, from_scores, batch_tokens=batch_tokens, progress=bars)
        if len(compared.names) == 1:
            console.print("The base model alone: give --adapter to set Focus beside it.")
    result = sum_up(from_scores, order=order)
    print_rows(console, result.requests, result.rows, result.base)
    print_positions(console, result.positions, result.base)
    print_grids(console, result.cells, result.base)
    console.print(f"scores: {from_scores}", markup=False)
    if plot is not None and not result.cells:
        console.print("Nothing to plot: --plot draws retrieval, which was not asked for.")
    elif plot is not None:
        names = " and ".join(dict.fromkeys(str(run.get("model")) for run in result.runs.values()))
        draw_heatmaps(result.cells, f"Retrieval, {names}", plot)
    if json_file is not None:
        write_json(json_file, result.to_dict())


def _window(window: int | None, adapters: list[str]) -> int:
    """The widest of the adapters', so that what counts is past it for all."""
    from focus_attn.adapters import read_adapter
    from focus_attn.config import FocusConfig
    from focus_attn.zoo import find_adapter

    if window is not None:
        return window
    return max((read_adapter(find_adapter(one)).config.window for one in adapters), default=FocusConfig().window)


def _short_digest(requests: Requests, compared: Any) -> str:
    import hashlib

    facts = [requests.digest, *(compared.facts(name) for name in compared.names)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


def _read_names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = known if text == "all" else tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"--{option} must be among all, {', '.join(known)}; got {unknown[0]!r}")
    return chosen


def _read_depths(depths: str) -> tuple[float, ...]:
    try:
        chosen = tuple(float(part) / 100 for part in depths.split(","))
    except ValueError:
        raise ValueError(f"--depths takes percents with commas between, as in 0,50,100, got {depths!r}") from None
    if not all(0 <= depth <= 1 for depth in chosen):
        raise ValueError(f"--depths lie between 0 and 100, got {depths!r}")
    return chosen
