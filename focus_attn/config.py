"""FocusConfig: every choice that defines a Focus adapter, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

RouterScope = Literal["auto", "kv_head", "layer"]
Normalization = Literal["sinkhorn", "softmax"]
Gate = Literal["hard", "multiplicative", "additive"]
RoutingKind = Literal["causal", "paper_leaky"]
SlidingLayers = Literal["keep", "intersect"]
Backend = Literal["auto", "reference", "stock", "triton"]

# With `router_scope="auto"`: routers per KV head up to this many heads, one per layer above.
MAX_ROUTERS_PER_LAYER = 8


def _option(default: Any, help: str, choices: Any = None) -> Any:
    metadata: dict[str, Any] = {"help": help}
    if choices is not None:
        metadata["choices"] = get_args(choices)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class FocusConfig:
    """What a Focus adapter is. Frozen: use `dataclasses.replace` to vary one.

    The defaults are the setting the project recommends; `FocusConfig.paper()` is the published one.
    """

    num_groups: int = _option(8, "K, the number of groups a token can be sent to")
    query_top_k: int = _option(1, "how many groups a token looks into as a query")
    key_top_k: int = _option(1, "how many groups a token belongs to as a key")
    window: int = _option(128, "tokens at this distance or nearer always attend (window + 1 keys)")
    num_sinks: int = _option(4, "the first tokens of a sequence, which every later token attends to")
    router_dim: int = _option(16, "d_g, the width of the router's projection")
    router_scope: RouterScope = _option(
        "auto", "one router per KV head, per layer, or per KV head while there are at most 8", RouterScope
    )
    shared_router: bool = _option(False, "True: one projection for the query and the key side, as published")
    normalization: Normalization = _option("sinkhorn", "how scores become soft assignments", Normalization)
    temperature: float = _option(1.0, "tau, the scores are divided by it before they are normalised")
    sinkhorn_iters: int = _option(10, "alternations of Sinkhorn's column and row scaling")
    gate: Gate = _option("hard", "what a training forward computes; inference is always hard", Gate)
    gate_sharpness: float = _option(10.0, "lambda of the multiplicative and the additive gate")
    routing: RoutingKind = _option(
        "causal", "paper_leaky: ids from Sinkhorn over the whole sequence, which sees the future", RoutingKind
    )
    sliding_layers: SlidingLayers = _option(
        "keep", "layers that slide already: left alone, or Focus inside their window", SlidingLayers
    )
    dense_layers: tuple[int, ...] = _option((), "layers that keep full attention, by index (negative: from the end)")
    dense_heads: tuple[tuple[int, int], ...] = _option(
        (), "KV heads that keep full attention in layers that are routed, as (layer, head)"
    )
    backend: Backend = _option("auto", "which implementation computes the attention", Backend)

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            _check_int(name, getattr(self, name), lowest)
        for spec in dataclasses.fields(self):
            choices = spec.metadata.get("choices")
            value = getattr(self, spec.name)
            if choices is not None and (not isinstance(value, str) or value not in choices):
                raise ValueError(f"`{spec.name}` must be one of {', '.join(map(repr, choices))}, got {value!r}")
        for name in ("query_top_k", "key_top_k"):
            if getattr(self, name) > self.num_groups:
                raise ValueError(
                    f"`{name}` must be at most `num_groups` ({self.num_groups}), got {getattr(self, name)}: "
                    "lower it or raise `num_groups`"
                )
        for name in ("temperature", "gate_sharpness"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"`{name}` must be a number, got {value!r}")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"`{name}` must be positive and finite, got {value!r}")
        if not isinstance(self.shared_router, bool):
            raise TypeError(f"`shared_router` must be True or False, got {self.shared_router!r}")
        if not isinstance(self.dense_layers, (tuple, list)) or not all(
            isinstance(i, int) and not isinstance(i, bool) for i in self.dense_layers
        ):
            raise TypeError(
                f"`dense_layers` must be a sequence of layer indices such as (0, -1), got {self.dense_layers!r}"
            )
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))  # a list would break equality
        object.__setattr__(self, "dense_heads", _read_heads(self.dense_heads))
        if self.dense_heads and self.router_scope == "layer":
            raise ValueError('`dense_heads` needs a router for each head, not `router_scope="layer"`: try "kv_head"')
        if self.dense_heads and self.routing == "paper_leaky":
            raise ValueError('`dense_heads` cannot be had with `routing="paper_leaky"`, which evens every head out')

    @classmethod
    def paper(cls, **changes: Any) -> FocusConfig:
        """The setting of arXiv 2604.03260: K = 8, k = 2, w = 128, tau = 0.1, 10 Sinkhorn iterations, one shared
        router per layer, no sinks, multiplicative gate.

        The paper leaves lambda open: `gate_sharpness` is 10, so that two confident tokens of one group score
        within 0.005 % of ungated. Its inference ids come from Sinkhorn over the whole sequence and so depend on
        later tokens; here they are causal unless `paper(routing="paper_leaky")` asks for the published leak.
        """
        published: dict[str, Any] = {
            "num_groups": 8,
            "query_top_k": 2,
            "key_top_k": 2,
            "window": 128,
            "num_sinks": 0,
            "router_dim": 16,
            "router_scope": "layer",
            "shared_router": True,
            "normalization": "sinkhorn",
            "temperature": 0.1,
            "sinkhorn_iters": 10,
            "gate": "multiplicative",
            "gate_sharpness": 10.0,
        }
        return cls(**{**published, **changes})

    @property
    def always_dense(self) -> bool:
        """Whether every query must share a group with every key, so that the pattern is plain causal attention."""
        return self.query_top_k + self.key_top_k > self.num_groups

    def leaks_future(self, training: bool = False) -> bool:
        """Whether a token's output can depend on later tokens: published routing, or a Sinkhorn gate in training."""
        soft = training and self.gate != "hard"
        return self.routing == "paper_leaky" or (soft and self.normalization == "sinkhorn")

    def num_routers(self, num_kv_heads: int) -> int:
        """R, the number of routers in a layer with `num_kv_heads` key/value heads."""
        if self.router_scope == "auto":
            return num_kv_heads if num_kv_heads <= MAX_ROUTERS_PER_LAYER else 1
        return num_kv_heads if self.router_scope == "kv_head" else 1

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values; `from_dict` reads them back."""
        lists = {"dense_layers": list(self.dense_layers), "dense_heads": [list(pair) for pair in self.dense_heads]}
        return {**dataclasses.asdict(self), **lists}

    def differences(self, other: FocusConfig) -> list[str]:
        """ "`field`: here, there" of all that is not the same."""
        here, there = self.to_dict(), other.to_dict()
        return [f"`{field}`: {here[field]!r}, {there[field]!r}" for field in here if here[field] != there[field]]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FocusConfig:
        if not isinstance(values, dict):
            raise TypeError(f"a FocusConfig is read from a dict of its fields, got {type(values).__name__}")
        known = {spec.name for spec in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"unknown FocusConfig field(s) {', '.join(map(repr, unknown))}; "
                f"the fields are {', '.join(sorted(known))}"
            )
        return cls(**values)


_LOWEST = {
    "num_groups": 1,
    "query_top_k": 1,
    "key_top_k": 1,
    "window": 0,
    "num_sinks": 0,
    "router_dim": 1,
    "sinkhorn_iters": 1,
}


def _check_int(name: str, value: Any, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    if value < lowest:
        raise ValueError(f"`{name}` must be at least {lowest}, got {value}")


def _read_heads(value: Any) -> tuple[tuple[int, int], ...]:
    usage = "`dense_heads` must be pairs of a layer and one of its KV heads such as [[18, 2]]"
    pairs = value if isinstance(value, (tuple, list)) else (value,)
    for pair in pairs:
        integers = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(type(i) is int for i in pair)
        if not integers:
            raise TypeError(f"{usage}, got {value!r}")
        if pair[1] < 0:
            raise ValueError(f"{usage}, heads counted from 0, got {value!r}")
    return tuple((layer, head) for layer, head in pairs)
