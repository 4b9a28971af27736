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
from focus_attn.training.loss_gradients import loss_gradients
from focus_attn.training.observe import check_blocks, observe_layers
from focus_attn.training.output_fit import cost_of_nearness, fit_output
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

    @property
    def lost(self) -> float | None:
        """After an output fit: what the layers' outputs still lose, as a share of what nearness alone loses."""
        shares = [layer.lost for layer in self.layers if layer.lost is not None]
        return sum(shares) / len(shares) if shares else None


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
    output_steps: int = 0,
    output_learning_rate: float = 1e-3,
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
            layers and in them over the heads that are not dense. It is aimed at, not enforced: measure what is kept
            (`record_stats`).
        queries: how many query positions of each block teach.
        start: where the routers start: "random", "pca_kmeans", "spectral" or "heads", as in `start_routers`; None:
            where they are.
        largest_group: the share of the keys that one group should hold at most; by default 1.6 / `num_groups`. Like the
            budget it is aimed at. 1: groups may be of any size.
        sensitivity: [routed layers] what each layer's far attention is worth, as `layer_sensitivity` measures it: the
            budget is then shared accordingly. By default all layers have the same; on the embedded default sharing
            helped a random start and made no difference to the spectral one.
        output_steps: steps of a second fit, by what the layer's output loses as the loss minds it (`output_fit.py`). It
            goes back through the model a few times first, keeps the values too, and shares the budget by what each
            layer has to lose unless `sensitivity` says otherwise.
        output_learning_rate: of that fit.
        progress: called with what is being done, how much of it is done, and how much there is.
    """
    config = model.focus_config
    check_blocks(token_blocks, config)
    for name, value, least in (("steps", steps, 1), ("queries", queries, 1), ("output_steps", output_steps, 0)):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}")
    cap = _key_cap(largest_group, config)
    far_budget = _far_budget(budget, token_blocks.shape[1], config)
    routed = routed_layers(model)
    if sensitivity is not None and len(sensitivity) != len(routed):
        raise ValueError(f"`sensitivity` has {len(sensitivity)} layers, the model {len(routed)} that are routed")

    began = time.perf_counter()
    minded = loss_gradients(model, token_blocks, progress) if output_steps else {}
    seen = observe_layers(model, token_blocks, queries, seed, progress, values=output_steps > 0)
    layers = [ObservedLayer(layer_idx, router, seen[layer_idx]) for layer_idx, router in routed]
    alone = {layer.layer_idx: cost_of_nearness(layer, minded[layer.layer_idx]) for layer in layers if minded}
    if alone and sensitivity is None:
        sensitivity = torch.tensor(list(alone.values()))
    budgets = [far_budget] * len(routed) if sensitivity is None else share_budget(far_budget, sensitivity)
    far_budgets = dict(zip((layer.layer_idx for layer in layers), budgets, strict=True))
    device = next(model.parameters()).device

    def fit(together: list[ObservedLayer]) -> list[LayerFit]:
        for layer in together:
            if start is not None:
                start_layer(layer.router, layer.seen, start, seed * 100_003 + layer.layer_idx)
        own = [far_budgets[layer.layer_idx] for layer in together]
        fitted = LayersTrainer(together, steps, learning_rate, seed, cap).run(own)
        if not output_steps:
            return fitted
        lost = [
            fit_output(
                layer,
                minded[layer.layer_idx],
                alone[layer.layer_idx],
                output_steps,
                output_learning_rate,
                seed,
                far,
                cap,
            )
            for layer, far in zip(together, own, strict=True)
        ]
        fitted = LayersTrainer(together, steps, learning_rate, seed, cap).measure()
        return [one._replace(lost=share) for one, share in zip(fitted, lost, strict=True)]

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


def check_budget(budget: float) -> None:
    if not 0 < budget <= 1:
        raise ValueError(f"`budget` is a share of the causal pairs, between 0 and 1, got {budget}")


def budget_at(length: int, budget: float, usual: int, config: FocusConfig) -> float:
    """What leaves routers at `length` the share of the far pairs that `budget` leaves them at the `usual` length."""
    near = _near_share(length, config)
    return near + _far_budget(budget, usual, config) * (1 - near)


def _near_share(length: int, config: FocusConfig) -> float:
    """Of the causal pairs, those inside the window or with a sink."""
    beyond = max(0, length - config.window - 1 - config.num_sinks)
    return 1 - beyond * (beyond + 1) // 2 / (length * (length + 1) // 2)


def _far_budget(budget: float, length: int, config: FocusConfig) -> float:
    """The share of the far pairs that may be kept so that `budget` of all causal pairs are."""
    check_budget(budget)
    near = _near_share(length, config)
    if budget <= near:
        raise ValueError(
            f"`budget` {budget} leaves nothing for the routers: at {length} tokens a window of {config.window} and "
            f"{config.num_sinks} sinks keep {near:.3f} of the pairs already; raise it, or fit on longer blocks"
        )
    return (budget - near) / (1 - near)
