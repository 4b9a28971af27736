"""Whether groups mean the same in two texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from focus_attn.report.group_content import memberships
from focus_attn.report.sample import RoutingSample


def compare_domains(first: RoutingSample, second: RoutingSample) -> list[dict[str, Any]]:
    """For every layer, mean over its routers but dense heads, for both sides:

    agreement_within: the first half of the first text says in which group each kind of token mostly is; the share of
        the tokens of its second half that are there, of the kinds that the first half has
    agreement_across: the same for the second half of the second text
    agreement_chance: the same if that text's ids were dealt out to its tokens at random
    shift: the share of the tokens that would have to change groups for both texts to have groups of the same sizes

    Of several groups a token counts for its first, the one with the highest score.
    """
    kinds = {piece: index for index, piece in enumerate(dict.fromkeys([*first.pieces, *second.pieces]))}
    tokens = [np.array([kinds[piece] for piece in sample.pieces]) for sample in (first, second)]
    cuts = [len(part) // 2 for part in tokens]
    compared = []
    for layer_idx, layer in first.layers.items():
        entry: dict[str, Any] = {"layer_idx": layer_idx}
        for side in ("query", "key"):
            rows = []
            both = zip(getattr(layer, side), getattr(second.layers[layer_idx], side), strict=True)
            for one, two in (ids for router, ids in enumerate(both) if router not in layer.dense_heads):
                home = _usual_group(tokens[0][: cuts[0]], one[: cuts[0], 0], len(kinds), first.num_groups)
                within, _ = _agreement(home, tokens[0][cuts[0] :], one[cuts[0] :, 0])
                across, chance = _agreement(home, tokens[1][cuts[1] :], two[cuts[1] :, 0])
                rows.append((within, across, chance, _shift(one, two, first.num_groups)))
            names = ("agreement_within", "agreement_across", "agreement_chance", "shift")
            entry[side] = dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
        compared.append(entry)
    return compared


def _usual_group(kinds: np.ndarray, groups: np.ndarray, num_kinds: int, num_groups: int) -> np.ndarray:
    """[num_kinds] the group that most tokens of a kind are in, -1 where there are none."""
    counts = np.zeros((num_kinds, num_groups), dtype=np.int64)
    np.add.at(counts, (kinds, groups.astype(np.int64)), 1)
    return np.where(counts.sum(1) > 0, counts.argmax(1), -1)


def _agreement(home: np.ndarray, kinds: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Share of the tokens of known kinds that are in their kind's group; and by chance."""
    expected = home[kinds]
    known = expected >= 0
    if not known.any():
        return 0.0, 0.0
    expected, found = expected[known], groups[known].astype(np.int64)
    size = int(max(expected.max(), found.max())) + 1
    chance = np.bincount(expected, minlength=size) @ np.bincount(found, minlength=size) / len(found) ** 2
    return float((expected == found).mean()), float(chance)


def _shift(one: np.ndarray, two: np.ndarray, num_groups: int) -> float:
    """Total variation between the sizes of the groups, a token in several groups counting for a part in each."""
    shares = [memberships(ids, num_groups).mean(0) for ids in (one, two)]
    shares = [share / share.sum() for share in shares]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)
