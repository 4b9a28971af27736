"""Where routers start from, before any step through the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from focus_attn.progress import Progress
from focus_attn.training.balance import routed_layers
from focus_attn.training.coverage import CoverageFit, fit_coverage
from focus_attn.training.observe import check_blocks, observe_layers
from focus_attn.training.start_layer import LayerStart, start_layer

if TYPE_CHECKING:
    from focus_attn.model import FocusModel

How = Literal[LayerStart, "coverage"]


def start_routers(
    model: FocusModel,
    token_blocks: Tensor,
    how: How = "coverage",
    *,
    queries: int = 128,
    seed: int = 0,
    progress: Progress | None = None,
    **coverage: Any,
) -> CoverageFit | None:
    """Start the active adapter's routers.

    - "random": from `seed` alone; `token_blocks` is not looked at.
    - "pca_kmeans": clusters of each layer's hidden states.
    - "spectral": clusters of what attends and what is attended to, from `queries` queries of each block.
    - "heads": clusters of each head's keys, and of its queries by what they score highest.
    - "coverage": fitted to keep the attention of the frozen model; `coverage` are further options of `fit_coverage`,
      whose result is returned.

    Args:
        token_blocks: [N, T] ids, no padding, T well above the window.
    """
    if how not in get_args(How):
        raise ValueError(f"`how` must be one of {', '.join(map(repr, get_args(How)))}, got {how!r}")
    if how == "coverage":
        return fit_coverage(model, token_blocks, queries=queries, seed=seed, progress=progress, **coverage)
    if coverage:
        raise ValueError(f'{", ".join(f"`{name}`" for name in sorted(coverage))}: options of `how="coverage"` alone')
    routed = routed_layers(model)
    if how == "random":
        for layer_idx, router in routed:
            start_layer(router, [], how, seed * 100_003 + layer_idx)
        return None
    check_blocks(token_blocks, model.focus_config)
    seen = observe_layers(model, token_blocks, queries, seed, progress)
    for done, (layer_idx, router) in enumerate(routed, start=1):
        start_layer(router, seen[layer_idx], how, seed * 100_003 + layer_idx)
        if progress:
            progress("starting the routers", done, len(routed))
    return None
