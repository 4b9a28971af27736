"""Cells to a table: seeds put together, intervals against full attention, and who is first at no more cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from focus_attn.evaluation.bootstrap import FEWEST_ITEMS, Interval, perplexity_ratio

BLOCKS = {
    "skips": "skips work before scoring",
    "selects": "scores every key first",
    "dense": "keeps every pair",
}
SAME_COST = 1.05  # a rival may cost this many times as much and still be ranked; one that costs less by it is cheaper
COSTS = (  # what is counted, the row's field, ours and theirs in words
    ("multiply-adds", "multiply_adds", "{:.1%} against {:.1%} of the multiply-adds"),
    ("time", "ms", "{:.3g} against {:.3g} ms a layer"),
)

Cell = dict[str, Any]


class Place(NamedTuple):
    model: str
    data: str
    length: int


@dataclass(frozen=True)
class Row:
    """One method at one place, over its seeds."""

    place: Place
    name: str
    kind: str
    is_focus: bool
    is_base: bool
    seeds: int
    failed: str | None = None
    ppl: float | None = None  # geometric mean over seeds
    lowest: float | None = None  # of the seeds
    highest: float | None = None
    over_base: Interval | None = None  # perplexity over full attention's, blocks of a document resampled together
    pairs_kept: float | None = None
    multiply_adds: float | None = None
    ms: float | None = None  # a layer's attention
    dense_ms: float | None = None  # the fastest dense one, in the same run
    day: str | None = None  # of the time
    dominance: float | None = None
    trained_parameters: int = 0
    trained_tokens: int | None = None  # that they were trained on, of one seed; None: not known
    leaking: bool = False  # it looks at later tokens, so that it is not ranked
    losses: tuple[float, ...] = field(default=(), repr=False)  # of each block, mean over seeds
    documents: tuple[int, ...] | None = field(default=None, repr=False)  # of each block; None: an older cell

    @property
    def speedup(self) -> float | None:
        return None if self.ms is None or self.dense_ms is None else self.dense_ms / self.ms

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["losses"], values["documents"]
        return {**values, "place": self.place._asdict(), "block": BLOCKS[self.kind]}


def make_rows(cells: Iterable[Cell]) -> list[Row]:
    """In the order of the cells, one for each method and place."""
    together: dict[tuple[Place, str], list[Cell]] = {}
    for cell in cells:
        if "bench" not in cell:
            together.setdefault((place_of(cell), cell["row"]), []).append(cell)
    base = {place: _losses(cells) for (place, _), cells in together.items() if is_base(cells[0])}
    return [_row(place, name, cells, base.get(place)) for (place, name), cells in together.items()]


def place_of(cell: Cell) -> Place:
    return Place(cell["model"], cell["data"], cell["length"])


def places(rows: Sequence[Row]) -> list[Place]:
    return list(dict.fromkeys(row.place for row in rows))


def blocks_of(rows: Sequence[Row], place: Place, stepwise: bool = False) -> dict[str, list[Row]]:
    """The rows of a place by block, best first; or as they came, where they build on each other."""
    here = [row for row in rows if row.place == place]
    if not stepwise:
        here.sort(key=lambda row: (row.ppl is None, row.ppl))
    return {kind: found for kind in BLOCKS if (found := [row for row in here if row.kind == kind])}


def verdicts(rows: Sequence[Row], place: Place) -> list[str]:
    """Whether each Focus row comes first among those that skip work, at no more multiply-adds and in no more time."""
    here = [row for row in rows if row.place == place and not row.leaking]
    skipping = [row for row in here if row.kind == "skips" and row.ppl is not None]
    peers = [row for row in skipping if not row.is_focus]
    sentences = []
    for focus in (row for row in skipping if row.is_focus):
        for what, cost, both in COSTS:
            limit = getattr(focus, cost)
            rivals = [row for row in peers if limit and (getattr(row, cost) or limit * 2) <= SAME_COST * limit]
            if cost == "ms":  # machines and kernels differ from day to day
                rivals = [row for row in rivals if row.day == focus.day]
            if rivals:
                best = min(rivals, key=lambda row: row.ppl or 0.0)
                costs = both.format(limit, getattr(best, cost))
                alike = any(getattr(row, cost) * SAME_COST >= limit for row in rivals)
                if getattr(best, cost) * SAME_COST < limit:
                    costs += f": {best.name} is the cheaper one"
                sentences.append(_verdict(focus, best, len(rivals), alike, what, costs))
    return sentences


def _verdict(focus: Row, best: Row, rivals: int, alike: bool, what: str, costs: str) -> str:
    """alike: whether some rival costs about as much; if not, all cost clearly less."""
    ratio = perplexity_ratio(best.losses, focus.losses, together=focus.documents)
    clear = "" if not ratio.contains(1.0) else ", which the interval does not tell apart"
    if ratio.n < FEWEST_ITEMS:
        clear = ", of too few blocks to tell"
    tuned = " (whose weights were trained too)" if best.trained_parameters else ""
    compared = f"{focus.ppl:.2f} against {best.ppl:.2f} of {best.name}{tuned}, ratio {ratio}{clear}; {costs}"
    skipping = "peers that skip" if rivals != 1 else "peer that skips"
    among = f"of the {rivals} {skipping} work at about the same {what} or less"
    if ratio.estimate < 1 and not alike:
        behind = f"the best of the {rivals} that cost" if rivals > 1 else "one that costs"
        day = " and measured the same day" if what == "time" else ""
        alone = f"{focus.name} has no peer that skips work at about the same {what}{day}"
        return f"{alone}; {behind} less is behind: {compared}."
    if ratio.estimate < 1:
        return f"{focus.name} comes before the best {among}: {compared}."
    return f"{focus.name} is NOT first: the best {among} is {best.name}: {compared}."


def _row(place: Place, name: str, cells: list[Cell], base: tuple[float, ...] | None) -> Row:
    first, measured = cells[0], [cell for cell in cells if "figures" in cell]
    described = {
        "place": place,
        "name": name,
        "kind": first["kind"],
        "is_focus": first["focus"],
        "is_base": is_base(first),
        "seeds": len(measured or cells),
    }
    if not measured:
        return Row(**described, failed=first["failed"])
    ppls = [cell["figures"]["ppl"] for cell in measured]
    losses = _losses(measured)
    day = max(map(_day_of_time, measured))  # an older time is of other kernels, or of another machine
    timed = [cell for cell in measured if _day_of_time(cell) == day]
    documents = tuple(measured[0]["documents"]) if "documents" in measured[0] else None
    return Row(
        **described,
        ppl=statistics.geometric_mean(ppls),
        lowest=min(ppls),
        highest=max(ppls),
        over_base=None if base is None or is_base(first) else perplexity_ratio(base, losses, together=documents),
        pairs_kept=_mean(measured, "figures", "pairs_kept"),
        multiply_adds=_mean(measured, "figures", "multiply_adds"),
        ms=_mean(timed, "timing", "ms"),
        dense_ms=_mean(timed, "timing", "dense_ms"),
        day=day,
        dominance=_mean(measured, "figures", "dominance"),
        trained_parameters=first["trained_parameters"],
        trained_tokens=first.get("training", {}).get("tokens"),
        leaking=any(cell["figures"]["leaking"] for cell in measured),
        losses=losses,
        documents=documents,
    )


def _day_of_time(cell: Cell) -> str:
    run = cell.get("timed") or cell["run"]  # that measured a known cell's time again
    return str(run["date"])


def is_base(cell: Cell) -> bool:
    method = cell["method"]
    return not (cell["focus"] or method["tune"] or method["attention"] != "full")


def _losses(cells: list[Cell]) -> tuple[float, ...]:
    """Of each block, mean over the seeds."""
    columns = [cell["figures"]["losses"] for cell in cells]
    return tuple(statistics.fmean(seeds) for seeds in zip(*columns, strict=True))


def _mean(cells: list[Cell], part: str, name: str) -> float | None:
    values = [cell[part][name] for cell in cells if cell.get(part, {}).get(name) is not None]
    return statistics.fmean(values) if values else None
