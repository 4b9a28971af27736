"""What a forward's routing costs, how even and how sure it is: scalars for the loss and for the log.

Layers of like shape are taken side by side, as one with many routers: small operations for each of dozens of layers
would take a GPU longer than what they compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from focus_attn.config import FocusConfig
from focus_attn.layer import FocusLayer
from focus_attn.router import Routing, tempered
from focus_attn.training.balance import group_members, overfull, sinkhorn_divergence
from focus_attn.training.packing import Packing
from focus_attn.training.pairs import PairCount, soft_assignments, straight_through
from focus_attn.visibility import EVERYTHING, Pattern

if TYPE_CHECKING:
    from focus_attn.model import FocusModel


LOGGED_TOKENS = 2048  # of a row


class RoutingTerms(NamedTuple):
    """Means over layers; a layer or a head that is left alone counts in the pairs only."""

    pairs_kept: Tensor  # share of the causal pairs, hard in value, with the gradient of the soft assignments
    overfull: Tensor  # how far key groups stand above the cap, relative to it
    imbalance: Tensor  # KL from Sinkhorn's balance over the batch, both sides; of every n-th token if only for the log
    expected_pairs: Tensor  # what the soft assignments would keep; no gradient
    confidence: Tensor  # mean of the surest assignment, both sides; no gradient
    loads: Tensor  # [routed layers, R, K] int64, zeros for a dense head and where there are fewer than R routers


def routing_terms(
    model: FocusModel, routings: dict[int, Routing], packing: Packing, largest_group: float, balanced: bool = True
) -> RoutingTerms:
    """From the routing of every routed layer, by its index. balanced: whether the imbalance has a gradient."""
    layers = model.focus_layers()
    alone = [layer for layer in layers if layer.router is None]
    alike: dict[tuple[int | None, int], list[FocusLayer]] = {}
    for layer in layers:
        if layer.router is not None:
            alike.setdefault((layer.spec.sliding_window, layer.router.num_routers), []).append(layer)

    parts: list[tuple[int, Tensor]] = []  # how many layers, their terms
    members: dict[int, Tensor] = {}  # [R, K], R that of the layer with most routers
    most = max(routers for _, routers in alike)
    for (sliding, routers), some in alike.items():
        indices = [layer.spec.layer_idx for layer in some]
        these, config = [routings[i] for i in indices], model.focus_config
        terms, loads = _terms(these, packing, sliding, config, largest_group, balanced, _choosing(some))
        parts.append((len(some), terms))
        filled = torch.nn.functional.pad(loads.unflatten(0, (-1, routers)), (0, 0, 0, most - routers))
        members.update(zip(indices, filled, strict=True))
    means = _weighted_mean(parts)
    if alone:
        kept = torch.stack([_left_alone(layer, packing) for layer in alone]).mean()
        share = len(alone) / len(layers)
        # Of the terms only the pairs kept and expected know layers that are left alone.
        means = torch.cat([torch.lerp(means[:2], kept.expand(2), share), means[2:]])
    kept, expected, over, imbalance, confidence = means
    loads = torch.stack([members[i] for i in sorted(members)]).long()
    return RoutingTerms(kept, over, imbalance, expected.detach(), confidence.detach(), loads)


def _terms(
    routings: list[Routing],
    packing: Packing,
    sliding: int | None,
    config: FocusConfig,
    largest_group: float,
    balanced: bool,
    choosing: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Pairs kept, pairs expected, overfull, imbalance, confidence, [5]; the members of each key group, [layers * R, K].
    choosing: which of these routers are no dense heads, None if all. Only the pairs know the others.
    Both sides of all layers, [B, 2 * layers * R, T, K], go through one set of operations. In memory the tokens of a
    group lie side by side, as sums over tokens want them."""
    query_groups, key_groups, query_scores, key_scores = zip(*routings, strict=True)
    scores = torch.cat([x.transpose(-1, -2) for x in (*query_scores, *key_scores)], 1)
    probabilities = tempered(scores, config.temperature).softmax(-2).transpose(-1, -2)
    query, key = map(soft_assignments, probabilities.chunk(2, 1), (config.query_top_k, config.key_top_k))
    hard_query = straight_through(torch.cat(query_groups, 1), query)
    hard_key = straight_through(torch.cat(key_groups, 1), key)
    members = group_members(hard_key, packing.real)
    count = PairCount(packing, Pattern(config.num_groups, config.window, config.num_sinks, sliding))
    if choosing is not None and min(config.query_top_k, config.key_top_k) > 1:
        # Or a dense head's pairs would count once more for every group they share beside the one that all share.
        first = torch.zeros_like(members.detach())
        first[:, 0] = 1
        hard_key = hard_key * first.index_fill(0, choosing, 1.0)[:, None]
    pairs = [count.share(hard_query, hard_key), count.share(query.detach(), key.detach())]
    scores, free, loads = scores.transpose(-1, -2), members, members.detach()
    if choosing is not None:
        both = torch.cat([choosing, choosing + len(members)])
        query, key, scores, free = query[:, choosing], key[:, choosing], scores[:, both], members[choosing]
        loads = torch.zeros_like(loads).index_copy(0, choosing, free.detach())
    surest = (query.detach().amax(-1) + key.detach().amax(-1)) / 2 * packing.real[:, None]  # [B, R, T]
    real = packing.real
    if not balanced:  # a figure for the log: a part of the tokens says it as well
        every = max(1, scores.shape[2] // LOGGED_TOKENS)
        scores, real = scores.detach()[:, :, ::every], real[:, ::every]
    terms = [
        *pairs,
        overfull(free, largest_group),
        sinkhorn_divergence(scores, real, config.temperature, config.sinkhorn_iters, packing.may_be_padded),
        surest.sum() / (packing.real.sum().clamp_min(1) * surest.shape[1]),
    ]
    return torch.stack(terms), loads


def _choosing(layers: list[FocusLayer]) -> Tensor | None:
    """Among the routers of all these layers, side by side, those that are no dense heads; None if all are."""
    routers = [layer.router for layer in layers if layer.router is not None]
    if not any(router.dense_heads for router in routers):
        return None
    return torch.cat([router.choosing + index * router.num_routers for index, router in enumerate(routers)])


def _left_alone(layer: FocusLayer, packing: Packing) -> Tensor:
    sliding = layer.spec.sliding_window
    return PairCount(packing, Pattern(1, EVERYTHING if sliding is None else sliding - 1, 0, sliding)).share()


def _weighted_mean(parts: list[tuple[int, Tensor]]) -> Tensor:
    total = sum(count for count, _ in parts)
    return torch.stack([count / total * terms for count, terms in parts]).sum(0)
