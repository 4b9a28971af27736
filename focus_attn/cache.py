"""Group ids of past tokens, kept in the model's own key/value cache.

The ids of a routed layer ride in one more layer of the same kind at the end of `cache.layers`: as keys [B, R, T, key_k]
beside values of width 0. Whatever transformers does to a whole cache (reorder for beams, crop after a rejected draft,
select, repeat, reset, copy) then happens to the ids too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


class IdsTag(NamedTuple):
    """Whose ids a cache layer holds. Ids of another adapter mean other groups."""

    adapter: str
    routers: str  # what tells them from others under the same name
    layer_idx: int
    ordinal: int  # among the routed layers
    num_routers: int
    key_top_k: int


FOREIGN_CACHE = (
    "this cache was filled {by}, so it lacks the group ids that adapter {adapter!r} gave its tokens: "
    "start from an empty cache, or fill it with the same adapter active"
)


BY_OTHERS = "by other routers, with another Focus adapter active or before this one was read from its file"


def append_group_ids(cache: Cache, tags: dict[int, IdsTag], layer_idx: int, num_layers: int, ids: Tensor) -> Tensor:
    """Add the ids of new tokens [B, R, T, key_k] of one routed layer; returns those of all cached tokens and the new.

    `tags` are those of every routed layer by its index, in order; `num_layers` is how many layers the model has.
    Call before the layer's own keys are added.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"the cache must be a transformers Cache, got {type(cache).__name__}")
    tag = tags[layer_idx]
    if not cache.layers or _tag(cache.layers[-1]) is None:
        _add_id_layers(cache, tags, num_layers)
    layer: Any = _layer_of(cache, tag, len(tags))
    if layer is None:
        raise ValueError(FOREIGN_CACHE.format(by=BY_OTHERS, adapter=tag.adapter))
    _check_in_step(cache.layers[layer_idx], layer, tag)
    past_and_new, _ = layer.update(ids, ids[..., :0])
    # The same tensor where nothing came before: a backend may know by identity that both sides share their ids.
    return ids if past_and_new.shape[2] == ids.shape[2] else past_and_new


def _tag(layer: Any) -> IdsTag | None:
    return getattr(layer, "focus_tag", None)


def _layer_of(cache: Cache, tag: IdsTag, of: int) -> Any:
    """Usually they are the last, in order. A model that drafts with its first layers alone has fewer of them."""
    place = max(0, len(cache.layers) - of) + tag.ordinal
    if place < len(cache.layers) and _tag(cache.layers[place]) == tag:
        return cache.layers[place]
    return next((layer for layer in cache.layers if _tag(layer) == tag), None)


def _add_id_layers(cache: Cache, tags: dict[int, IdsTag], num_layers: int) -> None:
    if hasattr(cache, "linear_cache"):
        raise ValueError(
            f"{type(cache).__name__} counts its linear layers by all layers there are, and has no room for group ids: "
            "pass `use_cache=False`, or leave this model dense"
        )
    if cache.layer_class_to_replicate is not None:
        # A lazy cache appends a layer when one is first used: make them all, for ours stand behind them.
        while len(cache.layers) < num_layers:
            cache.layers.append(cache.layer_class_to_replicate())
    # A cache for the first layers alone is one that the model drafts with (`assistant_early_exit`).
    those = [tag for tag in tags.values() if tag.layer_idx < len(cache.layers)]
    for tag in those:
        base: Any = cache.layers[tag.layer_idx]
        if base.is_initialized and bool(base.get_seq_length() > 0):
            raise ValueError(FOREIGN_CACHE.format(by="without Focus", adapter=tag.adapter))
    after_last = _first_offloaded(cache).prefetch if getattr(cache, "offloading", False) else None
    for tag in those:
        layer: Any = _layer_like(cache.layers[tag.layer_idx])
        layer.focus_tag = tag
        if after_last is not None:
            layer.prefetch = after_last
        cache.layers.append(layer)


def _first_offloaded(cache: Any) -> Any:
    """The layer that transformers is to fetch when the last one has been used. It looks for one behind that first, and
    finds ours, which are small and stay where they are."""
    for layer, is_linear, is_sliding in zip(cache.layers, cache.is_linear, cache.is_sliding, strict=True):
        if not is_linear and not (cache.only_non_sliding and is_sliding):
            return layer
    return cache.layers[0]


def _layer_like(base: Any) -> CacheLayerMixin:
    """An empty layer that keeps the same tokens as `base`, unquantised: an id cannot be rounded."""
    if isinstance(base, StaticSlidingWindowLayer):
        return StaticSlidingWindowLayer(max_cache_len=base.max_cache_len, sliding_window=base.max_cache_len)
    if isinstance(base, StaticLayer):
        return StaticLayer(max_cache_len=base.max_cache_len)
    if isinstance(base, DynamicSlidingWindowLayer):
        layer = DynamicSlidingWindowLayer(sliding_window=base.sliding_window)
        layer.record_past = getattr(base, "record_past", False)
        return layer
    if isinstance(base, DynamicLayer):
        return DynamicLayer()
    raise TypeError(
        f"Focus does not know cache layers of type {type(base).__name__}: use a DynamicCache or StaticCache"
    )


def _check_in_step(base: Any, ids: Any, tag: IdsTag) -> None:
    """The model ran on this cache with Focus off: the keys have moved on without their ids."""
    if torch.compiler.is_compiling():
        return
    same = base.get_seq_length() == ids.get_seq_length()
    if isinstance(same, Tensor) and same.device.type != "cpu":
        torch._assert_async(same)  # no synchronisation for a check
    elif not same:
        raise ValueError(FOREIGN_CACHE.format(by="in part without Focus", adapter=tag.adapter))
