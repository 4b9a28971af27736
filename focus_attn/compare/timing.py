"""Time of the attention alone, on the queries, keys and hidden states that a model has on the text.

What runs is the very code that was measured for quality, called eagerly. Focus has kernels of its own; most peers are
plain PyTorch under a mask, so their times are those of an unfused implementation, and multiply-adds are the fairer
measure of what a method could take.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from focus_attn.attention import focus_attention
from focus_attn.baselines.call import LayerCall
from focus_attn.baselines.fit import watch_layers
from focus_attn.baselines.full import Full
from focus_attn.baselines.seam import Baseline
from focus_attn.bench.peers import SDPA, dense_peers
from focus_attn.bench.setting import Inputs
from focus_attn.bench.timing import Contender, race
from focus_attn.model import FocusModel
from focus_attn.visibility import EVERYTHING

SECONDS = 5.0  # no round of timed runs begins that would end later: slow peers are timed fewer times
LAYERS = 8  # of those that attend to everything
ROW = "this row"

Attend = Callable[[LayerCall], object]


def layer_calls(model: nn.Module, block: Tensor, count: int = LAYERS) -> list[LayerCall]:
    """What `count` of the layers are given on a block [T] of text, with full attention before them.

    They are evenly spread, and those with dense heads, which take longer, are among them in their share of the model.
    """
    calls: list[LayerCall] = []
    watch_layers(model, block[None], calls.append)
    count = min(count, len(calls))  # none where all slide
    heads = _dense_heads(model)
    ordered = sorted(calls, key=lambda call: heads[call.layer_idx])
    chosen = [ordered[(2 * index + 1) * len(calls) // (2 * count)] for index in range(count)]
    chosen.sort(key=lambda call: call.layer_idx)
    return [dataclasses.replace(call, counted=False) for call in chosen]  # only the attention is on the clock


def _dense_heads(model: nn.Module) -> Counter[int]:
    """How many heads of each layer Focus leaves dense: all of them where it leaves the layer alone."""
    heads = Counter[int]()
    for layer in model.focus_layers() if isinstance(model, FocusModel) else []:
        spec, router = layer.spec, layer.router
        heads[spec.layer_idx] = spec.num_kv_heads if router is None else len(router.dense_heads)
    return heads


@torch.no_grad()
def time_attention(model: nn.Module, peer: Baseline | None, block: Tensor, repeats: int) -> dict[str, Any]:
    """Milliseconds a layer of the row's attention and of the fastest dense one, timed in turns."""
    calls = layer_calls(model, block)
    if not calls:
        return {"failed": "every layer slides: none attends to everything"}
    device = calls[0].q.device
    attend = _attend(model, peer)
    contenders = [*_dense(calls, device)]
    if attend is not None:
        contenders.append(Contender(ROW, lambda: [attend(call) for call in calls]))
    measured = race(contenders, repeats, deadline=time.perf_counter() + SECONDS, device=device)
    ran = {name: one for name, one in measured.items() if one.times and not one.failed and name != ROW}
    fastest = min(ran, key=lambda name: ran[name].seconds)
    row = measured[ROW] if attend is not None else measured[fastest]
    if not row.times:
        return {"failed": row.failed}
    milliseconds = [1e3 * seconds / len(calls) for seconds in sorted(row.times)]
    return {
        "ms": 1e3 * row.seconds / len(calls),
        "min_ms": milliseconds[0],
        "max_ms": milliseconds[-1],
        "dense_ms": 1e3 * ran[fastest].seconds / len(calls),
        "dense": fastest,
        "layers": [call.layer_idx for call in calls],
        "repeats": len(row.times),
        "device": device.type,
    }


def _attend(model: nn.Module, peer: Baseline | None) -> Attend | None:
    """None: the row is dense itself."""
    if peer is not None and not isinstance(peer, Full):
        return peer.attend
    if not isinstance(model, FocusModel):
        return None
    routers = {layer.spec.layer_idx: layer.router for layer in model.focus_layers()}
    config = model.focus_config
    window = EVERYTHING if config.always_dense else config.window  # as the model itself attends

    def focus(call: LayerCall) -> Tensor:
        router = routers[call.layer_idx]
        if router is None:  # a layer left dense
            return Full().attend(call)[0]
        routing = router(call.hidden)
        out = focus_attention(
            call.q,
            call.k,
            call.v,
            routing.query_groups,
            routing.key_groups,
            num_groups=config.num_groups,
            window=window,
            num_sinks=config.num_sinks,
            scale=call.scale,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
            backend=config.backend,
        )
        assert isinstance(out, Tensor)
        return out

    return focus


def _dense(calls: list[LayerCall], device: torch.device) -> list[Contender]:
    """Every dense kernel of PyTorch that is here, on inputs laid out as it likes them before the clock starts."""
    grouped = calls[0].shape.kv_heads != calls[0].shape.heads
    contenders = []
    for peer in dense_peers(tuple(SDPA), device, grouped)[0]:
        inputs = [peer.layout.arrange(Inputs(call.q, call.k, call.v, None)) for call in calls]

        def run(attend: Any = peer.attend, inputs: list[Inputs] = inputs) -> object:
            return [attend(one.q, one.k, one.v) for one in inputs]

        contenders.append(Contender(peer.name, run, context=peer.context))
    return contenders
