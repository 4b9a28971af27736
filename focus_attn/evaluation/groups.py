"""What the groups hold: the tokens that stand out in each."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from focus_attn.model import FocusModel
from focus_attn.router import Routing
from focus_attn.visibility import memberships


class Group(NamedTuple):
    """One group of one router."""

    group_id: int
    key_share: float  # of the tokens that belong to it
    query_share: float  # of the tokens that look into it
    key_tokens: list[str]  # most over-represented among those that belong to it
    query_tokens: list[str]


class RouterGroups(NamedTuple):
    layer_idx: int
    router: int
    groups: list[Group]


@torch.no_grad()
def observe_routing(model: FocusModel, blocks: Tensor) -> dict[int, Routing]:
    """What every routed layer decides on blocks of tokens [B, T], on the CPU: groups [B, R, T, k], no scores."""
    seen: dict[int, list[Routing]] = {}

    def keep(layer_idx: int, routing: Routing) -> Routing:
        seen.setdefault(layer_idx, []).append(routing)
        return routing

    device = next(model.parameters()).device
    decoder = model.base_model.get_decoder()  # type: ignore[operator]
    with model.override_routing(keep):
        for block in blocks:
            decoder(input_ids=block[None].to(device), use_cache=False)
    empty = torch.empty(0)
    return {
        layer_idx: Routing(
            torch.cat([routing.query_groups for routing in routings]).cpu(),
            torch.cat([routing.key_groups for routing in routings]).cpu(),
            empty,
            empty,
        )
        for layer_idx, routings in seen.items()
    }


def group_shares(groups: Tensor, num_groups: int) -> Tensor:
    """Share of the tokens in each group, [B, R, T, k] -> [R, K]; rows sum to k."""
    return memberships(groups, num_groups).float().mean((0, 2))


def top_tokens(
    routing: Routing,
    blocks: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    num_groups: int,
    layer_idx: int,
    router: int,
    count: int = 12,
) -> RouterGroups:
    """The tokens that a group has most more of than the text has, for each group of one router."""
    ids = blocks.flatten()
    key_shares, query_shares = (
        group_shares(side, num_groups)[router].tolist() for side in (routing.key_groups, routing.query_groups)
    )
    keys, queries = (side[:, router].flatten(0, 1) for side in (routing.key_groups, routing.query_groups))
    groups = [
        Group(
            index,
            key_shares[index],
            query_shares[index],
            _outstanding(ids, (keys == index).any(-1), tokenizer, count),
            _outstanding(ids, (queries == index).any(-1), tokenizer, count),
        )
        for index in range(num_groups)
    ]
    return RouterGroups(layer_idx, router, groups)


def _outstanding(ids: Tensor, inside: Tensor, tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """By how many more there are than chance would put there: rare tokens do not crowd out common ones."""
    everywhere, here = Counter(ids.tolist()), Counter(ids[inside].tolist())
    share = inside.float().mean().item()
    excess = {token: found - share * everywhere[token] for token, found in here.items()}
    best = sorted((token for token in excess if excess[token] > 0), key=lambda token: (-excess[token], token))
    return [str(tokenizer.decode([token])) for token in best[:count]]
