"""`focus bench attention` and `focus bench prefill`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from focus_attn.commands.options import Device, Dtype, JsonFile, Model
from focus_attn.targets import check_results

PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw it: .png or .svg.")]
Lengths = Annotated[str | None, typer.Option(help="As in 4096,8K,1M.")]
Seconds = Annotated[float | None, typer.Option(help="60, on a GPU 300: no length that ends later.")]
Repeats = Annotated[int | None, typer.Option(help="Timed runs; fewer of slow ones.")]


def attention(
    lengths: Lengths = None,
    groups: Annotated[str, typer.Option(help="K, as in 8,32,64.")] = "8",
    query_k: Annotated[int, typer.Option(help="Groups a query looks into.")] = 1,
    key_k: Annotated[int, typer.Option(help="Groups a key belongs to.")] = 1,
    heads: Annotated[int | None, typer.Option(help="32 on a GPU, 9 on a CPU.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="8 and 3; with --heads, as many.")] = None,
    width: Annotated[int | None, typer.Option(help="128 on a GPU, 64 on a CPU.")] = None,
    dtype: Dtype = "auto",
    window: Annotated[int, typer.Option(help="Always seen.")] = 128,
    sinks: Annotated[int, typer.Option(help="First tokens, seen by all.")] = 4,
    routers: Annotated[str, typer.Option(help="layer, kv_head or auto.")] = "auto",
    shared: Annotated[bool, typer.Option("--shared/--asymmetric", help="One id for both sides.")] = False,
    skew: Annotated[str, typer.Option(help="uniform, largest:0.4, file.json.")] = "uniform",
    passes: Annotated[str, typer.Option("--pass", help="forward, forward+backward or both.")] = "forward",
    backend: Annotated[str, typer.Option(help="auto, stock, triton, reference.")] = "auto",
    peers: Annotated[str | None, typer.Option(help="cudnn, flash, efficient, fa2, fa3, fa4, flex.")] = None,
    repeats: Repeats = None,
    seconds: Seconds = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Of inputs and ids.")] = 0,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what auto takes, and why.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Take one call apart (CUDA).")] = False,
) -> None:
    """One layer's attention: Focus against every dense attention that is here.

    Ids are drawn anew before every timed call; sorting and planning are inside the timing. A setting that fails its
    parity check gets no speed-up, and the exit code is 1. docs/benchmarks.md says how to read it.
    """
    import torch

    from focus_attn.bench.attention import Sweep
    from focus_attn.bench.explain import explain_choices
    from focus_attn.bench.options import read_options
    from focus_attn.bench.record import write_json
    from focus_attn.bench.terminal import describe, make_console, one_line, print_attention, print_choices, print_trace
    from focus_attn.bench.trace import trace_call

    options = read_options(
        lengths=lengths,
        groups=groups,
        query_k=query_k,
        key_k=key_k,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        dtype=dtype,
        window=window,
        sinks=sinks,
        routers=routers,
        shared=shared,
        skew=skew,
        passes=passes,
        backend=backend,
        peers=peers,
        repeats=repeats,
        seconds=seconds,
        device=device,
        seed=seed,
    )
    check_results(json_file, plot)
    console, title = make_console(), describe(options)
    results: dict[str, Any] = {"setting": options.to_dict(), "rows": []}
    if explain:
        choices = explain_choices(options)
        print_choices(console, choices)
        if json_file is not None:
            write_json(json_file, results | {"explain": choices})
        return
    if trace:
        generator = torch.Generator(options.shape.device).manual_seed(seed)
        taken_apart = trace_call(options.settings[0], options.lengths[0], options.passes[0], generator)
        print_trace(console, taken_apart)
        results["trace"] = taken_apart.to_dict()
    sweep, rows = Sweep(options), []
    for row in sweep.rows():
        rows.append(row)
        console.print(one_line(row), markup=False)
        results["rows"].append(row.to_dict())
        if json_file is not None:  # after every row: what is measured is not lost if the rest is cut short
            write_json(json_file, results | {"stopped": sweep.stopped})
    if json_file is not None:
        write_json(json_file, results | {"stopped": sweep.stopped})
    print_attention(console, rows, title, sweep.stopped)
    if plot is not None:
        from focus_attn.report.bench_plots import plot_attention

        plot_attention(rows, title, plot)
    if not all(row.parity for row in rows):
        raise typer.Exit(1)


def prefill(
    model: Model = None,
    adapter: Annotated[
        str | None, typer.Option(help="A saved adapter's folder, or a shipped adapter's name. Without: random routers.")
    ] = None,
    lengths: Lengths = None,
    dtype: Dtype = "auto",
    repeats: Repeats = None,
    seconds: Seconds = None,
    device: Device = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """A whole model's prefill: Focus against the model's own attention, router time on its own."""
    from focus_attn.bench.options import DEFAULT_SECONDS, read_device, read_dtype, read_numbers
    from focus_attn.bench.prefill import prefill_rows
    from focus_attn.bench.prefill_model import DEFAULT_LENGTHS, load_for_prefill
    from focus_attn.bench.record import write_json
    from focus_attn.bench.terminal import make_console, print_prefill

    place = read_device(device)
    wanted = sorted(read_numbers("lengths", lengths)) if lengths else DEFAULT_LENGTHS[place.type]
    check_results(json_file, plot)
    loaded = load_for_prefill(model, adapter, read_dtype(dtype, place), place, max(wanted))
    console, rows = make_console(), []
    console.print(loaded.title, markup=False)
    results: dict[str, Any] = {
        "setting": loaded.title,
        "adapter_digest": loaded.adapter_digest,
        "config": loaded.model.focus_config.to_dict(),
        "rows": [],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a length below the window is what is being measured
        timed = prefill_rows(
            loaded.model, loaded.token_ids, wanted, repeats or 3, seconds or DEFAULT_SECONDS[place.type]
        )
        for row in timed:
            rows.append(row)
            console.print(f"{row.length:>9,} tokens: {row.timing.speedup:.2f}x")
            results["rows"].append(row.to_dict())
            if json_file is not None:
                write_json(json_file, results)
    print_prefill(console, rows)
    if len(rows) < len(wanted):
        console.print(f"stopped before {wanted[len(rows)]:,} tokens, beyond the time given; --seconds gives more")
    if plot is not None:
        from focus_attn.report.bench_plots import plot_prefill

        plot_prefill(rows, loaded.title, plot)
