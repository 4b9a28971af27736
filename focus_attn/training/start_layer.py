"""Where one layer's routers start: at random, from its hidden states, its attention, or its queries and keys.

The informed starts find a linear map to `router_dim` coordinates, cluster the tokens there by k-means, and write the
clusters as a router: the nearest centre m of a point z is the largest of z . m - m . m / 2, a centroid and a bias. In
the space of a head's queries and keys it is a query's largest z . m: the group whose mean key it scores highest.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from focus_attn.router import Router
from focus_attn.training.observe import Observation

LayerStart = Literal["random", "pca_kmeans", "spectral", "heads"]

MOST_TOKENS = 8192  # that are clustered: more do not move the centres
MOST_BLOCKS = 8
RIDGE = 1e-2  # of the mean variance: hidden states of a few thousand tokens do not fill their space
KMEANS_ROUNDS = 25


class Coordinates(NamedTuple):
    """A linear view of one side's hidden states: (x - mean) @ weight."""

    mean: Tensor  # [d]
    weight: Tensor  # [d, w]

    def of(self, hidden: Tensor) -> Tensor:
        return (hidden.float() - self.mean) @ self.weight


@torch.no_grad()
def start_layer(router: Router, seen: list[Observation], how: LayerStart, seed: int) -> None:
    """Start the routers of one layer; what is not random comes from `seen`."""
    generator = torch.Generator().manual_seed(seed)
    router.reset_parameters(generator)  # ours: a start must not depend on what ran before it
    if how == "random":
        return
    seen = seen[:MOST_BLOCKS]
    hidden = [one.hidden for one in seen]
    everyone = torch.cat(hidden).float()
    tokens = everyone[torch.randperm(len(everyone), generator=generator)[:MOST_TOKENS].to(everyone.device)]
    queries = [x[one.positions] for x, one in zip(hidden, seen, strict=True)]
    width, shared = router.config.router_dim, router.num_sides == 1
    if how == "pca_kmeans":
        both = principal_coordinates(tokens, width)
        sides = [[both] * router.num_sides] * router.num_routers
    elif how == "heads":
        keys = everyone, _by_router(seen, router.num_routers, "k")
        asked = torch.cat(queries).float(), _by_router(seen, router.num_routers, "q")
        sides = head_coordinates([keys] if shared else [asked, keys], width)
    elif how == "spectral":
        attention = [one.attention(router) for one in seen]
        sides = []
        for index in range(router.num_routers):
            far = [one.far[index].float().unflatten(1, (-1, len(one.positions))).sum(1) for one in attention]  # [T, n]
            sides.append(attention_coordinates(queries, hidden, far, width, shared=shared))
    else:
        choices = ", ".join(map(repr, get_args(LayerStart)))
        raise ValueError(f"routers start from one of {choices}, got {how!r}")
    for index, views in enumerate(sides):
        clustered = views[-1:] if how == "heads" else views  # there the keys alone
        centres = kmeans(torch.cat([view.of(tokens) for view in clustered]), router.config.num_groups, generator)
        for side, view in enumerate(views):
            nearest = not (how == "heads" and side < len(views) - 1)
            _write(router, side, index, view, centres, tokens, nearest)


def principal_coordinates(tokens: Tensor, width: int) -> Coordinates:
    """The directions in which hidden states [N, d] differ most."""
    mean = tokens.mean(0)
    centred = tokens - mean
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(tokens))  # ascending
    return Coordinates(mean, _fill(directions.flip(1)[:, :width] / variances[-1].clamp_min(1e-12).sqrt(), width))


def attention_coordinates(
    queries: list[Tensor], keys: list[Tensor], far: list[Tensor], width: int, *, shared: bool
) -> list[Coordinates]:
    """The directions along which the far attention of queries goes to keys that agree with them.

    Far attention is read as a joint distribution of (query, key): of all linear views of the two, those whose
    coordinates correlate most under it, as spectral co-clustering does with the tokens themselves. By block: queries
    [n, d], keys [T, d], far [T, n]. `shared`: one view for both.
    """
    total = sum(mass.sum() for mass in far).clamp_min(1e-12)  # type: ignore[union-attr]
    joint: Tensor | float = 0.0
    moments: list[list[Tensor | float]] = [[0.0, 0.0], [0.0, 0.0]]  # by side: mean, second moment
    for query, key, mass in zip(queries, keys, far, strict=True):
        query, key = query.float(), key.float()
        joint = joint + query.T @ (mass.T @ key) / total
        for side, (x, weight) in enumerate(((query, mass.sum(0)), (key, mass.sum(1)))):
            weighted = x * (weight / total)[:, None]
            moments[side][0] = moments[side][0] + weighted.sum(0)
            moments[side][1] = moments[side][1] + weighted.T @ x
    (query_mean, query_moment), (key_mean, key_moment) = moments
    assert isinstance(joint, Tensor) and isinstance(query_mean, Tensor) and isinstance(key_mean, Tensor)
    joint = joint - query_mean[:, None] * key_mean
    covariances = [query_moment - query_mean[:, None] * query_mean, key_moment - key_mean[:, None] * key_mean]
    means = [query_mean, key_mean]
    if shared:
        joint, covariances = (joint + joint.T) / 2, [(covariances[0] + covariances[1]) / 2] * 2
        means = [(query_mean + key_mean) / 2] * 2
    roots = [torch.linalg.cholesky(_with_ridge(one)) for one in covariances]
    whitened = torch.linalg.solve_triangular(roots[0], joint, upper=False)
    whitened = torch.linalg.solve_triangular(roots[1], whitened.T, upper=False).T
    left, strength, right = torch.linalg.svd(whitened)
    strength = strength[:width].sqrt()
    views = [(roots[0], left[:, :width] * strength), (roots[1], right[:width].T * strength)][: 1 if shared else 2]
    weights = [torch.linalg.solve_triangular(root.T, directions, upper=True) for root, directions in views]
    return [Coordinates(mean, _fill(weight, width)) for mean, weight in zip(means, weights, strict=False)]


