"""One layer's attention, under what its model is asked to do: routed or left alone, trained, observed, counted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from focus_attn.attention import focus_attention
from focus_attn.attention.soft import soft_gated_attention
from focus_attn.layer import AttentionInputs, FocusCall, FocusLayer, FocusState
from focus_attn.router import Routing
from focus_attn.visibility import EVERYTHING, Pattern


def attend(state: FocusState, layer: FocusLayer, call: FocusCall, inputs: AttentionInputs) -> Tensor:
    """-> [B, H, Tq, Dv]."""
    if state.observer is not None and inputs.hidden is not None:
        state.observer(inputs)
    if call.routing is None or call.key_groups is None:
        query_groups, key_groups, pattern = ungrouped(inputs)
        if state.recorder is not None:
            state.recorder.add(inputs.layer_idx, query_groups, key_groups, inputs.tokens, pattern)
        out = _focus_attention(state, inputs, query_groups, key_groups, pattern)[0]
        if state.output_observer is not None and inputs.hidden is not None:
            state.output_observer(inputs.layer_idx, out)
        return out

    config = state.config
    pattern = Pattern(config.num_groups, config.window, config.num_sinks, inputs.sliding_window)
    if state.recorder is not None:
        assert layer.router is not None
        state.recorder.add(inputs.layer_idx, call.routing.query_groups, call.key_groups, inputs.tokens, pattern)
        real = inputs.tokens.query_positions >= 0
        state.recorder.add_groups(inputs.layer_idx, call.routing.key_groups, real, layer.router)
    gates = None
    training = layer.wants_gradient()
    _say_if_leaking(state, training)
    if training:
        gates = _gates(layer, call.routing, inputs, config.gate == "hard")
        if config.gate != "hard":
            return soft_gated_attention(
                inputs.q,
                inputs.k,
                inputs.v,
                *gates,
                gate=config.gate,
                sharpness=config.gate_sharpness,
                tokens=inputs.tokens,
                pattern=pattern,
                scale=inputs.scale,
                softcap=inputs.softcap,
                sink_logits=inputs.sink_logits,
                backend=config.backend,
            )
    if config.always_dense and gates is None:  # every pair shares a group: plain causal attention, in one call
        pattern = replace(pattern, window=EVERYTHING)
    probe = state.probe if gates is not None else None
    out, lse = _focus_attention(
        state, inputs, call.routing.query_groups, call.key_groups, pattern, gates, return_lse=probe is not None
    )
    if probe is None or gates is None or lse is None:
        return out
    return probe(inputs, call.routing, gates, pattern, out, lse)


def ungrouped(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Pattern]:
    """Ids and pattern of a layer that Focus leaves alone: every pair it has lies inside the window."""
    batch, queries, keys = inputs.q.shape[0], inputs.q.shape[2], inputs.k.shape[2]
    zero = torch.zeros((), dtype=torch.long, device=inputs.q.device)
    query_groups, key_groups = zero.expand(batch, 1, queries, 1), zero.expand(batch, 1, keys, 1)
    if inputs.sliding_window is None:
        return query_groups, key_groups, Pattern(num_groups=1, window=EVERYTHING)
    # Two groups that never meet: nothing beyond the window.
    window = inputs.sliding_window
    return query_groups, key_groups + 1, Pattern(2, window - 1, sliding_window=window)


def _focus_attention(
    state: FocusState,
    inputs: AttentionInputs,
    query_groups: Tensor,
    key_groups: Tensor,
    pattern: Pattern,
    gates: tuple[Tensor, Tensor] | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    # Plain positions are not passed: a call without them knows that they are.
    tokens = (None, None, None, None, True) if inputs.tokens.plain else inputs.tokens
    query_positions, key_positions, query_segments, key_segments, _ = tokens
    query_gate, key_gate = gates or (None, None)
    answer = focus_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        query_groups,
        key_groups,
        num_groups=pattern.num_groups,
        window=pattern.window,
        num_sinks=pattern.num_sinks,
        scale=inputs.scale,
        softcap=inputs.softcap,
        sliding_window=pattern.sliding_window,
        sink_logits=inputs.sink_logits,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
        query_gate=query_gate,
        key_gate=key_gate,
        backend=state.config.backend,
        return_lse=return_lse,
    )
    return answer if isinstance(answer, tuple) else (answer, None)


def _gates(layer: FocusLayer, routing: Routing, inputs: AttentionInputs, hard: bool) -> tuple[Tensor, Tensor]:
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    if queries != keys:
        raise ValueError(
            f"training needs the whole sequence in one forward, got {queries} tokens on a cache of {keys} slots: "
            "pass `use_cache=False`, or call `model.eval()` to generate"
        )
    real = None if inputs.tokens.plain else inputs.tokens.query_positions >= 0
    return layer.hard_gates(routing, real) if hard else layer.gates(routing, real)


def _say_if_leaking(state: FocusState, training: bool) -> None:
    if state.config.leaks_future(training):
        what = "`paper_leaky` routing" if state.config.routing == "paper_leaky" else "a soft gate from Sinkhorn"
        state.say_once(
            "leak",
            f"{what} lets a token's output depend on later tokens, as published: a loss or perplexity of this "
            "forward is not one of next-token prediction",
        )
