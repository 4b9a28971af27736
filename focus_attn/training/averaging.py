"""The mean of the routers over the last steps of a stage, for it to end with.

Adam's steps are as long where a gradient says little as where it says much, so routers wander around what they are
after. Their mean may stand nearer to it than where the last step ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from focus_attn.training.balance import routed_layers

if TYPE_CHECKING:
    from focus_attn.model import FocusModel


class RouterMean:
    """Of projections, centroids and biases, every step counting alike."""

    def __init__(self) -> None:
        self.steps = 0
        self.means: list[Tensor] = []

    @torch.no_grad()
    def add(self, model: FocusModel) -> None:
        """The routers as they are now."""
        self.steps += 1
        now = _tensors(model)
        if self.steps == 1:
            self.means = [tensor.clone() for tensor in now]
        else:
            torch._foreach_lerp_(self.means, now, 1 / self.steps)

    @torch.no_grad()
    def put(self, model: FocusModel) -> None:
        """Let the routers be what they were on average."""
        torch._foreach_copy_(_tensors(model), self.means)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "means": self.means}

    def load_state_dict(self, state: dict[str, Any] | None, model: FocusModel) -> None:
        """None: of a checkpoint from before there were means."""
        if state is not None and state["steps"]:
            self.steps = state["steps"]
            self.means = [mean.to(now) for mean, now in zip(state["means"], _tensors(model), strict=True)]


def _tensors(model: FocusModel) -> list[Tensor]:
    routers = [router for _, router in routed_layers(model)]
    return [tensor.detach() for router in routers for tensor in (router.projection, router.centroids, router.bias)]
