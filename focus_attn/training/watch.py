"""What a training forward sees of the routers, and how its backward pass sees the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from focus_attn.layer import Probing
from focus_attn.router import Routing
from focus_attn.training.balance import routed_layers

if TYPE_CHECKING:
    from focus_attn.model import FocusModel


class RoutingWatch:
    """Keeps every layer's routing with its gradients, and has `probe` look at what hard routing drops.

    Checkpointed layers run again in the backward pass, after the step has returned. The watch is there again then, and
    gives the ids of the first run: rounding must not send a token elsewhere the second time.

    stop_gradient: routers see hidden states that no gradient goes back through.
    """

    def __init__(self, probe: Probing | None = None, stop_gradient: bool = False) -> None:
        self.probe, self.stop_gradient = probe, stop_gradient
        self.routings: dict[int, Routing] = {}
        self._ids: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer_idx: int, routing: Routing) -> Routing:
        if layer_idx not in self._ids:
            self.routings[layer_idx] = routing
            self._ids[layer_idx] = routing.query_groups, routing.key_groups
        query_groups, key_groups = self._ids[layer_idx]
        return routing._replace(query_groups=query_groups, key_groups=key_groups)

    @contextmanager
    def watching(self, model: FocusModel) -> Iterator[None]:
        routers = [router for _, router in routed_layers(model)] if self.stop_gradient else []
        hooks = [router.register_forward_pre_hook(_detach_hidden) for router in routers]
        try:
            with model.override_routing(self), model.probe_attention(self.probe):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def watch_backward(self, model: FocusModel, loss: Tensor) -> None:
        """Be there again while `loss` is differentiated, whenever that is. Of the routings only the ids are kept."""
        self.routings = {}
        if not loss.requires_grad:
            return

        def begin(grad: Tensor) -> None:
            watching = self.watching(model)
            watching.__enter__()

            def end() -> None:
                watching.__exit__(None, None, None)

            torch.autograd.Variable._execution_engine.queue_callback(end)

        loss.register_hook(begin)


def _detach_hidden(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *rest = args
    return hidden.detach(), *rest
