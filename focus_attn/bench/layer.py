"""One layer of a model, its router included, against dense SDPA: what the demo shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from focus_attn.attention import focus_attention
from focus_attn.bench.groups import draw_groups
from focus_attn.bench.timing import Contender, Contest, Timing, dense_and_focus, races
from focus_attn.router import Router


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer, and how its tokens spread over the groups."""

    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    query_shares: Tensor  # [R, K] share of the tokens that look into each group
    key_shares: Tensor  # [R, K] share of the tokens that belong to each group


def time_attention(
    shape: AttentionShape,
    router: Router,
    lengths: Sequence[int],
    repeats: int = 3,
    seconds: float = math.inf,
    seed: int = 0,
) -> Iterator[Timing]:
    """Focus (router, sorting and attention) against dense causal SDPA, forward, batch 1.

    q, k, v and the hidden states are random numbers of the layer's shape. Group ids are drawn anew for every call with
    the measured shares, so that no call finds the group sizes of the one before; their drawing is not timed.
    """
    generator = torch.Generator().manual_seed(seed)
    contests = _contests(shape, router, lengths, generator)
    for length, measured in races(contests, repeats, seconds, router.projection.device):
        yield dense_and_focus(length, measured)


def _contests(
    shape: AttentionShape, router: Router, lengths: Sequence[int], generator: torch.Generator
) -> Iterator[Contest]:
    config, device = router.config, router.projection.device

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, shape.dtype)

    def contest(length: int) -> Contest:
        q = random(1, shape.heads, length, shape.width)
        k, v = (random(1, shape.kv_heads, length, shape.width) for _ in range(2))
        # Repeated before the clock starts: the dense side is to be as fast as it can be.
        dense_k, dense_v = (x.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for x in (k, v))
        hidden = random(1, length, router.hidden_size)
        ids: dict[str, Tensor] = {}

        def draw() -> None:
            for name, shares, top_k in (
                ("query_groups", shape.query_shares, config.query_top_k),
                ("key_groups", shape.key_shares, config.key_top_k),
            ):
                ids[name] = draw_groups(shares, length, top_k, generator).to(device)

        @torch.no_grad()
        def dense() -> Tensor:
            return scaled_dot_product_attention(q, dense_k, dense_v, is_causal=True)

        @torch.no_grad()
        def focus() -> object:
            router(hidden)  # its cost counts; the ids used are the drawn ones
            sizes = {"num_groups": config.num_groups, "window": config.window, "num_sinks": config.num_sinks}
            return focus_attention(q, k, v, **ids, **sizes, backend=config.backend)  # type: ignore[arg-type]

        return Contest(length, [Contender("dense", dense), Contender("focus", focus, draw)])

    return map(contest, lengths)
