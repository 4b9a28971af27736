"""The seam all peers share: any method in the place of a model's full attention, with its cost counted.

    with use_baseline(model, make_baseline("bigbird", budget=0.2, length=8192)) as ledger:
        answer = block_perplexity(model, blocks)
    print(answer.ppl, ledger.share, ledger.pairs_kept)

A method sees whole sequences without padding: padded and packed batches are taken apart here. Layers that slide are
left as they are, also where a sequence fits into their window. Decoding on a cache is refused: several peers are
defined for prefill alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from focus_attn import falcon
from focus_attn.baselines.call import Cost, LayerCall, Shape
from focus_attn.baselines.ledger import LayerLedger, Ledger
from focus_attn.baselines.masked import masked_attention, pairs_cost, positions
from focus_attn.hf import Seam
from focus_attn.layer import LayerSpec
from focus_attn.mask import focus_mask, read_mask
from focus_attn.model import FocusModel

__all__ = ["Baseline", "Cost", "FittedBaseline", "Kind", "LayerCall", "LayerLedger", "Ledger", "Shape", "use_baseline"]

BASELINE = "focus_baseline"

# skips: decides what to skip before any of it is scored; selects: scores every key in some cheaper way first, for each
# query; dense: keeps every pair.
Kind = Literal["skips", "selects", "dense"]


class Baseline(Protocol):
    """A method: a dataclass of its settings with one interesting function."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def causal(self) -> bool:
        """False: what a token attends to depends on later tokens, so that no perplexity is one of a language model."""
        ...

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        """-> the layer's attention output [B, H, T, Dv] and what it cost."""
        ...


@runtime_checkable
class FittedBaseline(Baseline, Protocol):
    """A method that learns something from text before it can attend: `isinstance(baseline, FittedBaseline)`."""

    def fit(self, model: nn.Module, blocks: Tensor) -> None:
        """blocks [N, T]: tokens of training text, of the length that is to be measured."""
        ...


@contextmanager
def use_baseline(model: nn.Module, baseline: Baseline) -> Iterator[Ledger]:
    """Inside, every full-attention layer of `model` runs `baseline.attend`. `model` is a transformers causal LM or a
    FocusModel, whose base is then measured with Focus off."""
    if not baseline.causal:
        warnings.warn(
            f"{baseline.name} chooses what to attend to from later tokens: a loss or perplexity under it is not one of "
            "next-token prediction",
            UserWarning,
            stacklevel=3,
        )
    focus = model if isinstance(model, FocusModel) else None
    with focus.disable_focus() if focus else nullcontext():
        seam = focus._attached() if focus else Seam(model)
        if any(map(falcon.is_attention, seam.modules)):
            raise ValueError("falcon does not use transformers' attention interface, which the baselines go through")
        AttentionInterface.register(BASELINE, _attention_forward)
        AttentionMaskInterface.register(BASELINE, focus_mask)
        ledger = Ledger()
        before = [config._attn_implementation for config in seam.configs]
        hooks: list[Any] = []
        try:
            for config in seam.configs:
                config._attn_implementation_internal = BASELINE
            for module, spec in zip(seam.modules, seam.specs, strict=True):
                hook = partial(_hand_over, _Layer(baseline, ledger, spec))
                hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            yield ledger
        finally:
            for handle in hooks:
                handle.remove()
            for config, implementation in zip(seam.configs, before, strict=True):
                config._attn_implementation_internal = implementation


@dataclass(frozen=True)
class _Layer:
    """What the attention function of one layer needs to know."""

    baseline: Baseline
    ledger: Ledger
    spec: LayerSpec
    hidden: Tensor | None = field(default=None, repr=False)

    def attend(self, call: LayerCall, sliding_window: int | None) -> Tensor:
        shape, rows = call.shape, call.q.shape[0]
        if sliding_window is None:
            out, cost = self.baseline.attend(call)
            dense: float = rows * shape.dense_multiply_adds
        else:
            out, cost = _slide(call, sliding_window)
            dense = cost.multiply_adds
        self.ledger.add(call.layer_idx, cost, rows, shape, dense)
        return out


def _slide(call: LayerCall, window: int) -> tuple[Tensor, Cost]:
    """A sliding layer as the model has it: the last `window` keys, the query's own included."""

    def visible(start: int, stop: int) -> Tensor:
        query, key = positions(start, stop, call.q.device)
        return query - key < window

    out, kept = masked_attention(call, visible)
    return out, pairs_cost(call, kept, 0.0)


def _hand_over(
    layer: _Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of an attention module: its input goes to the attention function as a keyword."""
    hidden = {**dict(zip(layer.spec.arguments, args, strict=False)), **kwargs}[layer.spec.arguments[0]]
    return args, {**kwargs, "baseline_layer": _Layer(layer.baseline, layer.ledger, layer.spec, hidden)}


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    baseline_layer: _Layer,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls. query [B, H, T, D] ... -> [B, T, H, Dv]."""
    if dropout:
        raise ValueError(f"attention dropout of {dropout} reached a baseline: call `model.eval()`, or set it to 0")
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"baselines attend over whole sequences, got {query.shape[2]} queries on a cache of {key.shape[2]} slots: "
            "pass `use_cache=False`"
        )
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):  # rotary positions and norms leave queries and keys in fp32
        half = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(half), key.to(half), value.to(half)
    spec, hidden = baseline_layer.spec, baseline_layer.hidden
    assert hidden is not None

    def attend(rows: slice, chosen: Tensor | slice) -> Tensor:
        call = LayerCall(
            layer_idx=spec.layer_idx,
            q=query[rows, :, chosen],
            k=key[rows, :, chosen],
            v=value[rows, :, chosen],
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
            hidden=hidden[rows, chosen],
            softcap=softcap,
            sink_logits=s_aux,
        )
        window = sliding_window if sliding_window is not None else spec.sliding_window
        with torch.autocast(device_type, enabled=False):  # what a method computes in fp32 it needs in fp32
            return baseline_layer.attend(call, window)

    tokens = read_mask(attention_mask, query.shape[2], key.shape[2])
    if tokens.plain:
        out = attend(slice(None), slice(None))
    else:
        out = query.new_zeros(*query.shape[:3], value.shape[-1])
        for row, chosen in _sequences(tokens.key_positions >= 0, tokens.key_segments):
            out[row : row + 1, :, chosen] = attend(slice(row, row + 1), chosen)
    return out.transpose(1, 2).contiguous(), None


def _sequences(real: Tensor, segments: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """(row, indices of its tokens) of every sequence in a padded or packed batch. real and segments [B, T]."""
    for row in range(real.shape[0]):
        within = torch.zeros_like(real[row], dtype=torch.int64) if segments is None else segments[row]
        for segment in within[real[row]].unique():
            yield row, (real[row] & (within == segment)).nonzero()[:, 0]
