"""Where attention goes and what of it is kept, in shares. `coverage.py` says what each is measured as."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Mass:
    """Where attention goes, as shares of all of it: mean over queries that have distant keys, and over heads."""

    window: float  # in the window
    sinks: float  # on sinks beyond the window
    distant: float  # elsewhere; the three sum to 1
    kept: float  # distant, and in a shared group: visible
    best: float  # distant, kept by the best mask with as many distant pairs for every query
    best_shared: float  # distant, kept by the best such mask that the heads of a router share
    best_total: float  # distant, kept by the best mask with as many distant pairs in all
    random: float  # distant, kept on average by the same ids dealt out at random
    acting: float  # distant, on keys that act as sinks; the rest of the distant attention is content
    acting_kept: float  # on those, and visible
    content_best: float  # content, kept by the best mask with as many pairs of content for every query
    content_random: float  # content, kept on average by the same ids dealt out at random
    apart: float  # between tokens that share no group, at any distance, sinks beyond the window left out

    @property
    def visible(self) -> float:
        return self.window + self.sinks + self.kept

    @property
    def lost(self) -> float:
        """What crosses a group's boundary beyond the window, and so is dropped."""
        return self.distant - self.kept

    @property
    def content(self) -> float:
        return self.distant - self.acting

    @property
    def content_kept(self) -> float:
        return self.kept - self.acting_kept

    @property
    def gain(self) -> float | None:
        """How far the groups come from random ones (0) to the best mask with as many pairs for every query (1)."""
        return _way(self.random, self.kept, self.best)

    @property
    def content_gain(self) -> float | None:
        """The same, for content."""
        return _way(self.content_random, self.content_kept, self.content_best)

    def share(self, name: str) -> float | None:
        """One of `SHARES`, such as "distant_kept"; None where there is nothing to have a share of."""
        part, whole = (getattr(self, field) for field in SHARES[name])
        return part / whole if whole > 0 else None

    def to_dict(self) -> dict[str, float | None]:
        derived = ("visible", "lost", "content", "content_kept", "gain", "content_gain")
        values = {**asdict(self), **{name: getattr(self, name) for name in derived}}
        return {**values, **{name: self.share(name) for name in SHARES}}


# Shares by name: what is kept, of which part of the attention.
SHARES = {
    "distant_kept": ("kept", "distant"),
    "distant_best": ("best", "distant"),
    "distant_best_shared": ("best_shared", "distant"),
    "distant_best_total": ("best_total", "distant"),
    "distant_random": ("random", "distant"),
    "content_kept_share": ("content_kept", "content"),
    "content_best_share": ("content_best", "content"),
    "content_random_share": ("content_random", "content"),
}


def _way(start: float, at: float, end: float) -> float | None:
    return (at - start) / (end - start) if end > start else None


def mean_mass(masses: list[Mass]) -> Mass:
    """The mean of each share. Shares of the distant attention then weigh each by how much distant attention it has."""
    return Mass(*(sum(getattr(mass, spec.name) for mass in masses) / len(masses) for spec in fields(Mass)))
