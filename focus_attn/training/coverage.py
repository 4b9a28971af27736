"""The short fit: routers by the coverage objective, layer by layer, with no backward through the model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from focus_attn.config import FocusConfig
from focus_attn.progress import Progress
from focus_attn.training.balance import routed_layers
from focus_attn.training.layer_fit import LayerFit, LayersTrainer, ObservedLayer
from focus_attn.training.observe import check_blocks, observe_layers
from focus_attn.training.sensitivity import share_budget
from focus_attn.training.start_layer import LayerStart, start_layer

if TYPE_CHECKING:
    from focus_attn.model import FocusModel

# Fitted together on a GPU: enough to fill it, few enough for what they are fitted to to fit into memory beside them.
LAYERS_AT_ONCE = 8
FAIR_SHARES = 1.6  # of the keys, that a group may hold unless `largest_group` says otherwise


@dataclass(frozen=True)
class CoverageFit:
    """What `fit_coverage` did."""

    layers: list[LayerFit]
    blocks: int
    length: int
    steps: int
    budget: float
    seconds: float
    memory_bytes: int  # of the observations that were kept

    @property
    def covered(self) -> float:
        return sum(layer.covered for layer in self.layers) / len(self.layers)

    @property
    def covered_nearby(self) -> float:
        return sum(layer.covered_nearby for layer in self.layers) / len(self.layers)

    @property
    def largest_group(self) -> float:
        return sum(layer.largest_group for layer in self.layers) / len(self.layers)


def fit_coverage(
    model: FocusModel,
    token_blocks: Tensor,
    *,
    steps: int = 240,
    budget: float = 0.29,
    queries: int = 128,
    learning_rate: float = 2e-3,
    start: LayerStart | None = "random",
    largest_group: float | None = None,
    sensitivity: Tensor | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> CoverageFit:
    """Fit the active adapter's routers to the frozen model's own attention.

    The dense model runs once over every block; for each routed layer its hidden states, its keys and `queries` of its
    queries are kept (in the model's dtype: about 3 MB a layer and block of 2,048 tokens for the embedded default in
    bf16, 2.3 GB for its 30 layers and 24 blocks). Each layer then takes `steps` steps of Adam by itself.

    A token counts in the soft objective for its groups one by one, so with `query_top_k` and `key_top_k` both above 1
    a pair that shares two groups weighs double there.

    Args:
        token_blocks: [N, T] ids, no padding, T well above the window.
        budget: the share of all causal pairs to keep at length T, window and sinks included, mean over the routed
            layers. It is aimed at, not enforced: measure what is kept (`record_stats`).
        queries: how many query positions of each block teach.
        start: where the routers start: "random", "pca_kmeans", "spectral" or "heads", as in `start_routers`; None:
            where they are.
        largest_group: the share of the keys that one group should hold at most; by default 1.6 / `num_groups`. Like the
            budget it is aimed at. 1: groups may be of any size.
        sensitivity: [routed layers] what each layer's far attention is worth, as `layer_sensitivity` measures it: the
            budget is then shared accordingly. By default all layers have the same; on the embedded default sharing
            helped a random start and made no difference to the spectral one.
        progress: called with what is being done, how much of it is done, and how much there is.
    """
    config = model.focus_config
    check_blocks(token_blocks, config)
    for name, value in (("steps", steps), ("queries", queries)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    cap = _key_cap(largest_group, config)
    far_budget = _far_budget(budget, token_blocks.shape[1], config)
    routed = routed_layers(model)
    budgets = [far_budget] * len(routed) if sensitivity is None else share_budget(far_budget, sensitivity)
    if len(budgets) != len(routed):
        raise ValueError(f"`sensitivity` has {len(budgets)} layers, the model {len(routed)} that are routed")

    began = time.perf_counter()
    seen = observe_layers(model, token_blocks, queries, seed, progress)
    layers = [ObservedLayer(layer_idx, router, seen[layer_idx]) for layer_idx, router in routed]
    far_budgets = dict(zip((layer.layer_idx for layer in layers), budgets, strict=True))
    device = next(model.parameters()).device

    def fit(together: list[ObservedLayer]) -> list[LayerFit]:
        for layer in together:
            if start is not None:
                start_layer(layer.router, layer.seen, start, seed * 100_003 + layer.layer_idx)
        trainer = LayersTrainer(together, steps, learning_rate, seed, cap)
        return trainer.run([far_budgets[layer.layer_idx] for layer in together])

    fitted: list[LayerFit] = []
    with _workers(device) as pool:
        for some in pool.map(fit, _fitted_together(layers, LAYERS_AT_ONCE if device.type == "cuda" else 1)):
            fitted += some
            if progress:
                progress("fitting the routers", len(fitted), len(layers))
    blocks, length = token_blocks.shape
    memory = sum(one.nbytes for observations in seen.values() for one in observations)
    return CoverageFit(sorted(fitted), blocks, length, steps, budget, time.perf_counter() - began, memory)


def _fitted_together(layers: list[ObservedLayer], most: int) -> Iterator[list[ObservedLayer]]:
    for _, alike in groupby(sorted(layers, key=lambda layer: str(layer.shape)), key=lambda layer: layer.shape):
        same = list(alike)
        for start in range(0, len(same), most):
            yield same[start : start + most]


@contextmanager
def _workers(device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """On the CPU one layer a thread beats many threads a layer: layers are independent and their operations small."""
    threads = torch.get_num_threads()
    workers = threads if device.type == "cpu" else 1
    initializer = (lambda: torch.set_num_threads(1)) if device.type == "cpu" else None
    try:
        with ThreadPoolExecutor(workers, initializer=initializer) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _key_cap(largest_group: float | None, config: FocusConfig) -> float:
    """The share of the keys that one group may hold."""
    fair = 1 / config.num_groups
    if largest_group is None:
        return min(1.0, FAIR_SHARES * fair)
    if not fair <= largest_group <= 1:
        raise ValueError(
            f"`largest_group` is a share of the keys, from 1 / `num_groups` ({fair:.3g}) to 1, got {largest_group}"
        )
    return largest_group


def _far_budget(budget: float, length: int, config: FocusConfig) -> float:
    """The share of the far pairs that may be kept so that `budget` of all causal pairs are."""
    if not 0 < budget <= 1:
        raise ValueError(f"`budget` is a share of the causal pairs, between 0 and 1, got {budget}")
    causal = length * (length + 1) // 2
    beyond = max(0, length - config.window - 1 - config.num_sinks)
    near = 1 - beyond * (beyond + 1) // 2 / causal
    if budget <= near:
        raise ValueError(
            f"`budget` {budget} leaves nothing for the routers: at {length} tokens a window of {config.window} and "
            f"{config.num_sinks} sinks keep {near:.3f} of the pairs already; raise it, or fit on longer blocks"
        )
    return (budget - near) / (1 - near)
