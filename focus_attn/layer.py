"""What Focus puts on an attention module: its routers by adapter name, and the state all layers of a model share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from focus_attn.cache import IdsTag
from focus_attn.config import FocusConfig
from focus_attn.gradients import first_order
from focus_attn.router import Router, Routing, tempered
from focus_attn.visibility import Pattern, Tokens

if TYPE_CHECKING:
    from focus_attn.stats import Stats

# A layer that slides over at most this many windows has too little left to prune: it is always left alone.
FEWEST_WINDOWS_TO_ROUTE = 8


@dataclass(frozen=True)
class LayerSpec:
    """What Focus needs to know of an attention layer."""

    layer_idx: int
    hidden_size: int
    num_kv_heads: int
    sliding_window: int | None = None
    arguments: tuple[str, ...] = ("hidden_states",)  # of the module's forward, in order

    def is_routed(self, config: FocusConfig, num_layers: int) -> bool:
        """Whether the layer has routers under `config`; otherwise it attends as the base model does."""
        if self.layer_idx in {index % num_layers for index in config.dense_layers}:
            return False
        if self.sliding_window is None:
            return True
        return config.sliding_layers == "intersect" and self.sliding_window > FEWEST_WINDOWS_TO_ROUTE * config.window

    def dense_heads(self, config: FocusConfig, num_layers: int) -> tuple[int, ...]:
        """The KV heads of the layer, if it is routed, that see everything."""
        return tuple(sorted({head for layer, head in config.dense_heads if layer % num_layers == self.layer_idx}))

    def new_router(self, config: FocusConfig, num_layers: int, device: torch.device | str | None = None) -> Router:
        routers = config.num_routers(self.num_kv_heads)
        return Router(config, self.hidden_size, routers, device, self.dense_heads(config, num_layers))


def check_layers(config: FocusConfig, specs: Sequence[LayerSpec], num_layers: int) -> None:
    """Whether these layers have what `config` names, and anything to route."""
    wrong = [index for index in config.dense_layers if not -num_layers <= index < num_layers]
    if wrong:
        raise ValueError(f"`dense_layers` names layer(s) {wrong} of a model that has {num_layers}")
    _check_dense_heads(config, specs, num_layers)
    if not any(spec.is_routed(config, num_layers) for spec in specs):
        raise ValueError(
            f"Focus would do nothing here: all {num_layers} layers slide or are in `dense_layers`. For layers that "
            'slide over more than 8 windows try `sliding_layers="intersect"`, with a smaller `window` if need be'
        )


def _check_dense_heads(config: FocusConfig, specs: Sequence[LayerSpec], num_layers: int) -> None:
    by_index = {spec.layer_idx: spec for spec in specs}
    for layer, head in config.dense_heads:
        spec = by_index.get(layer % num_layers) if -num_layers <= layer < num_layers else None
        if spec is None:
            raise ValueError(f"`dense_heads` names layer {layer} of a model that has {num_layers}")
        if not spec.is_routed(config, num_layers):
            raise ValueError(f"`dense_heads` names a head of layer {layer}, which is not routed: leave it out")
        if head >= spec.num_kv_heads:
            raise ValueError(f"`dense_heads` names head {head} of layer {layer}, which has {spec.num_kv_heads} of them")
        if config.num_routers(spec.num_kv_heads) < spec.num_kv_heads:
            raise ValueError(
                f"`dense_heads` needs a router for each of the {spec.num_kv_heads} KV heads of layer {layer}: "
                'set `router_scope="kv_head"`'
            )
        if len(spec.dense_heads(config, num_layers)) == spec.num_kv_heads:
            raise ValueError(f"`dense_heads` names every head of layer {layer}: put it in `dense_layers` instead")


class FocusCall(NamedTuple):
    """What the hook of a layer hands to the attention function for one forward."""

    routing: Routing | None = None  # None: the layer is not routed
    key_groups: Tensor | None = None  # [B, R, Tk, key_k] of the cached tokens and the new ones
    hidden: Tensor | None = None  # [B, T, d], only while someone observes


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one layer's attention, as `observe_attention` shows them."""

    layer_idx: int
    hidden: Tensor | None  # [B, T, d], the input of the attention module; kept only while someone observes
    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, Dv]
    scale: float
    softcap: float | None
    tokens: Tokens
    sliding_window: int | None = None
    sink_logits: Tensor | None = None  # [H], the learned sinks of gpt_oss


# (inputs, routing, log assignments of both sides, pattern, output, logsumexp) -> the output, with more gradients: how a
# training step learns from pairs that hard routing drops.
Probing = Callable[[AttentionInputs, Routing, tuple[Tensor, Tensor], Pattern, Tensor, Tensor], Tensor]


