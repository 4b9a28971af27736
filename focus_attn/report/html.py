"""A demo's result as one HTML page, without a single request to anywhere."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from focus_attn.bench import Timing, describe_crossover
from focus_attn.evaluation import Perplexity
from focus_attn.evaluation.perplexity import LEAK_WARNING
from focus_attn.report.plots import coverage_plot, perplexity_plot, timing_plot

if TYPE_CHECKING:
    from focus_attn.demo import DemoResult

TEMPLATE = Path(__file__).with_name("report.html")


def write_report(result: DemoResult, path: str | Path) -> Path:
    path = Path(path)
    path.write_text(render_report(result), encoding="utf-8")
    return path


def render_report(result: DemoResult) -> str:
    from focus_attn.demo import FOCUS, FULL

    full, focus = result.perplexity[FULL], result.perplexity[FOCUS]
    config = result.config
    fit = result.fit
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        model=escape(result.model),
        headline=escape(headline(result)),
        parameters=f"{result.parameters:,}",
        router_parameters=f"{result.router_parameters:,}",
        router_share=f"{result.router_parameters / result.parameters:.2%}",
        dtype=escape(result.dtype),
        setting=escape(
            f"K = {config.num_groups} groups, top {config.query_top_k} as query, top {config.key_top_k} as key, "
            f"window {config.window}, {config.num_sinks} sinks"
        ),
        text=escape(result.text),
        blocks=f"{focus.blocks} blocks of {focus.length:,} tokens, {focus.tokens:,} predictions past the window",
        gap=escape(describe_gap(result)),
        warning=f'<p class="warning">{escape(LEAK_WARNING)}</p>' if focus.leaking else "",
        perplexity_plot=perplexity_plot(result.perplexity, FOCUS),
        perplexity_rows="".join(_perplexity_row(name, one, full) for name, one in result.perplexity.items()),
        attention_plot=timing_plot(result.attention, "one layer's attention"),
        prefill_plot=timing_plot(result.prefill, "prefill of the whole model"),
        attention_shape=escape(result.attention_shape),
        attention_rows="".join(map(_timing_row, result.attention)),
        prefill_rows="".join(map(_timing_row, result.prefill)),
        attention_crossover=escape(describe_crossover(result.attention)),
        prefill_crossover=escape(describe_crossover(result.prefill)),
        fit=escape(
            f"{fit.steps} steps a layer on {fit.blocks} blocks of {fit.length:,} tokens in {fit.seconds:.0f} s. "
            f"Attention kept past the window: {fit.covered:.1%}, by window and sinks alone {fit.covered_nearby:.1%}."
        ),
        coverage_plot=coverage_plot(fit.layers),
        groups_of=f"Layer {result.groups.layer_idx}, router {result.groups.router}",
        group_rows="".join(
            f"<tr><td>{group.group_id}</td><td class=n>{group.key_share:.0%}</td><td>{_tokens(group.key_tokens)}</td>"
            f"<td class=n>{group.query_share:.0%}</td><td>{_tokens(group.query_tokens)}</td></tr>"
            for group in result.groups.groups
        ),
        stage_rows="".join(
            f"<tr><td>{escape(name)}</td><td class=n>{seconds:.1f} s</td></tr>"
            for name, seconds in [*result.stage_seconds.items(), ("in all", result.seconds)]
        ),
        machine_rows="".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
            for name, value in result.machine.items()
            if value is not None
        ),
    )


def headline(result: DemoResult) -> str:
    """The result in one sentence."""
    from focus_attn.demo import FOCUS, FULL

    full, focus = result.perplexity[FULL], result.perplexity[FOCUS]
    kept = "" if focus.pairs_kept is None else f" at {focus.pairs_kept:.0%} of the token pairs"
    return f"Perplexity {focus.ppl:.2f} with Focus{kept}, {full.ppl:.2f} with full attention."


def describe_gap(result: DemoResult) -> str:
    closed = result.gap_closed
    if closed is None:
        return "Random groups of the same sizes cost no perplexity here, so there was no gap to close."
    if closed < 0:
        return "The fit did worse than random groups of the same sizes."
    return f"The fit closes {closed:.0%} of the gap between random groups of the same sizes and full attention."


def _perplexity_row(name: str, one: Perplexity, full: Perplexity) -> str:
    kept = "100%" if one.pairs_kept is None else f"{one.pairs_kept:.1%}"
    return (
        f"<tr><td>{escape(name)}</td><td class=n>{one.ppl:.2f}</td><td class=n>{one.ppl_last_half:.2f}</td>"
        f"<td class=n>{one.ppl / full.ppl - 1:+.1%}</td><td class=n>{kept}</td></tr>"
    )


def _timing_row(timing: Timing) -> str:
    verdict = "faster" if timing.speedup > 1 else "slower"
    return (
        f"<tr><td class=n>{timing.length:,}</td><td class=n>{1000 * timing.dense_seconds:,.1f}</td>"
        f"<td class=n>{1000 * timing.focus_seconds:,.1f}</td>"
        f"<td class='n {verdict}'>{timing.speedup:.2f}x, {verdict}</td></tr>"
    )


def _tokens(tokens: list[str]) -> str:
    shown = (token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") for token in tokens)
    return " ".join(f"<code>{escape(token)}</code>" for token in shown) or "none stand out"
