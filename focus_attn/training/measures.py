"""How the routers are doing: how even, how settled, how much of the attention they keep, and whether they collapse."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from focus_attn.evaluation.groups import observe_routing
from focus_attn.training.balance import largest_shares, routed_layers
from focus_attn.training.objectives import covered
from focus_attn.training.observe import check_blocks, observe_layers
from focus_attn.visibility import memberships

if TYPE_CHECKING:
    from focus_attn.model import FocusModel

COLLAPSED_SHARE = 0.9  # of the keys, in one group
DEAD_SHARE = 0.001  # of the keys: a group with fewer is as good as empty


class Dominance(NamedTuple):
    """Share of the keys in a router's largest group, over all routers of all layers; 1 / K when perfectly even."""

    mean: float
    worst: float


def group_dominance(loads: Tensor) -> Dominance:
    """From loads [layers, R, K], as `StepResult` has them."""
    if not loads.any():
        raise ValueError("`loads` is empty: no token was routed")
    mean, worst = largest_shares(loads)
    return Dominance(mean.item(), worst.item())


def collapsed_routers(model: FocusModel, loads: Tensor) -> list[str]:
    """A sentence for each router that has collapsed: one group with nearly all keys, or most groups with none."""
    sentences = []
    for (layer_idx, router), load in zip(routed_layers(model), loads.cpu(), strict=True):
        for head, counts in enumerate(load[: router.num_routers]):
            if counts.sum() == 0:
                continue
            shares = counts / counts.sum()
            dead, groups = int((shares < DEAD_SHARE).sum()), len(shares)
            where = f"layer {layer_idx}" + (f", key/value head {head}" if router.num_routers > 1 else "")
            if shares.max() > COLLAPSED_SHARE and groups > 1:
                sentences.append(f"{where}: group {int(shares.argmax())} holds {shares.max():.0%} of the keys")
            elif dead > groups / 2:
                sentences.append(f"{where}: {dead} of {groups} groups are empty")
    return sentences


def probe_groups(model: FocusModel, probe: Tensor) -> dict[int, Tensor]:
    """The key groups of every routed layer on a fixed probe of tokens [B, T], without dense heads: what `stability`
    compares."""
    was_training = model.training
    model.eval()
    routings = observe_routing(model, probe)
    model.train(was_training)
    return {index: routings[index].key_groups[:, router.choosing.cpu()] for index, router in routed_layers(model)}


def stability(before: dict[int, Tensor], after: dict[int, Tensor]) -> float:
    """Share of the tokens whose key groups are the same in both, mean over layers and routers."""
    if before.keys() != after.keys() or any(before[index].shape != after[index].shape for index in before):
        raise ValueError("`before` and `after` must come from the same probe and the same layers")
    same = []
    for layer_idx, groups in before.items():
        num_groups = int(max(groups.max(), after[layer_idx].max())) + 1
        then, now = memberships(groups, num_groups), memberships(after[layer_idx], num_groups)
        same.append((then == now).all(-1).float().mean())
    return torch.stack(same).mean().item()


@torch.no_grad()
def coverage(model: FocusModel, token_blocks: Tensor, *, queries: int = 128, seed: int = 0) -> dict[int, float]:
    """Share of the frozen model's attention that each routed layer keeps, past the window, by layer index.

    Attention counts by what it adds to the layer's output: times the length of the key's value. Pairs that share
    several groups count once.
    """
    check_blocks(token_blocks, model.focus_config)
    seen = observe_layers(model, token_blocks, queries, seed)
    kept = {}
    for layer_idx, router in routed_layers(model):
        parts = []
        for one in seen[layer_idx]:
            attention = one.attention(router)
            assert one.inputs.hidden is not None
            routing = router(one.inputs.hidden)
            num_groups = router.config.num_groups
            query, key = (memberships(ids[0], num_groups) for ids in (routing.query_groups, routing.key_groups))
            classes, membership = _classes(query[:, one.positions], key)
            parts.append(covered(attention, classes, membership).mean())
        kept[layer_idx] = torch.stack(parts).mean().item()
    return kept


def _classes(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Assignments in which a pair that shares several groups counts once, [R, C, n] and [R, C, T].

    With one group on either side these are the memberships, [R, n, K] and [R, T, K]. Otherwise queries are classed by
    their whole set, as the backends do.
    """
    if min(int(query.sum(-1).max()), int(key.sum(-1).max())) == 1:
        return query.float().transpose(1, 2), key.float().transpose(1, 2)
    sets, which = torch.unique(query.flatten(0, 1), dim=0, return_inverse=True)
    own = torch.nn.functional.one_hot(which.view(query.shape[:2]), len(sets)).float()  # [R, n, C]
    meets = (key.float() @ sets.float().T > 0).float()  # [R, T, C]
    return own.transpose(1, 2), meets.transpose(1, 2)
