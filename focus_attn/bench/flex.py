"""FlexAttention with the mask of Focus: what PyTorch offers for the same pairs without this library."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from focus_attn.bench.peers import failing_plainly
from focus_attn.bench.setting import Attend, Groups
from focus_attn.visibility import Pattern

BLOCK = 128  # create_block_mask's own
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def focus_mask(groups: Groups, pattern: Pattern, heads: int) -> MaskMod:
    """The predicate of `visibility.py` as FlexAttention asks for it; a test holds the two together."""
    heads_per_router = heads // groups.query.shape[1]
    query_ids, key_ids = groups.query[0].unbind(-1), groups.key[0].unbind(-1)  # [R, T] each

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        router = h // heads_per_router
        seen = (i - j <= pattern.window) | (j < pattern.num_sinks)
        for query_id in query_ids:
            for key_id in key_ids:
                seen = seen | (query_id[router, i] == key_id[router, j])
        return seen & (j <= i)

    return visible


def flex_attend(groups: Groups, pattern: Pattern, heads: int) -> Attend:
    """Making the block mask and attending under it, both compiled."""
    length, device = groups.query.shape[2], groups.query.device
    mask_heads = None if groups.query.shape[1] == 1 else heads
    visible = focus_mask(groups, pattern, heads)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        make_mask, attend = _compiled()
        with failing_plainly():
            mask = make_mask(visible, None, mask_heads, length, length, device=device)
            return attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return run


def mask_bytes(length: int, routers: int, heads: int) -> int:
    """What the block mask takes: full and partial blocks, listed by rows and by columns, int32."""
    blocks = -(-length // BLOCK)
    return 4 * 4 * blocks * blocks * (1 if routers == 1 else heads)


@cache
def _compiled() -> tuple[Any, Any]:
    return torch.compile(create_block_mask), torch.compile(flex_attention, fullgraph=True)