@dataclass
class FocusState:
    """One per model, reachable from every attention module: what the next forward is to compute."""

    num_layers: int
    configs: dict[str, FocusConfig] = field(default_factory=dict)
    tags: dict[str, dict[int, IdsTag]] = field(default_factory=dict)  # by adapter, then by routed layer
    active: str = ""
    enabled: bool = True
    observer: Callable[[AttentionInputs], None] | None = None
    output_observer: Callable[[int, Tensor], None] | None = None
    override: Callable[[int, Routing], Routing] | None = None
    probe: Probing | None = None
    recorder: Stats | None = None
    said: set[str] = field(default_factory=set)

    @property
    def config(self) -> FocusConfig:
        return self.configs[self.active]

    def say_once(self, topic: str, message: str) -> None:
        if topic not in self.said and not torch.compiler.is_compiling():
            self.said.add(topic)
            warnings.warn(message, UserWarning, stacklevel=3)


class _AssignmentGradient(torch.autograd.Function):
    """log a in value, a in gradient."""

    @staticmethod
    def forward(ctx: Any, log_assignment: Tensor) -> Tensor:
        ctx.save_for_backward(log_assignment)
        return log_assignment.view_as(log_assignment)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (log_assignment,) = ctx.saved_tensors
        return grad * log_assignment.exp()


class _SoftmaxGate(torch.autograd.Function):
    """The same of softmax as one: its log in value, itself in gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        log_assignment = logits.log_softmax(-1)
        ctx.save_for_backward(log_assignment)
        return log_assignment

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (log_assignment,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad, log_assignment.exp(), -1, grad.dtype)


class Routers(nn.ModuleDict):
    """Routers by adapter name. Inside, a name has a mark: peft takes the name of its own adapter, "default" like ours,
    out of every key that it saves."""

    _MARK = "of_"

    def __getitem__(self, name: str) -> Router:
        return super().__getitem__(self._MARK + name)  # type: ignore[return-value]

    def __setitem__(self, name: str, router: nn.Module) -> None:
        super().__setitem__(self._MARK + name, router)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(self._MARK + name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(f"{self._MARK}{name}")

    def by_name(self) -> dict[str, Router]:
        return {name.removeprefix(self._MARK): router for name, router in super().items()}  # type: ignore[misc]


class FocusLayer(nn.Module):
    """The routers of one attention layer, by adapter name. Adapters that leave the layer alone have none here."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.routers = Routers()
        self.active = ""

    @property
    def router(self) -> Router | None:
        """The active adapter's router, None where it leaves this layer alone."""
        if self.active not in self.routers:
            return None
        return self.routers[self.active]

    def itself(self) -> FocusLayer:
        """The layer in use, also when asked of the wrapper that peft puts around a module to save."""
        return self

    def forward(self, hidden: Tensor, token_mask: Tensor | None = None) -> Routing:
        """[B, T, d] -> the active adapter's Routing."""
        return self.routers[self.active](hidden, token_mask)

    def gates(self, routing: Routing, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log assignments of the query and the key side, each [B, R, T, K]."""
        router = self.router
        assert router is not None
        if routing.key_scores is routing.query_scores:
            shared = router.log_assignments(routing.query_scores, token_mask)
            return shared, shared
        query, key = router.log_assignments(torch.stack((routing.query_scores, routing.key_scores)), token_mask)
        return query, key

    def hard_gates(self, routing: Routing, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """`gates` in value, with the gradients of the assignments themselves: what a kept pair is worth then counts for
        its group as much as the router is in it, as it does for a dropped pair (`training.probe`)."""
        router = self.router
        assert router is not None
        if router.config.normalization == "softmax":  # as one node a side, for it is most of what a layer launches
            temperature = router.config.temperature
            gate = _SoftmaxGate.apply(tempered(routing.query_scores, temperature))
            if routing.key_scores is routing.query_scores:
                return gate, gate
            return gate, _SoftmaxGate.apply(tempered(routing.key_scores, temperature))
        query, key = self.gates(routing, token_mask)
        if key is query:
            shared: Tensor = _AssignmentGradient.apply(query)
            return shared, shared
        return _AssignmentGradient.apply(query), _AssignmentGradient.apply(key)

    def wants_gradient(self) -> bool:
        """Whether this forward is one that trains the router."""
        router = self.router
        if router is None or not (self.training and torch.is_grad_enabled()):
            return False
        return any(parameter.requires_grad for parameter in router.parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FocusLayer:
        """Follow the base model to another device, never to another dtype: routers stay fp32."""

        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move_only, recurse)  # type: ignore[return-value]
