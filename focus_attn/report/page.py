"""The report as one HTML page that makes no request: its numbers, its style and its script are inside it."""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from focus_attn.evaluation.perplexity import LEAK_WARNING
from focus_attn.report.sample import RoutingSample, id_dtype

HERE = Path(__file__).parent
SCRIPTS = ("plots.js", "distant.js", "browser.js", "page.js")
DIGITS = 5  # significant ones, in the page; the JSON has them all


def render_page(report: dict[str, Any]) -> str:
    """report: what `describe` returned, with the `run` that measured it."""
    warning = f'<p class="warning">{escape(LEAK_WARNING)}</p>' if report["leaking"] else ""
    rows = {"adapter": report.get("adapter"), "dtype": report["dtype"], **report.get("run", {})}
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        model=escape(report["model"]),
        headline=escape(headline(report)),
        setting=escape(describe_setting(report)),
        warning=warning,
        run_rows="".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
            for name, value in rows.items()
            if value is not None
        ),
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        script="".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        data=_inside_script(_page_data(report)),
    )


def headline(report: dict[str, Any]) -> str:
    """The result on the first text in one sentence."""
    coverage = report["texts"][0]["coverage"]
    mass = coverage["mass"]
    return (
        f"On {report['texts'][0]['name']} Focus keeps {_percent(mass['distant_kept'])} of the distant attention with "
        f"{_percent(coverage['distant_pairs_kept'])} of the distant pairs. With as many for every query the best mask "
        f"keeps {_percent(mass['distant_best'])}, random groups keep {_percent(mass['distant_random'])}. Without the "
        f"few distant keys that act as sinks: {_percent(mass['content_kept_share'])}, best "
        f"{_percent(mass['content_best_share'])}, random {_percent(mass['content_random_share'])}."
        f"{_headline_routed(coverage)}"
    )


def routed_alone(coverage: dict[str, Any]) -> dict[str, Any] | None:
    """The figures without dense heads; None where there are none, or in an older report."""
    routed: dict[str, Any] | None = coverage.get("routed")
    return routed if routed and routed["routers"] < coverage["routers"] else None


def _headline_routed(coverage: dict[str, Any]) -> str:
    routed = routed_alone(coverage)
    if routed is None:
        return ""
    mass, dense = routed["mass"], coverage["routers"] - routed["routers"]
    return (
        f" {dense} of {coverage['routers']} KV heads are dense: they keep everything and are in these figures. The "
        f"{routed['routers']} routed ones alone keep {_percent(mass['distant_kept'])} with "
        f"{_percent(routed['distant_pairs_kept'])} of the distant pairs, best {_percent(mass['distant_best'])}, "
        f"random {_percent(mass['distant_random'])}; without the keys that act as sinks "
        f"{_percent(mass['content_kept_share'])}, best {_percent(mass['content_best_share'])}, "
        f"random {_percent(mass['content_random_share'])}."
    )


def describe_setting(report: dict[str, Any]) -> str:
    config = report["config"]
    dense = [f"layer {layer}" for layer in config["dense_layers"]]
    dense += [f"head {head} of layer {layer}" for layer, head in config.get("dense_heads", [])]
    also = f"dense: {', '.join(dense)}; " if dense else ""
    return (
        f"K = {config['num_groups']} groups, top {config['query_top_k']} as query, top {config['key_top_k']} as key, "
        f"window {config['window']}, {config['num_sinks']} sinks; {also}{report['router_parameters']:,} parameters in "
        f"the routers, {report['parameters']:,} frozen in {report['dtype']}."
    )


def _percent(share: float | None) -> str:
    return "nothing" if share is None else f"{100 * share:.1f} %"


def _page_data(report: dict[str, Any]) -> dict[str, Any]:
    texts = []
    for text in report["texts"]:
        coverage = _without_blocks(text["coverage"])
        if "routed" in coverage:
            coverage["routed"] = _without_blocks(coverage["routed"])
        sample = RoutingSample.from_dict(text["sample"])
        rest = {
            name: text[name]
            for name in (
                "name",
                "pairs",
                "short_layers",
                "short_on_content",
                "acting_sinks",
                "groups",
                "purity",
                "attended",
            )
        }
        texts.append({**coverage, **rest, "browse": _browser(sample, text["attended"]["tokens"])})
    names = ("model", "config", "tagger", "word_classes", "domains")
    commit = report.get("run", {}).get("commit")
    return _rounded({**{name: report[name] for name in names}, "commit": commit, "texts": texts})


def _without_blocks(kept: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kept.items() if name != "by_block"}


def _browser(sample: RoutingSample, size: int) -> dict[str, Any]:
    """The first tokens of the sample and their groups."""
    layers = {
        layer_idx: {
            side: base64.b64encode(ids[:, :size].astype(id_dtype(sample.num_groups)).tobytes()).decode("ascii")
            for side, ids in (("query", layer.query), ("key", layer.key))
        }
        for layer_idx, layer in sample.layers.items()
    }
    return {"pieces": sample.pieces[:size], "layers": layers}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def _inside_script(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
