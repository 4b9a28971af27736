"""The strongest distant pairs of words: those that groups keep, and those that they lose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focus_attn.evaluation.attention_view import AttentionView

CANDIDATES = 96  # of a chunk, before repeats are left out
CONTEXT = 6  # tokens shown on either side
_WORD = re.compile(r"\s[^\W\d_]{3,}")  # a token that begins a word and has three letters of it


class Pair(NamedTuple):
    """A query attends to a key far before it."""

    weight: float  # the base model's attention, by the head that has most
    layer_idx: int
    head: int
    block: int
    query: int  # position
    key: int
    affinity: float  # of the soft assignments, query side . key side: 1 when both are certain of one group


class StrongestPairs:
    """A watcher of `coverage_by_layer`, for pairs of tokens that begin two different words: a few of each layer.

    Keys that act as sinks are left out: everything attends to them. So are dense heads: they keep whatever there is.
    """

    def __init__(self, pieces: Sequence[Sequence[str]], per_layer: int = 6) -> None:
        """pieces: the text of every token of every block."""
        self.pieces, self.per_layer = pieces, per_layer
        self.is_word = torch.tensor([[bool(_WORD.match(piece)) for piece in block] for block in pieces])
        kinds = {piece: kind for kind, piece in enumerate(dict.fromkeys(p.strip().lower() for b in pieces for p in b))}
        self.kinds = torch.tensor([[kinds[piece.strip().lower()] for piece in block] for block in pieces])
        self.found: dict[tuple[bool, int], list[Pair]] = {}

    def __call__(self, view: AttentionView) -> None:
        device = view.weights.device
        is_word, kinds = self.is_word[view.block].to(device), self.kinds[view.block].to(device)
        keys = view.weights.shape[-1]
        counts = is_word[view.positions, None] & is_word[None, :keys]
        counts &= kinds[view.positions, None] != kinds[None, :keys]
        routed = torch.zeros(len(view.shared), dtype=torch.bool, device=device)
        routed[view.router.choosing] = True
        counts = counts & view.by_head(routed)[:, None, None] & ~view.acts_as_sink[:, None, :]
        shared = view.by_head(view.shared)
        for kept in (True, False):
            weights = view.distant * (counts & (shared if kept else ~shared))
            self._merge(kept, view, weights)

    def _merge(self, kept: bool, view: AttentionView, weights: Tensor) -> None:
        best = weights.flatten().topk(min(CANDIDATES, weights.numel()))
        heads, rows, keys = torch.unravel_index(best.indices, weights.shape)
        queries = view.positions[rows]
        router = heads * len(view.shared) // len(weights)
        temperature = view.router.config.temperature
        query, key = (
            (scores[0, router, at] / temperature).softmax(-1)
            for scores, at in ((view.routing.query_scores, queries), (view.routing.key_scores, keys))
        )
        columns = (best.values, heads, queries, keys, (query * key).sum(-1))
        here = (view.layer_idx, view.block)
        fresh = [
            Pair(weight, here[0], int(head), here[1], int(query), int(key), affinity)
            for weight, head, query, key, affinity in zip(*(column.tolist() for column in columns), strict=True)
            if weight > 0
        ]
        place = (kept, view.layer_idx)
        self.found[place] = self._best([*self.found.get(place, []), *fresh])

    def _best(self, pairs: list[Pair]) -> list[Pair]:
        """The strongest, with each pair of words once."""
        words: dict[tuple[int, int], Pair] = {}
        for pair in sorted(pairs, reverse=True):
            kinds = self.kinds[pair.block]
            words.setdefault((int(kinds[pair.query]), int(kinds[pair.key])), pair)
        return list(words.values())[: self.per_layer]

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Kept and dropped pairs, strongest first, each with the text around it."""
        return {
            name: [self._describe(pair) for pair in sorted(self._all(kept), reverse=True)]
            for name, kept in (("kept", True), ("dropped", False))
        }

    def _all(self, kept: bool) -> list[Pair]:
        return [pair for (was_kept, _), pairs in self.found.items() if was_kept == kept for pair in pairs]

    def _describe(self, pair: Pair) -> dict[str, Any]:
        pieces = self.pieces[pair.block]
        return {
            **pair._asdict(),
            "distance": pair.query - pair.key,
            "query_text": _around(pieces, pair.query),
            "key_text": _around(pieces, pair.key),
        }


def _around(pieces: Sequence[str], position: int) -> list[str]:
    """[what comes before, the token, what comes after]."""
    before, after = pieces[max(0, position - CONTEXT) : position], pieces[position + 1 : position + 1 + CONTEXT]
    return ["".join(before), pieces[position], "".join(after)]
