"""docs/reproduction.md and its plots from results/: the published figures, ours, and what explains a difference.

python -m focus_attn.compare.reproduction
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from focus_attn.compare.cost import ASSUMPTIONS, estimate
from focus_attn.compare.models import describe_model
from focus_attn.compare.plot import draw
from focus_attn.compare.recipe import BASE as FULL_ATTENTION
from focus_attn.compare.recipe import FOLDERS, Comparison, find_recipe, recipe_names
from focus_attn.compare.store import latest
from focus_attn.compare.table import BLOCKS, Place, Row, blocks_of, make_rows, place_of, places, verdicts
from focus_attn.compare.tasks import task_cell, task_heading
from focus_attn.evaluation.summary import BASE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reproduction.md"
RESULTS = ROOT / "results"
FIRST = ("peers", *(f"table{number}" for number in range(1, 11)))  # then the others by name
NOT_RUN = "not run"
WIDTH = 120

Cell = dict[str, Any]

HEAD = """# Reproduction

Every table and figure of the paper ([arXiv 2604.03260](https://arxiv.org/abs/2604.03260)) as a recipe in
`recipes/compare`, with what came of it. This page is made from `results/compare/NAME.json`, which
`focus compare NAME --json` writes, by `python -m focus_attn.compare.reproduction`: do not edit it. The paper's models
are larger or older than those measured here (SmolLM2-135M-Instruct, Gemma-3-270M), so that perplexities are not to be
compared across the columns, only what a method does to its own base model.

- Perplexities count predictions past the first window, on text that nothing was trained on, in non-overlapping blocks.
- "over full" is the ratio to the same model with full attention, with a 95 % interval by 1,000 paired resamples of the
  documents, each with all its blocks (WikiText is one document, and rows that were measured early do not say to which
  page of Python's documentation their blocks belong: of the blocks alone there, which makes narrower intervals). Where
  rows were trained with several seeds, their losses are averaged block by block (a perplexity is then the seeds'
  geometric mean), and their range stands beside it; where the recipe asks for more seeds than were trained, a line
  under the table says so. An interval is of the text alone, for the mean of the seeds that were run: a single seed, one
  of these or another, may lie outside it.
- Seeds of a row were partly trained on different days, with the program as it was then. What differs between them is
  the seed, the order of the text, and whatever the program and the GPU's rounding add: it is the spread of a training
  run anew, not of the seed alone.
- Multiply-adds are a share of full causal attention, selection and routers included. Times are of one layer's attention
  as implemented here, called eagerly: most peers are plain PyTorch under a mask, so multiply-adds are fairer to them.
  Where a table's rows were timed on several days, their times differ by the machine and the kernels of the day too,
  and by the layers that were timed (four of them up to 2026-11-17, eight since): sentences on time set rows of one day
  side by side, and a row has the times of its newest day.
- "Largest group" is the share of the keys in it, mean over routers. Queries may crowd more than keys do.
- `focus compare NAME --quick` tries any of them in about a minute on a CPU, with a tiny random model.
"""


def make_page(results: Path = RESULTS) -> str:
    measured = read_results(results)
    names = [*FIRST, *(name for name in recipe_names() if name not in FIRST)]
    parts = [HEAD]
    for name in names:
        comparison = Comparison.from_yaml(find_recipe(name))
        parts.append("\n".join(section(name, comparison, measured.get(comparison.name, {}), results)))
    parts.append(f"## Assumptions\n\n{textwrap.fill(ASSUMPTIONS, WIDTH)}\n")
    return "\n".join(parts)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """What `focus compare --json` wrote, by the comparison's name; several files of one are put together."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted((folder / "compare").glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        name = content["comparison"]["name"]
        if content["comparison"]["note"]:  # a trial
            continue
        into = found.setdefault(name, {"files": [], "cells": [], "tasks": []})
        into["files"].append(file)
        into["cells"] = latest([*into["cells"], *content["cells"]])
        if content["tasks"]:  # of one model
            into["tasks"].append((describe_model(content["comparison"]["models"][0]), content["tasks"]))
    return found


def section(name: str, comparison: Comparison, found: Mapping[str, Any], results: Path) -> Iterator[str]:
    if comparison.bench is not None and not found:
        found = benched(results)
    cells: list[Cell] = found.get("cells", [])
    rows = make_rows(cells)
    speeds = speedups(cells)
    yield f"## {comparison.title}\n"
    yield f"`focus compare {name}`{_made_by(found, results)}\n"
    if comparison.published:
        yield from published_table(comparison, rows, found, speeds)
    if comparison.explains:
        yield textwrap.fill(f"What explains a difference: {comparison.explains}", WIDTH) + "\n"
    if not cells:
        yield f"Ours: {NOT_RUN}.\n"
    for place in places(rows):
        yield from place_table(comparison, rows, place)
    for plot in _plots_of(name, results):
        yield f"![{comparison.title}](../results/compare/{plot.name})\n"
    for model, tasks in found.get("tasks", []):
        yield from task_table(comparison, model, tasks)
    if comparison.tasks and not found.get("tasks"):
        yield f"Benchmarks (`--requests`): {NOT_RUN}.\n"
    if comparison.not_run:
        yield from not_run_table(name, comparison)


def _plots_of(name: str, results: Path) -> list[Path]:
    found = (results / "compare").glob(f"{name}*.png")
    return sorted(
        (file for file in found if file.stem == name or file.stem.startswith(f"{name}-")), key=lambda f: f.stem
    )


def published_table(
    comparison: Comparison, rows: Sequence[Row], found: Mapping[str, Any], speeds: Mapping[str, str]
) -> Iterator[str]:
    models = list(dict.fromkeys(row.place.model for row in rows)) or ["ours"]
    yield _line("", "published", *models)
    yield _line("---", *["---"] * (1 + len(models)))
    for entry in comparison.published:
        if "row" not in entry:
            ours = [str(entry.get("ours", NOT_RUN))] * len(models)
        elif speeds:
            ours = [speeds.get(entry["row"], NOT_RUN)]
        else:
            ours = [our_figure(entry, comparison, model, rows, found) for model in models]
        yield _line(entry["what"], str(entry["figure"]), *ours)
    yield ""


def our_figure(
    entry: Mapping[str, Any], comparison: Comparison, model: str, rows: Sequence[Row], found: Mapping[str, Any]
) -> str:
    """What stands beside a published figure."""
    if "task" in entry:
        return _our_score(entry, dict(found.get("tasks", [])).get(model, []))
    cells: Sequence[Cell] = found.get("cells", [])
    data = entry.get("data", next(iter(comparison.data)))
    here = [row for row in rows if row.name == entry["row"] and row.place.model == model and row.place.data == data]
    if not here or here[0].ppl is None:
        return here[0].failed or NOT_RUN if here else NOT_RUN
    shows = entry.get("shows", "ppl")
    if shows == "dominance":
        mine = [cell for cell in cells if cell["row"] == entry["row"] and place_of(cell) == here[0].place]
        return _largest_group([cell["figures"]["dominance"] for cell in mine if "figures" in cell])
    if shows != "ppl":
        return _groups([cell["groups"] for cell in cells if cell["row"] == entry["row"] and "groups" in cell], shows)
    if entry.get("over") == "lengths":
        by_length = sorted(here, key=lambda row: row.place.length)
        return " / ".join(f"{row.ppl:.2f}{_range(row) and f' ({_range(row)})'}" for row in by_length)
    return f"{_ppl(here[0])}{_over(here[0])}"


def _our_score(entry: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]]) -> str:
    """Of the benchmark in its short form, which is the paper's."""
    name = BASE if entry["row"] == FULL_ATTENTION else entry["row"]
    metric = entry.get("metric", "acc")
    for task in tasks:
        if (task["task"], task["metric"]) == (entry["task"], metric) and name in task["models"]:
            return _in_percent(task, name, metric)
    return NOT_RUN


def _in_percent(task: Mapping[str, Any], name: str, metric: str) -> str:
    """As papers give accuracies."""
    against, score = task["against_base"].get(name), f"{task['models'][name]['estimate']:.1%} ({metric})"
    if against is None:
        return score
    difference, low, high = (f"{100 * against[part]:+z.1f}" for part in ("estimate", "low", "high"))
    return f"{score}, {difference} [{low}, {high}] to base"


def place_table(comparison: Comparison, rows: Sequence[Row], place: Place) -> Iterator[str]:
    yield f"{place.model}, {place.data}, blocks of {place.length:,} tokens:\n"
    yield _line(
        "method", "perplexity", "over full [95 %]", "pairs", "multiply-adds", "ms a layer", "largest group", "trained"
    )
    yield _line("---", *["--:"] * 7)
    for kind, block in blocks_of(rows, place, comparison.stepwise).items():
        yield _line(f"*{BLOCKS[kind]}*", *[""] * 7)
        for row in block:
            yield _line(*_cells(row))
    yield ""
    yield from _still_missing(comparison, [row for row in rows if row.place == place])
    for sentence in verdicts(rows, place):
        yield f"- {sentence}"
    for row in rows:
        if row.place == place and row.failed:
            yield f"- {row.name}: {row.failed}"
    yield ""


def _still_missing(comparison: Comparison, here: Sequence[Row]) -> Iterator[str]:
    """What the recipe asks for and nobody has measured: whole rows, and seeds of those that are trained."""
    measured = {row.name: row.seeds for row in here}
    failed = {row.name for row in here if row.failed}
    wanted = {method.name: len(comparison.seeds_of(method)) for method in comparison.methods}
    if rows := [name for name in wanted if name not in measured]:
        yield f"- {NOT_RUN[0].upper()}{NOT_RUN[1:]}: {'; '.join(rows)}."
    yield from _fewer_seeds(comparison, {name: seeds for name, seeds in measured.items() if name not in failed})


def _fewer_seeds(comparison: Comparison, measured: Mapping[str, int]) -> Iterator[str]:
    wanted = {method.name: len(comparison.seeds_of(method)) for method in comparison.methods}
    fewer: dict[str, list[str]] = {}
    for name, seeds in measured.items():
        if seeds < wanted.get(name, 0):
            fewer.setdefault(f"{seeds} of {wanted[name]} seeds", []).append(name)
    trained = {name for name, seeds in wanted.items() if seeds > 1 and name in measured}
    for how_many, names in fewer.items():
        yield f"- {how_many}: {'every row that is trained' if set(names) == trained else '; '.join(names)}."
    if len(comparison.seeds) == 1 and any(method.is_trained for method in comparison.methods):
        yield "- One seed of each row that is trained."


def task_table(comparison: Comparison, model: str, tasks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = list(tasks[0]["models"])
    yield (
        f"{model}, benchmarks, and the difference to the base model [95 %] (of perplexities the ratio, with an x). "
        "Rows of several seeds say so: an item's score is the mean over them.\n"
    )
    yield _line("task", "n", *(task_heading(tasks[0], name) for name in names))
    yield _line("---", *["--:"] * (1 + len(names)))
    for task in tasks:
        floor = " (base at chance: not counted)" if task["at_floor"] else ""
        yield _line(
            f"{task['task']}, {task['metric']}{floor}", f"{task['n']:,}", *(task_cell(task, name) for name in names)
        )
    yield ""
    if missing := list(_fewer_seeds(comparison, {name: tasks[0].get("seeds", {}).get(name, 1) for name in names})):
        yield "\n".join(missing) + "\n"


def not_run_table(name: str, comparison: Comparison) -> Iterator[str]:
    yield "Not run here:\n"
    yield _line("model", "command", "estimated cost")
    yield _line("---", "---", "---")
    for entry in comparison.not_run:
        yield _line(entry["model"], _command(name, entry, comparison), _cost(entry, comparison))
    yield ""


def _command(name: str, entry: Mapping[str, Any], comparison: Comparison) -> str:
    """options: of the comparison, such as `--longest` for a model with few positions."""
    model, options = entry["model"], f" {entry['options']}" if "options" in entry else ""
    if "command" in entry:
        return f"`{entry['command']}`"
    run = f"focus compare {name} --model {model} --device cuda{options}"
    if not comparison.tasks:
        return f"`{run}`"
    ask = f"focus eval --model {model} --no-perplexity {comparison.asks} --write-requests items.jsonl"
    return f"`{ask}`, then `{run} --requests items.jsonl`"


def _cost(entry: Mapping[str, Any], comparison: Comparison) -> str:
    """In words where it is not this comparison that would be run, else by what its rows train and measure."""
    if "cost" in entry:
        return str(entry["cost"])
    asked = Comparison.from_yaml(find_recipe(entry["like"])) if "like" in entry else comparison
    return str(estimate(asked, float(entry["parameters"]), float(entry["tokens"]) if "tokens" in entry else None))


def benched(results: Path) -> dict[str, Any]:
    """What `focus bench attention` has of the published setting, as cells of a table of speed."""
    files = sorted(results.glob("attention_*/published*.json"))
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    cells = [{"run": run["run"], "bench": row} for run in runs for row in run["rows"]]
    return {"files": files, "cells": cells} if cells else {}


def speedups(cells: Sequence[Cell]) -> dict[str, str]:
    """ "K = 8" -> speed-ups by length, of a table of speed."""
    rows = [cell["bench"] for cell in cells if "bench" in cell]
    by_groups: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        if row["speedup"] is not None:
            by_groups.setdefault(f"K = {row['K']}", []).append(f"{_speedup(row)} at {_count(row['length'])}")
    return {name: ", ".join(speeds) for name, speeds in by_groups.items()}


def _speedup(row: Mapping[str, Any]) -> str:
    dense = row["peers"][row["baseline"]]
    low, high = row["speedup_spread"]
    spread = f"{low:.2f} to {high:.2f}" if dense["repeats"] > 1 else "one dense call"
    return f"{dense['ms'] / row['focus']['ms']:.2f}x ({spread})"  # `speedup` is rounded already


def _made_by(found: Mapping[str, Any], results: Path) -> str:
    if not found:
        return ""
    runs = [run for cell in found["cells"] for run in (cell["run"], cell.get("timed")) if run]
    days: dict[str, dict[str, None]] = {}
    for run in sorted(runs, key=lambda run: run["date"]):
        days.setdefault(run["date"], {})[run["commit"] or "unknown"] = None
    made = "; ".join(f"{day}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}" for day, commits in days.items())
    files = ", ".join(f"[{file.name}](../results/{file.relative_to(results).as_posix()})" for file in found["files"])
    return f" ({runs[0]['gpu'] or runs[0]['cpu']}, torch {runs[0]['torch']}, {made}: {files})"


def _cells(row: Row) -> list[str]:
    name = f"{row.name}{' (looks ahead)' if row.leaking else ''}"
    name = f"**{name}**" if row.is_focus else name
    if row.ppl is None:
        return [name, "not possible", *[""] * 6]
    over = "" if row.over_base is None else _over(row).strip(" ,")
    return [
        name,
        _ppl(row),
        over,
        _share(row.pairs_kept),
        _share(row.multiply_adds),
        "" if row.ms is None else f"{row.ms:.3g} ({row.speedup:.2f}x)",
        _share(row.dominance),
        _trained(row),
    ]


def _trained(row: Row) -> str:
    if not row.trained_parameters:
        return ""
    on = "" if row.trained_tokens is None else f" on {row.trained_tokens / 1e6:.2g} M tokens"
    return f"{row.trained_parameters:,}{on}"


def _ppl(row: Row) -> str:
    about = ", ".join(part for part in (_range(row), f"{row.seeds} seeds") if part)
    return f"{row.ppl:.2f} ({about})" if row.seeds > 1 else f"{row.ppl:.2f}"


def _range(row: Row) -> str:
    """Of the seeds, where it can be seen."""
    lowest, highest = f"{row.lowest:.2f}", f"{row.highest:.2f}"
    return f"{lowest} to {highest}" if lowest != highest else ""


def _over(row: Row) -> str:
    if row.over_base is None:
        return ""
    over = row.over_base
    return f", {over.estimate - 1:+.1%} [{over.low - 1:+.1%}, {over.high - 1:+.1%}]"


def _largest_group(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    if not known:
        return "-"
    spread = f" ({min(known):.1%} to {max(known):.1%}, {len(known)} seeds)" if len(known) > 1 else ""
    return f"largest group {sum(known) / len(known):.1%}{spread}"


def _groups(seeds: Sequence[Mapping[str, Any]], shows: str) -> str:
    """Of all seeds together, or where that would be too much to read of the first."""
    if shows == "confidence":
        each = [described["confidence"] for described in seeds]
        spread = f" ({min(each):.2f} to {max(each):.2f}, {len(each)} seeds)" if len(each) > 1 else ""
        return f"{sum(each) / len(each):.2f}{spread}"
    groups = seeds[0]["groups"]
    if shows == "sizes":
        shares = [group["key_share"] for group in groups]
        return f"{min(shares):.0%} to {max(shares):.0%}"
    listed = (" ".join(repr(token) for token in group["key_tokens"][:5]) for group in groups)
    return "; ".join(f"({number}) {tokens}" for number, tokens in enumerate(listed)).replace("|", "\\|")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _count(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    if not FOLDERS[-1].is_dir():
        raise SystemExit("the page is made in a clone of the repository: recipes/compare is not here")
    for name, found in read_results(RESULTS).items():
        for old in _plots_of(name, RESULTS):
            old.unlink()
        draw(Comparison.from_yaml(find_recipe(name)), found["cells"], RESULTS / "compare" / f"{name}.png")
    PAGE.write_text(make_page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
