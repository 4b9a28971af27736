"""Dense causal attention to be measured against: every kernel that is here, each as fast as it can be called."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from focus_attn.bench.setting import Attend, Inputs, run_pass
from focus_attn.bench.timing import Contender

SDPA = {
    "cudnn": ("cuDNN", SDPBackend.CUDNN_ATTENTION),
    "flash": ("Flash", SDPBackend.FLASH_ATTENTION),
    "efficient": ("efficient", SDPBackend.EFFICIENT_ATTENTION),
}
PACKAGES = {
    "fa2": ("FlashAttention-2", "flash_attn"),
    "fa3": ("FlashAttention-3", "flash_attn_interface"),
    "fa4": ("FlashAttention-4", "flash_attn.cute"),
}
FLEX = "flex"
NAMES = (*SDPA, *PACKAGES, FLEX)


class Layout(NamedTuple):
    """How a kernel likes its inputs best; they are brought there before the clock starts."""

    repeats_kv: bool = False  # k and v repeated to the query heads
    token_major: bool = False  # [B, T, H, D]

    def arrange(self, inputs: Inputs) -> Inputs:
        def arranged(x: Tensor, times: int = 1) -> Tensor:
            there = x.detach().repeat_interleave(times, dim=1) if times > 1 else x.detach()
            if self.token_major:
                there = there.transpose(1, 2).contiguous()
            return there.requires_grad_(x.requires_grad)

        q, k, v, grad = inputs
        times = q.shape[1] // k.shape[1] if self.repeats_kv else 1
        return Inputs(arranged(q), arranged(k, times), arranged(v, times), None if grad is None else arranged(grad))


@dataclass(frozen=True)
class Peer:
    """One dense kernel."""

    name: str
    attend: Attend
    layout: Layout = Layout()
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def contenders(peers: list[Peer], inputs: Inputs) -> list[Contender]:
    """Peers of one layout share its tensors."""
    arranged = {layout: layout.arrange(inputs) for layout in {peer.layout for peer in peers}}
    return [
        Contender(peer.name, partial(run_pass, peer.attend, arranged[peer.layout]), context=peer.context)
        for peer in peers
    ]


def default_names(device: torch.device) -> tuple[str, ...]:
    """All there are; on the CPU without flex, whose compiling takes longer there than everything else together."""
    return NAMES if device.type == "cuda" else ("flash",)


def dense_peers(names: tuple[str, ...], device: torch.device, grouped: bool) -> tuple[list[Peer], dict[str, str]]:
    """Peers of the given names, and why the others are left out.

    `grouped`: fewer key/value heads than query heads. SDPA then runs in two variants, since either may be the faster:
    told of the groups, and with k and v repeated beforehand.
    """
    peers: list[Peer] = []
    left_out: dict[str, str] = {}
    for key, (name, backend) in SDPA.items():
        if key not in names:
            continue
        if device.type == "cpu" and backend != SDPBackend.FLASH_ATTENTION:
            left_out[name] = "runs on CUDA devices"
            continue
        only = partial(_only, backend)
        attend = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=grouped)
        peers.append(Peer(name, attend, context=only))
        if grouped:
            attend = partial(scaled_dot_product_attention, is_causal=True)
            peers.append(Peer(f"{name}, k and v repeated", attend, Layout(repeats_kv=True), only))
    for key, (name, module) in PACKAGES.items():
        if key not in names:
            continue
        if device.type == "cpu":
            left_out[name] = "runs on CUDA devices"
            continue
        try:
            function = importlib.import_module(module).flash_attn_func
        except ModuleNotFoundError:
            left_out[name] = f"{module} is not installed"
            continue
        except Exception as error:  # built for another PyTorch or CUDA: it may fail in any way
            left_out[name] = f"{module} cannot be imported: {error}"
            continue
        peers.append(Peer(name, partial(_first, function), Layout(token_major=True)))
    return peers, left_out


def _first(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Some versions return the logsumexp as well."""
    with failing_plainly():
        answer = function(q, k, v, causal=True)
    return answer[0] if isinstance(answer, tuple) else answer


@contextmanager
def failing_plainly() -> Iterator[None]:
    """Whatever goes wrong in someone else's kernel or compiler is a reason to leave it out, not to end the run."""
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _only(backend: SDPBackend) -> Iterator[None]:
    """SDPA through one kernel or not at all; why not stands in the error, and need not be warned of as well."""
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
