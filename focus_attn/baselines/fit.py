"""What the methods that learn from text share: looking at a model's layers, and meeting a budget by measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from focus_attn.baselines.call import Cost, LayerCall
from focus_attn.baselines.full import Full
from focus_attn.baselines.seam import Baseline, Kind, use_baseline
from focus_attn.model import FocusModel


class _Watched:
    """A method with someone looking on."""

    causal: ClassVar[bool] = True

    def __init__(self, method: Baseline, see: Callable[[LayerCall, Cost], None]) -> None:
        self.method, self.see = method, see
        self.name: str = method.name
        self.kind: Kind = method.kind

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        out, cost = self.method.attend(call)
        self.see(call, cost)
        return out, cost


@torch.no_grad()
def _run(model: nn.Module, blocks: Tensor, method: Baseline, see: Callable[[LayerCall, Cost], None]) -> None:
    lm = model.base_model if isinstance(model, FocusModel) else model
    decoder = lm.get_decoder()  # type: ignore[operator]
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with use_baseline(model, _Watched(method, see)):
        for block in blocks:
            decoder(input_ids=block[None].to(device), use_cache=False)
    model.train(was_training)


def watch_layers(model: nn.Module, blocks: Tensor, see: Callable[[LayerCall], None]) -> None:
    """Run the model, with full attention, on blocks of tokens [N, T] and show `see` every layer that does not slide."""
    _run(model, blocks, Full(), lambda call, cost: see(call))


def measured_share(model: nn.Module, blocks: Tensor, method: Baseline) -> float:
    """The share of the dense multiply-adds that a method takes on these blocks, in the layers that it serves."""
    spent, dense = 0.0, 0.0

    def add(call: LayerCall, cost: Cost) -> None:
        nonlocal spent, dense
        spent += cost.multiply_adds
        dense += call.q.shape[0] * call.shape.dense_multiply_adds

    _run(model, blocks, method, add)
    return spent / dense
