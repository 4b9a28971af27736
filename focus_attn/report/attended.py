"""The distant keys that the base model attends to, for the tokens in the page's browser."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from focus_attn.evaluation.attention_view import AttentionView, watch_attention

if TYPE_CHECKING:
    from focus_attn.model import FocusModel

LEAST = 0.05  # of a query's attention, mean over a router's heads: at most 20 keys a query


def attended_keys(model: FocusModel, block: Tensor) -> dict[str, Any]:
    """For every layer, router and token of a block [T], T below 65,536, the distant keys with at least `LEAST` of its
    attention. Plain JSON values: bytes of how many a token has [R, T], and in that order the keys (two bytes each) and
    their attention in percent (one)."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def keep(view: AttentionView) -> None:
        weights = view.distant.unflatten(0, (len(view.shared), -1)).mean(1)  # [R, n, T']
        router, row, key = places = (weights >= LEAST).nonzero(as_tuple=True)
        rows = torch.stack((router, view.positions[row], key), 1)
        found.setdefault(view.layer_idx, []).append((rows.cpu(), weights[places].cpu()))

    first = model.focus_config.window + model.focus_config.num_sinks + 1
    if len(block) > first:
        watch_attention(model, block[None], torch.arange(first, len(block)), keep)
    routers = {
        layer.spec.layer_idx: layer.router.num_routers for layer in model.focus_layers() if layer.router is not None
    }
    nothing = [(torch.empty(0, 3, dtype=torch.int64), torch.empty(0))]
    return {
        "least": LEAST,
        "tokens": len(block),
        "layers": {
            str(layer_idx): _packed(found.get(layer_idx, nothing), routers[layer_idx], len(block))
            for layer_idx in sorted(routers)
        },
    }


def _packed(parts: list[tuple[Tensor, Tensor]], routers: int, tokens: int) -> dict[str, str]:
    rows, weights = (torch.cat(column) for column in zip(*parts, strict=True))
    place = rows[:, 0] * tokens + rows[:, 1]
    order = place.argsort(stable=True)  # by router, then by query
    counts = torch.bincount(place, minlength=routers * tokens)
    columns = {"counts": (counts, "<u1"), "keys": (rows[order, 2], "<u2"), "percent": (100 * weights[order], "<u1")}
    return {
        name: base64.b64encode(column.round().numpy().astype(dtype).tobytes()).decode("ascii")
        for name, (column, dtype) in columns.items()
    }
