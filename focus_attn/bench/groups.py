"""Group ids to measure with: random ones of a given skew, or those of real text laid end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# (length T, generator) -> query_groups [1, R, T, query_k], key_groups [1, R, T, key_k], on the generator's device
Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Ids:
    """How many ids a token has, from how many groups, and whether both sides have the same."""

    num_groups: int = 8
    query_k: int = 1
    key_k: int = 1
    routers: int = 1
    shared: bool = False

    def __post_init__(self) -> None:
        for name, k in (("query-k", self.query_k), ("key-k", self.key_k)):
            if not 1 <= k <= self.num_groups:
                raise ValueError(f"--{name} must lie between 1 and the {self.num_groups} groups, got {k}")
        if self.shared and self.query_k != self.key_k:
            raise ValueError(
                f"--shared gives queries and keys the same ids, so --query-k ({self.query_k}) and --key-k "
                f"({self.key_k}) must be equal: change one of them or use --asymmetric"
            )


def drawing(skew: str, ids: Ids) -> Draw:
    """What `--skew` asks for: "uniform", "largest:0.4" (one group with that share), or a JSON file.

    The file holds either `query_shares` and `key_shares`, the share of the tokens in each group, [K] or [R][K], or
    `query_groups` and `key_groups`, the ids of a real text, [R][T][k].
    """
    if skew == "uniform":
        return _by_shares(*2 * (torch.full((1, ids.num_groups), 1 / ids.num_groups),), ids)
    kind, _, amount = skew.partition(":")
    if kind == "largest":
        return _by_shares(*2 * (_one_large(amount, ids.num_groups),), ids)
    path = Path(skew)
    if path.suffix != ".json":
        raise ValueError(f"--skew must be uniform, largest:SHARE such as largest:0.4, or a .json file, got {skew!r}")
    return _from_file(path, ids)


def draw_groups(shares: Tensor, length: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Distinct random ids with the given shares: [R, K] -> [1, R, length, top_k], on the generator's device."""
    weights = (
        shares.float().to(generator.device) + 1e-6
    )  # an empty group must still be drawn when `top_k` asks for many
    if top_k == 1:
        return torch.multinomial(weights, length, replacement=True, generator=generator)[None, ..., None]
    return torch.stack([torch.multinomial(row.expand(length, -1), top_k, generator=generator) for row in weights])[None]


def _by_shares(query_shares: Tensor, key_shares: Tensor, ids: Ids) -> Draw:
    query_shares, key_shares = (_in_turn(shares, ids.routers) for shares in (query_shares, key_shares))

    def draw(length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        query = draw_groups(query_shares, length, ids.query_k, generator)
        return query, query if ids.shared else draw_groups(key_shares, length, ids.key_k, generator)

    return draw


def _by_text(query_groups: Tensor, key_groups: Tensor, ids: Ids) -> Draw:
    """A text's ids, repeated to the length and begun at another token each time, so that no two calls meet the same."""

    def draw(length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = query_groups.shape[1]
        start = torch.randint(tokens, (), generator=generator, device=generator.device)
        at = (start + torch.arange(length, device=generator.device)) % tokens
        query, key = (side.to(generator.device)[:, at][None] for side in (query_groups, key_groups))
        return query, query if ids.shared else key

    return draw


def _one_large(amount: str, num_groups: int) -> Tensor:
    try:
        share = float(amount)
    except ValueError:
        share = 0.0
    if not 1 / num_groups <= share < 1 or num_groups == 1:
        raise ValueError(
            f"--skew largest:{amount or '?'} must give the largest of {num_groups} groups a share between "
            f"{1 / num_groups:.3f} (even groups) and 1, as in largest:0.4"
        )
    shares = torch.full((1, num_groups), (1 - share) / (num_groups - 1))
    shares[0, 0] = share
    return shares


def _from_file(path: Path, ids: Ids) -> Draw:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--skew: there is no file {str(path)!r}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"--skew: {str(path)!r} is not JSON ({error})") from None
    content = content if isinstance(content, dict) else {}
    if {"query_shares", "key_shares"} <= content.keys():
        sides = [torch.tensor(content[name], dtype=torch.float32) for name in ("query_shares", "key_shares")]
        sides = [side if side.dim() == 2 else side[None] for side in sides]
        for side in sides:
            if side.dim() != 2 or side.shape[1] != ids.num_groups or bool((side < 0).any()):
                raise ValueError(
                    f"--skew: shares in {str(path)!r} must be {ids.num_groups} numbers (--groups) of at least 0, "
                    f"got shape {list(side.shape)}"
                )
        return _by_shares(sides[0], sides[1], ids)
    if {"query_groups", "key_groups"} <= content.keys():
        sides = [torch.tensor(content[name], dtype=torch.int64) for name in ("query_groups", "key_groups")]
        for name, side, k in zip(("query", "key"), sides, (ids.query_k, ids.key_k), strict=True):
            if side.dim() != 3 or side.shape[2] != k or side.shape[:2] != sides[0].shape[:2] or side.numel() == 0:
                raise ValueError(
                    f"--skew: `{name}_groups` in {str(path)!r} must be [routers][tokens][{k}] (--{name}-k), as many "
                    f"routers and tokens on both sides, got shape {list(side.shape)}"
                )
            if int(side.min()) < 0 or int(side.max()) >= ids.num_groups:
                raise ValueError(
                    f"--skew: {str(path)!r} holds ids from {int(side.min())} to {int(side.max())}: they must lie in "
                    f"0..{ids.num_groups - 1}, or --groups be larger"
                )
        return _by_text(_in_turn(sides[0], ids.routers), _in_turn(sides[1], ids.routers), ids)
    raise ValueError(
        f"--skew: {str(path)!r} must hold `query_shares` and `key_shares`, or `query_groups` and `key_groups`"
    )


def _in_turn(rows: Tensor, routers: int) -> Tensor:
    """As many routers as asked for, taken from those there are in turn: [N, ...] -> [routers, ...]."""
    return rows[torch.arange(routers) % len(rows)]
