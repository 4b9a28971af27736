"""What the groups of every router hold: the tokens that stand out, and how far groups follow word classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from focus_attn.report.sample import RoutingSample
from focus_attn.report.word_classes import CLASSES

DEALS = 10  # random dealings that a purity is compared with


def describe_groups(sample: RoutingSample, classes: Sequence[str] | None, count: int = 12) -> list[dict[str, Any]]:
    """For every layer its routers, for every router its groups on both sides, as plain JSON values.

    classes: of every token of the sample, by `word_classes`; None: nothing is said of them.
    """
    kinds, token_kind = np.unique(np.array(sample.pieces, dtype=object).astype(str), return_inverse=True)
    token_class = None if classes is None else np.array([CLASSES.index(name) for name in classes])
    described = []
    for layer_idx, layer in sample.layers.items():
        routers = []
        for router in range(len(layer.key)):
            sides: dict[str, Any] = {"dense": router in layer.dense_heads}
            for side, ids in (("query", layer.query[router]), ("key", layer.key[router])):
                members = memberships(ids, sample.num_groups)
                groups = [
                    _outstanding(kinds, token_kind, members[:, group], count) for group in range(sample.num_groups)
                ]
                found: dict[str, Any] = {"tokens": groups, "shares": members.mean(0).tolist()}
                if token_class is not None:
                    found["classes"] = _classes(members, token_class)
                sides[side] = found
            routers.append(sides)
        described.append({"layer_idx": layer_idx, "routers": routers})
    return described


def memberships(ids: np.ndarray, num_groups: int) -> np.ndarray:
    """[N, k] -> [N, K] bool."""
    members = np.zeros((len(ids), num_groups), dtype=bool)
    np.put_along_axis(members, ids.astype(np.int64), True, axis=1)
    return members


def _outstanding(kinds: np.ndarray, token_kind: np.ndarray, inside: np.ndarray, count: int) -> list[str]:
    """By how many more there are than chance would put there: rare tokens do not crowd out common ones."""
    everywhere = np.bincount(token_kind, minlength=len(kinds))
    excess = np.bincount(token_kind[inside], minlength=len(kinds)) - inside.mean() * everywhere
    best = np.argsort(-excess, kind="stable")[:count]
    return [str(kinds[index]) for index in best if excess[index] > 0]


def _classes(members: np.ndarray, token_class: np.ndarray) -> dict[str, Any]:
    """Purity: the share of the memberships that are of their group's most common class.

    `purity_random` is what the same groups have when the classes are dealt out to the tokens at random.
    `information` is the share of the uncertainty about a token's class that its group takes away, 0 to 1.
    """
    counts = _count(members, token_class)
    generator = np.random.default_rng(0)
    dealt = [_purity(_count(members, generator.permutation(token_class))) for _ in range(DEALS)]
    largest = counts.argmax(1)
    sizes = counts.sum(1)
    return {
        "purity": _purity(counts),
        "purity_random": float(np.mean(dealt)),
        "information": _information(counts),
        "largest": [CLASSES[index] if size else None for index, size in zip(largest, sizes, strict=True)],
        "largest_share": (counts.max(1) / np.maximum(sizes, 1)).tolist(),
        "counts": counts.astype(int).tolist(),  # [K][class], in the order of `CLASSES`
    }


def _count(members: np.ndarray, token_class: np.ndarray) -> np.ndarray:
    """[K, classes] tokens of each group and class."""
    return members.T.astype(np.float64) @ np.eye(len(CLASSES))[token_class]


def _purity(counts: np.ndarray) -> float:
    return float(counts.max(1).sum() / counts.sum())


def _information(counts: np.ndarray) -> float:
    joint = counts / counts.sum()
    group, kind = joint.sum(1, keepdims=True), joint.sum(0, keepdims=True)
    there = joint > 0
    shared = (joint[there] * np.log((joint / np.where(there, group * kind, 1))[there])).sum()
    entropy = -(kind[kind > 0] * np.log(kind[kind > 0])).sum()
    return float(shared / entropy) if entropy > 0 else 0.0
