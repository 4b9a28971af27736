"""Equal cost: the setting of a method at which it takes a given share of the dense layer's multiply-adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import nn

from focus_attn.baselines.call import Shape
from focus_attn.hf import Seam, layer_spec, text_config
from focus_attn.layer import LayerSpec
from focus_attn.model import FocusModel

HEAD_DIM = 64  # of the shape assumed where no model is given


def own_share(spec: LayerSpec, length: int) -> float:
    """Pairs of a layer's own attention, share of the causal ones: all, unless it slides."""
    unseen = 0 if spec.sliding_window is None else max(0, length - spec.sliding_window)
    return 1 - unseen * (unseen + 1) / (length * (length + 1))


class Budgeted(Protocol):
    """A method whose cost follows from its settings and the shape, before it has seen any text."""

    @property
    def name(self) -> str: ...

    def expected_multiply_adds(self, shape: Shape) -> float:
        """Selection, scores and values of one sequence, all heads."""
        ...


Method = TypeVar("Method", bound=Budgeted)


def largest_within(budget: float, shape: Shape, make: Callable[[int], Method], least: int, most: int) -> Method:
    """The method `make(knob)` of the largest knob whose expected share of the dense multiply-adds is at most `budget`.

    The cost must grow with the knob.
    """

    def share(knob: int) -> float:
        return make(knob).expected_multiply_adds(shape) / shape.dense_multiply_adds

    knob = largest_knob(budget, share, least, most)
    if knob is None:
        raise ValueError(cannot_reach(make(least), budget, shape.length, share(least)))
    return make(knob)


def largest_knob(budget: float, share: Callable[[int], float], least: int, most: int) -> int | None:
    """The largest knob from `least` to `most` with share(knob) <= budget, by bisection; None where there is none."""
    if share(least) > budget:
        return None
    while least < most:
        middle = (least + most + 1) // 2
        if share(middle) <= budget:
            least = middle
        else:
            most = middle - 1
    return least


def cannot_reach(method: Budgeted, budget: float, length: int, share: float) -> str:
    return (
        f"{method.name} cannot go as low as {budget:.1%} of the dense multiply-adds at {length:,} tokens: its cheapest "
        f"setting here, {method}, takes {share:.1%}. Raise `budget`, or change its other options"
    )


def check_budget(budget: float, length: int | None) -> None:
    if not 0 < budget <= 1:
        raise ValueError(f"`budget` is a share of the dense layer's multiply-adds, in (0, 1], got {budget}")
    if length is None or length < 2:
        raise ValueError(f"a `budget` needs the `length` of the sequences to be measured, got {length}")


def attention_shape(model: nn.Module | None, length: int) -> Shape:
    """The shape of a model's attention layers at `length`; one head of 64 where no model is given."""
    if model is None:
        return Shape(length, 1, 1, HEAD_DIM, HEAD_DIM)
    config = text_config(model)
    modules = model._attached().modules if isinstance(model, FocusModel) else Seam(model).modules
    heads = config.num_attention_heads
    if getattr(config, "qk_head_dim", None):  # latent attention: keys and values of different widths
        return Shape(length, heads, heads, config.qk_head_dim, config.v_head_dim)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(length, heads, layer_spec(modules[0]).num_kv_heads, width, width)
