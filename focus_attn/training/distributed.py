"""Several processes: who is who, what they add up, and a base model spread over them.

Data parallelism is torch's DDP, put on by accelerate. With `sharding: fsdp` the decoder layers' own weights are spread
over the devices (torch `fully_shard`); routers, embeddings and the head stay whole on every one, and their gradients
are averaged here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from focus_attn.model import FocusModel


def join_processes(device: str | None) -> torch.device:
    """Join the processes that torchrun or accelerate started, if they did. -> the device of this one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be 'cpu' or 'cuda', got {device!r}: choose a GPU by CUDA_VISIBLE_DEVICES")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`device` is 'cuda', but PyTorch finds no GPU here: leave it out, or look at the driver")
    chosen = torch.device(device)
    if {"RANK", "MASTER_ADDR"} <= set(os.environ) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if chosen.type == "cuda":
            chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(chosen)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return chosen


def leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_ranks(tensor: Tensor) -> Tensor:
    if world_size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def gather_from_ranks(tensor: Tensor) -> Tensor:
    """[ranks, ...] of what has the same shape on every process."""
    if world_size() == 1:
        return tensor[None]
    everyone = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return torch.stack(everyone)


def any_rank(condition: bool, device: torch.device) -> bool:
    """Whether it holds on any process: a decision that all must take together."""
    if world_size() == 1:
        return condition
    return bool(sum_over_ranks(torch.tensor(float(condition), device=device)) > 0)


def from_main(value: Any) -> Any:
    """The main process's value, on every one."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@torch.no_grad()
def copy_routers_from_main(model: FocusModel) -> None:
    if world_size() > 1:
        for layer in model.focus_layers():
            if layer.router is not None:
                for tensor in layer.router.state_dict().values():
                    dist.broadcast(tensor, src=0)


def shard_base(model: FocusModel, device: torch.device) -> None:
    """Spread the weights of the decoder layers over the processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    decoder: nn.Module = model.base_model.get_decoder()  # type: ignore[operator]
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"`sharding: fsdp` does not know the layers of {type(decoder).__name__}: use `sharding: none`")
    mesh = init_device_mesh(device.type, (world_size(),))
    routers = {p for layer in model.focus_layers() for p in layer.parameters()}
    inside = {p for layer in layers for p in layer.parameters()} - routers
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=routers)
    # The root orders the layers' transfers; it has no weights of its own. It is also called with a part of its own
    # answer, to have the head alone (token_losses.py), and warns of that view, which nothing changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) - inside)


def is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(value: Any) -> Any:
    """Sharded tensors put together again, wherever they stand in a nest of dicts and lists; on the CPU.

    Every process must call it: the shards come from all of them.
    """
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(one) for one in value)
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if is_sharded(value) else value).detach().cpu()  # type: ignore[attr-defined]


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor laid out over the processes as the parameter of its shape is."""
    if not is_sharded(parameter) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(parameter.device), mesh, placements)


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Average the gradients of the parameters that are whole on every process, in one transfer."""
    grads = [p.grad for p in parameters if p.requires_grad and not is_sharded(p) and p.grad is not None]
    if world_size() == 1 or not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= world_size()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def clip_gradients(parameters: Iterable[Tensor], longest: float) -> Tensor:
    """Clip the gradients to a common length, sharded ones among them. -> the length before."""
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    having = [p for p in parameters if p.grad is not None]
    kinds = [[p for p in having if is_sharded(p) == sharded] for sharded in (False, True)]
    norms = [whole_norm(get_total_norm([p.grad for p in kind])) for kind in kinds if kind]  # type: ignore[misc]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds:
        if kind and longest < float("inf"):
            clip_grads_with_norm_(kind, longest, total)
    return total


def whole_norm(norm: Tensor) -> Tensor:
    return norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]
