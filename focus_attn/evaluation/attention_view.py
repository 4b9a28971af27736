"""The base model's attention beside what the routers say of it, some queries at a time.

The base model runs as it is. Every routed layer's attention is worked out again in fp32 for the queries asked for, in
chunks: memory grows with the length, not with its square.

Models have sinks of their own beside the first tokens: a few early keys (the first "the", the first full stop) to which
some heads give much of their attention from everywhere. A key *acts as a sink* for a head if the queries that see it at
a distance give it at least `SINK_SHARE` of their attention on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.layer import AttentionInputs
from focus_attn.model import FocusModel
from focus_attn.progress import Count
from focus_attn.router import Router, Routing
from focus_attn.visibility import Pattern, Tokens, near_and_reachable, shares_group

# Attention weights held at once, in fp32 and with about eight copies of them: 4 GB on a GPU, 256 MB elsewhere.
WEIGHTS_AT_ONCE = {"cuda": 1 << 27, "cpu": 1 << 23}
SINK_SHARE = 0.02
PROBES = 128  # queries, evenly spread over those asked for, that the average is taken over
FEWEST_PROBES = 16  # that must see a key at a distance for it to count


class AttentionView(NamedTuple):
    """One layer, one block, n queries and the T' keys up to the last of them."""

    block: int
    layer_idx: int
    positions: Tensor  # [n] of the queries
    last: bool  # of the chunks of this layer and block
    weights: Tensor  # [H, n, T'] fp32 attention, each row sums to 1
    distant: Tensor  # [H, n, T'] the part on keys that are neither in the window nor sinks
    window: Tensor  # [n, T'] bool
    sinks: Tensor  # [n, T'] bool, sinks beyond the window
    is_distant: Tensor  # [n, T'] bool
    acts_as_sink: Tensor  # [H, T'] bool, distant keys that the head attends to from everywhere
    shared: Tensor  # [R, n, T'] bool, pairs that share a group; head h answers to router h * R // H
    kept: Tensor  # [R, n] distant pairs that share a group
    routing: Routing  # of all T tokens
    router: Router
    pattern: Pattern
    tokens: Tokens  # all T of them

    def by_head(self, of_router: Tensor) -> Tensor:
        """[R, ...] -> [H, ...]."""
        return of_router.repeat_interleave(len(self.weights) // len(self.shared), 0)


Watcher = Callable[[AttentionView], None]


@torch.no_grad()
def watch_attention(
    model: FocusModel,
    blocks: Tensor,
    positions: Tensor,
    watch: Watcher,
    *,
    weights_at_once: int | None = None,
    progress: Count | None = None,
) -> None:
    """Show `watch` every routed layer on every block, the queries at `positions` [n] (ascending) chunk by chunk.

    blocks: ids [N, T] without padding. Routers read the base model's own hidden states.
    """
    device = next(model.parameters()).device
    at_once = weights_at_once or WEIGHTS_AT_ONCE.get(device.type, WEIGHTS_AT_ONCE["cpu"])
    routers = {layer.spec.layer_idx: layer.router for layer in model.focus_layers() if layer.router is not None}
    number = 0

    def look(inputs: AttentionInputs) -> None:
        router = routers[inputs.layer_idx]
        assert inputs.hidden is not None
        config = router.config
        pattern = Pattern(config.num_groups, config.window, config.num_sinks, inputs.sliding_window)
        routing = router(inputs.hidden)
        heads, length = inputs.q.shape[1:3]
        asked = positions.to(inputs.q.device)
        size = max(1, at_once // (heads * length))
        acts_as_sink = _find_sinks(inputs, asked[:: -(-len(asked) // PROBES)].split(size), pattern)
        chunks = asked.split(size)
        for some in chunks:
            watch(_view(number, inputs, router, routing, pattern, some, some is chunks[-1], acts_as_sink))

    decoder = model.base_model.get_decoder()  # type: ignore[operator]
    with model.observe_attention(look):
        for number, block in enumerate(blocks):
            decoder(input_ids=block[None].to(device), use_cache=False)
            if progress:
                progress(number + 1, len(blocks))


def _view(
    block: int,
    inputs: AttentionInputs,
    router: Router,
    routing: Routing,
    pattern: Pattern,
    positions: Tensor,
    last: bool,
    acts_as_sink: Tensor,
) -> AttentionView:
    tokens = _tokens(positions)
    near, reachable = (mask[0, 0] for mask in near_and_reachable(tokens, pattern))
    window = near_and_reachable(tokens, replace(pattern, num_sinks=0))[0][0, 0]
    weights = _attention(inputs, positions, reachable)
    is_distant, keys = reachable & ~near, reachable.shape[-1]
    shared = shares_group(routing.query_groups[:, :, positions], routing.key_groups[:, :, :keys], pattern.num_groups)[0]
    return AttentionView(
        block,
        inputs.layer_idx,
        positions,
        last,
        weights,
        weights * is_distant,
        window,
        near & ~window,
        is_distant,
        acts_as_sink[:, :keys],
        shared,
        (shared & is_distant).sum(-1),
        routing,
        router,
        pattern,
        inputs.tokens,
    )


def _tokens(positions: Tensor) -> Tokens:
    """The queries at `positions`, and the keys up to the last of them."""
    return Tokens(positions[None], torch.arange(int(positions[-1]) + 1, device=positions.device)[None])


def _find_sinks(inputs: AttentionInputs, probes: Sequence[Tensor], pattern: Pattern) -> Tensor:
    """[H, T] bool."""
    heads, length = inputs.q.shape[1:3]
    given = torch.zeros(heads, length, device=inputs.q.device)
    seen = torch.zeros(length, device=inputs.q.device)
    for positions in probes:
        near, reachable = (mask[0, 0] for mask in near_and_reachable(_tokens(positions), pattern))
        is_distant, keys = reachable & ~near, reachable.shape[-1]
        given[:, :keys] += (_attention(inputs, positions, reachable) * is_distant).sum(1)
        seen[:keys] += is_distant.sum(0)
    return (given >= SINK_SHARE * seen) & (seen >= FEWEST_PROBES)


def _attention(inputs: AttentionInputs, positions: Tensor, reachable: Tensor) -> Tensor:
    """[H, n, T'] fp32. A learned sink (gpt_oss) takes a part that falls on no key: these are of what falls on keys."""
    keys = inputs.k[0, :, : reachable.shape[-1]].float()
    queries = inputs.q[0][:, positions].float().unflatten(0, (len(keys), -1))
    scores = (queries @ keys[:, None].transpose(-1, -2)).flatten(0, 1) * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    return scores.masked_fill_(~reachable, -torch.inf).softmax(-1)