def head_coordinates(sides: list[tuple[Tensor, Tensor]], width: int) -> list[list[Coordinates]]:
    """By router, and by side: what hidden states show of its queries and keys, along the directions in which those
    differ most.

    sides: hidden states [N, d], and the queries or keys that they have, [N, R, D], as attention gets them: what
    positions do to them (rotations) no hidden state tells, so that a linear fit leaves it out by itself. The keys come
    last; where they are alone, they serve both sides.
    """
    fitted = [_linear_fit(x, heads) for x, heads in sides]
    routers = []
    for index in range(sides[0][1].shape[1]):
        views = [Coordinates(mean, weight[:, index]) for mean, weight in fitted]
        spread = torch.zeros((), device=views[0].mean.device)
        for view, (x, _) in zip(views, sides, strict=True):
            seen = view.of(x)
            covariance = seen.T @ seen / len(seen)
            spread = spread + covariance / covariance.diagonal().sum().clamp_min(1e-12)
        directions = torch.linalg.eigh(spread)[1].flip(1)[:, :width]
        routers.append([Coordinates(view.mean, _fill(view.weight @ directions, width)) for view in views])
    return routers


def _linear_fit(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of x [N, d], and the weight [d, ...] by which x less it predicts y [N, ...] less its own mean best."""
    mean = x.mean(0)
    centred = x - mean
    products = centred.T @ (y - y.mean(0)).flatten(1) / len(x)
    weight = torch.linalg.solve(_with_ridge(centred.T @ centred / len(x)), products)
    return mean, weight.unflatten(1, y.shape[1:])


def _by_router(seen: list[Observation], routers: int, side: str) -> Tensor:
    """The queries or keys of each router, [N, R, D]: the mean over its heads."""
    blocks = [getattr(one.inputs, side)[0].float() for one in seen]  # [heads, n, D]
    return torch.cat([x.unflatten(0, (routers, -1)).mean(1).transpose(0, 1) for x in blocks])


def kmeans(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Centres [K, w] of points [N, w]. The first ones are drawn far from each other."""
    first = torch.randint(len(points), (1,), generator=generator).item()
    centres = points[int(first)][None]
    for _ in range(clusters - 1):
        distance = torch.cdist(points, centres).amin(1).square().cpu() + 1e-12
        centres = torch.cat([centres, points[torch.multinomial(distance, 1, generator=generator).to(points.device)]])
    for _ in range(KMEANS_ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        counts = torch.bincount(nearest, minlength=clusters)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres


def _write(
    router: Router, side: int, index: int, view: Coordinates, centres: Tensor, tokens: Tensor, nearest: bool = True
) -> None:
    """The clusters as a router whose scores have the variance of a random one's: the nearest centre, or the one with
    the largest product."""
    offset = -(view.mean @ view.weight) @ centres.T
    if nearest:
        offset = offset - centres.square().sum(-1) / 2
    scores = (tokens @ view.weight) @ centres.T + offset
    spread = scores.std(-1).square().mean().sqrt()
    if not spread > 1e-6:  # nothing to tell the tokens apart by: the random start stays
        return
    root = spread.sqrt()
    router.projection[side, index] = view.weight / root
    router.centroids[side, index] = centres / root
    router.bias[side, index] = (offset - offset.mean()) / spread


def _with_ridge(covariance: Tensor | float) -> Tensor:
    assert isinstance(covariance, Tensor)
    size = len(covariance)
    return covariance + RIDGE * covariance.diagonal().mean().clamp_min(1e-12) * torch.eye(
        size, device=covariance.device
    )


def _fill(weight: Tensor, width: int) -> Tensor:
    """[d, w] also where the hidden states have fewer than w directions."""
    return torch.nn.functional.pad(weight, (0, width - weight.shape[1]))
