"""What a stage will take of a device's memory, before it runs. Its time is measured: the first step says it.

Weights, gradients and the optimiser's state are counted exactly. Activations are an estimate by the widths of a decoder
layer (norms, queries, keys, values, a gated MLP, the routers' soft assignments). `tests/test_train_estimate.py` holds
it against what autograd keeps; for SmolLM2-135M in bf16 at 512 tokens on a CPU it says 0.99 times that, where the
routers alone are trained and where everything is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from focus_attn.attention.additive import SHARPEST
from focus_attn.attention.multiplicative import KERNELS
from focus_attn.config import FocusConfig
from focus_attn.hf import text_config
from focus_attn.kernel_use import kernels
from focus_attn.model import FocusModel
from focus_attn.training.checkpoint import base_parameters
from focus_attn.training.recipe import Recipe, Stage
from focus_attn.training.token_losses import LOGITS_AT_ONCE, MORE_ON_CUDA

ADAM_BYTES = 8  # two fp32 moments a parameter
ASSIGNMENTS = 10  # [R, K] tensors in fp32 that a token's routing terms keep
SOFT_PAIRS = 4  # [H, T, T] tensors in fp32 that a soft gate over all pairs keeps


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    weights: int
    optimizer: int  # and gradients
    activations: int
    activations_unchecked: int  # without gradient checkpointing
    logits: int
    available: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations + self.logits

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "optimiser and gradients": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
        }
        told = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
        text = f"memory, estimated: {_gib(self.total)} GiB of {_gib(self.available)} ({told}"
        if self.activations < self.activations_unchecked:
            text += f"; {_gib(self.activations_unchecked)} of activations without checkpointing"
        text += ")"
        if self.total > self.available:
            text += ". That is more than there is: lower `micro_batch` or `length`, turn `gradient_checkpointing` on"
        return text


def estimate_memory(
    model: FocusModel, recipe: Recipe, stage: Stage, device: torch.device, processes: int = 1
) -> MemoryEstimate:
    config = text_config(model.base_model)
    base = list(base_parameters(model).values())
    routers = [p for layer in model.focus_layers() if layer.router is not None for p in layer.router.parameters()]
    everything = stage.trains == "everything"
    trained = routers + (base if everything else [])
    shared = processes if recipe.sharding == "fsdp" else 1

    width = config.hidden_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * width
    item = 2 if recipe.precision == "bf16" else 4
    tokens = stage.micro_batch * stage.length
    focus = model.focus_config
    assignments = 4 * ASSIGNMENTS * focus.num_routers(kv_heads) * focus.num_groups
    mixed = recipe.trains_base and item == 2  # fp32 weights and hidden states, products in bf16
    # Two norms and the router; queries, keys, values and the output; a gated MLP.
    layer = (4 if mixed else item) * 3 * width + item * (2 * (heads + kv_heads) * head_dim + 3 * inner) + assignments
    if everything:  # the inputs of linear layers, and what norms scale
        layer += item * (4 * width + inner) + (4 * 2 * width if mixed else 0)
    if _by_formula(focus, head_dim, item, device):
        layer += 4 * SOFT_PAIRS * heads * stage.length
    if device.type != "cuda" and item == 2:  # `stock` gives its output in fp32, rounded later
        layer += 4 * heads * head_dim
    between = item * width + assignments
    layers = config.num_hidden_layers
    unchecked = tokens * layers * layer
    checked = tokens * (layers * between + layer)
    vocabulary = model.base_model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    at_once = LOGITS_AT_ONCE * (MORE_ON_CUDA if device.type == "cuda" else 1)
    return MemoryEstimate(
        weights=sum(p.nbytes + (item * p.numel() if mixed else 0) for p in base) // shared
        + sum(p.nbytes for p in routers),
        optimizer=sum(p.nbytes + ADAM_BYTES * p.numel() for p in trained) // (shared if everything else 1),
        activations=min(checked, unchecked) if recipe.gradient_checkpointing else unchecked,
        activations_unchecked=unchecked,
        logits=3 * 4 * min(at_once, tokens * vocabulary),  # themselves, their softmax, its gradient
        available=_available(device),
    )


def _by_formula(focus: FocusConfig, width: int, item: int, device: torch.device) -> bool:
    """Whether a soft gate keeps numbers for all pairs. width: of a head; item: bytes of an element."""
    if focus.gate == "hard":
        return False
    if focus.backend == "reference":
        return True
    if focus.gate == "additive":
        return focus.gate_sharpness > SHARPEST
    found = kernels(KERNELS, device) if focus.backend != "stock" else None
    return found is None or not found.has_room(width, item, focus.num_groups, device)


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
