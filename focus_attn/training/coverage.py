"""The short fit: routers by the coverage objective, layer by layer, with no backward through the model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from focus_attn.config import FocusConfig
from focus_attn.layer import AttentionInputs
from focus_attn.training.layer_fit import LayerFit, LayerTrainer, Observation

if TYPE_CHECKING:
    from focus_attn.model import FocusModel

Progress = Callable[[str, int, int], None]  # what, done, of how many


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


def fit_coverage(
    model: FocusModel,
    token_blocks: Tensor,
    *,
    steps: int = 240,
    budget: float = 0.29,
    queries: int = 128,
    learning_rate: float = 2e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> CoverageFit:
    """Fit the active adapter's routers to the frozen model's own attention. They start anew from `seed`.

    The dense model runs once over every block; for each routed layer its hidden states, its keys and `queries` of its
    queries are kept (in the model's dtype: about 3 MB a layer and block of 2,048 tokens for the embedded default in
    bf16, 2.3 GB for its 30 layers and 24 blocks). Each layer then takes `steps` steps of Adam by itself.

    A token counts in the soft objective for its groups one by one, so with `query_top_k` and `key_top_k` both above 1
    a pair that shares two groups weighs double there.

    Args:
        token_blocks: [N, T] ids, no padding, T well above the window.
        budget: the share of all causal pairs to keep at length T, window and sinks included. It is aimed at, not
            enforced: measure what is kept (`record_stats`).
        queries: how many query positions of each block teach.
        progress: called with what is being done, how much of it is done, and how much there is.
    """
    config = model.focus_config
    _check(token_blocks, config, steps=steps, queries=queries)
    far_budget = _far_budget(budget, token_blocks.shape[1], config)
    routers = {layer.spec.layer_idx: layer.router for layer in model.focus_layers() if layer.router is not None}

    start = time.perf_counter()
    seen = _observe(model, token_blocks, queries, seed, progress)
    trainers = [
        LayerTrainer(layer_idx, routers[layer_idx], seen[layer_idx], steps, learning_rate, seed)
        for layer_idx in sorted(routers)
    ]
    layers: list[LayerFit] = []
    with _one_thread_each(next(model.parameters()).device) as pool:
        for layer in pool.map(lambda trainer: trainer.run(far_budget), trainers):
            layers.append(layer)
            if progress:
                progress("fitting the routers", len(layers), len(trainers))
    blocks, length = token_blocks.shape
    memory = sum(one.nbytes for observations in seen.values() for one in observations)
    return CoverageFit(layers, blocks, length, steps, budget, time.perf_counter() - start, memory)


def _observe(
    model: FocusModel, token_blocks: Tensor, queries: int, seed: int, progress: Progress | None
) -> dict[int, list[Observation]]:
    window = model.focus_config.window
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    observations: dict[int, list[Observation]] = {}
    positions = torch.empty(0)

    def keep(inputs: AttentionInputs) -> None:
        # Of q only the sampled positions are needed, of v only its length.
        lengths = inputs.v.float().norm(dim=-1, keepdim=True)
        slim = dataclasses.replace(inputs, q=inputs.q[:, :, positions].clone(), v=lengths)
        observations.setdefault(inputs.layer_idx, []).append(Observation(slim, positions))

    decoder = model.base_model.get_decoder()  # type: ignore[operator]
    with torch.no_grad(), model.observe_attention(keep):
        for done, block in enumerate(token_blocks, start=1):
            past_window = torch.randperm(len(block) - window - 1, generator=generator)[:queries] + window + 1
            positions = past_window.sort().values.to(device)
            decoder(input_ids=block[None].to(device), use_cache=False)
            if progress:
                progress("observing the dense model", done, len(token_blocks))
    return observations


@contextmanager
def _one_thread_each(device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Layers are independent and their operations small: on the CPU one layer a thread beats many threads a layer."""
    threads = torch.get_num_threads()
    workers = threads if device.type == "cpu" else 1
    initializer = (lambda: torch.set_num_threads(1)) if device.type == "cpu" else None
    try:
        with ThreadPoolExecutor(workers, initializer=initializer) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _check(token_blocks: Tensor, config: FocusConfig, **sizes: int) -> None:
    if token_blocks.dim() != 2 or token_blocks.is_floating_point():
        raise ValueError(f"`token_blocks` must be [blocks, tokens] ids, got {list(token_blocks.shape)}")
    blocks, length = token_blocks.shape
    least = 2 * (config.window + config.num_sinks)
    if blocks == 0 or length < least:
        raise ValueError(
            f"`token_blocks` of shape {list(token_blocks.shape)} is too small to fit on: at least one block, and at "
            f"least {least} tokens (twice the window and the sinks)"
        )
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")


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
