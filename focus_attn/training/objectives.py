"""The coverage objective: routers should keep the keys that the frozen model attends to, and few others.

Of a query's attention p_ij some falls on keys that are visible whatever the router says (window, sinks); the rest is
far. With soft assignments a_i and b_j the covered mass is

    near_i + sum_j far_ij (a_i . b_j)  =  near_i + sum_g a_i[g] (sum_j far_ij b_j[g])

so one product of the far attention with b is all it takes: no gradient ever meets a [T, T] matrix.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.layer import AttentionInputs


class FarAttention(NamedTuple):
    """What n queries of one sequence attend to. R routers, G heads a router, T keys."""

    positions: Tensor  # [n] of the queries
    far: Tensor  # [R, T, G * n] attention that only a shared group can keep
    near: Tensor  # [R, G, n] attention that is kept anyway
    first: Tensor  # [n] the far keys of a query stand from here
    last: Tensor  # [n] up to before here


def far_attention(
    inputs: AttentionInputs, positions: Tensor, num_routers: int, window: int, num_sinks: int
) -> FarAttention:
    """The attention of a frozen layer for the queries at `positions`; batch 1, no padding.

    `inputs.q` holds these queries alone, [1, H, n, D]; `inputs.k` all keys, [1, Hkv, T, D].
    """
    q, k = inputs.q[0], inputs.k[0]
    kv_heads, tokens = k.shape[:2]
    keys = torch.arange(tokens, device=k.device)[:, None, None]
    grouped = q.reshape(kv_heads, -1, q.shape[-1])  # the heads of a KV head side by side: [Hkv, G' * n, D]
    scores = (k @ grouped.transpose(-1, -2)).float() * inputs.scale
    scores = scores.reshape(kv_heads, tokens, -1, len(positions))
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    distance = positions - keys
    reachable = distance >= 0
    if inputs.sliding_window is not None:
        reachable = reachable & (distance < inputs.sliding_window)
    scores = scores.masked_fill(~reachable, -math.inf)
    lse = scores.logsumexp(1, keepdim=True)
    if inputs.sink_logits is not None:
        lse = torch.logaddexp(lse, inputs.sink_logits.float().reshape(kv_heads, 1, -1, 1))
    is_far = reachable & (distance > window) & (keys >= num_sinks)
    slid_to = 0 if inputs.sliding_window is None else positions - inputs.sliding_window + 1
    first = (torch.zeros_like(positions) + slid_to).clamp_min(num_sinks)
    # A key counts by what it adds to the output, attention times the length of its value: sinks draw attention and
    # add next to nothing.
    lengths = inputs.v[0].float().norm(dim=-1)[:, :, None, None]
    share = (scores - lse).exp() * lengths
    share = share / share.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    far = share * is_far
    near = 1 - far.sum(1)
    if num_routers == 1:  # all heads answer to one router
        far, near = far.transpose(0, 1)[None], near[None]
    return FarAttention(
        positions,
        far.reshape(num_routers, tokens, -1).to(k.dtype),
        near.reshape(num_routers, -1, len(positions)),
        first,
        torch.maximum(first, positions - window),
    )


def covered(attention: FarAttention, query: Tensor, key: Tensor) -> Tensor:
    """Share of each query's attention that is kept, [R, G, n]. Assignments: query [R, K, n], key [R, K, T]."""
    by_group = (key.to(attention.far.dtype) @ attention.far).float()  # [R, K, G * n]
    by_group = by_group.unflatten(-1, (-1, len(attention.positions)))
    return attention.near + (query[:, :, None] * by_group).sum(1)


def far_pairs_kept(attention: FarAttention, query: Tensor, key: Tensor) -> Tensor:
    """Expected share of the far pairs that each router keeps, [R]."""
    members = torch.nn.functional.pad(key.cumsum(-1), (1, 0))  # [R, K, T + 1]: of the keys before a position
    reached = members[..., attention.last] - members[..., attention.first]
    return (query * reached).sum((1, 2)) / (attention.last - attention.first).sum().clamp_min(1)


def coverage_loss(attention: FarAttention, query: Tensor, key: Tensor, budget: float | Tensor) -> Tensor:
    """Mean -log of the covered attention, plus what it costs to keep more than `budget` of the far pairs, [R].

    The cost is quadratic above the budget and nothing below it. A price on every pair would drive a router to the
    corner where no query and no key share a group, which has no gradient to leave it by. budget: one, or [R].
    """
    missed = -covered(attention, query, key).clamp(1e-4, 1.0).log().mean((1, 2))
    excess = (far_pairs_kept(attention, query, key) / budget - 1).clamp_min(0)
    return missed + excess.square() / 2


def crowding(key: Tensor, largest_group: float) -> Tensor:
    """What it costs that key groups hold more than `largest_group` of the keys, [R]. Assignments: key [R, K, T].

    Quadratic above the cap and nothing below it, as with the budget: near the cap it leaves the objective its say.
    """
    members = key.sum(-1)
    share = members / members.detach().sum(1, keepdim=True).clamp_min(1)
    return (share / largest_group - 1).clamp_min(0).square().sum(1) / 2
