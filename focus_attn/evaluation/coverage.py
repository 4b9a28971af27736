"""How much of the base model's attention Focus leaves visible, layer by layer and head by head.

The base model runs as it is; beside it the routers say what would be visible. Of a query's attention one part falls
into the window, one on sinks beyond it, and the rest is *distant*: the part that groups decide about. What they keep of
it stands beside what others keep of it with the same number of distant pairs:

    best        every query keeps the distant keys it attends to most, as many as its groups show it, in each head
    best_shared the same, but one choice for all heads of a router, which share its groups: what they attend to most
                together
    best_total  as many pairs in the block and head, but spread over the queries as serves them best
    random      the same ids dealt out to the block's tokens at random: what is kept on average, which is the chance
                that two tokens share a group

Some distant keys act as sinks (`attention_view.py`): whatever shows those few keys keeps much attention. *Content* is
the distant attention without them, set against the best and the random groups by itself.

A dense head (`dense_heads`) keeps everything and so do its best and its random groups. Figures are over all heads of
the routed layers, and once more over those alone whose router chooses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from focus_attn.attention.plan import count_pairs
from focus_attn.config import FocusConfig
from focus_attn.evaluation.attention_mass import SHARES, Mass, mean_mass
from focus_attn.evaluation.attention_view import AttentionView, Watcher, watch_attention
from focus_attn.evaluation.bootstrap import Interval, Labels, mean_interval
from focus_attn.model import FocusModel
from focus_attn.progress import Count
from focus_attn.router import Routing
from focus_attn.visibility import EVERYTHING, Pattern, memberships

Each = TypeVar("Each")


@dataclass(frozen=True)
class RouterCoverage:
    """One router on the text: sizes, not attention."""

    router: int
    pairs_kept: float  # visible over causal pairs
    distant_pairs_kept: float  # visible over causal pairs that are neither in the window nor with a sink
    query_shares: list[float]  # [K] of the tokens, that look into the group
    key_shares: list[float]  # [K] that belong to it
    query_confidence: float  # the softmax's largest probability, mean over tokens
    key_confidence: float
    flow: list[list[float]]  # [K][K] distant attention from query groups to key groups, sums to 1


@dataclass(frozen=True)
class LayerCoverage:
    layer_idx: int
    sliding_window: int | None
    heads: list[Mass]
    routers: list[RouterCoverage]  # head h answers to router h * R // H
    dense_heads: tuple[int, ...] = ()  # the routers whose heads keep everything

    @property
    def mass(self) -> Mass:
        return mean_mass(self.heads)

    def routed(self, of_each: Sequence[Each]) -> list[Each]:
        """Of what there is for each head, or for each router, that which is not of a dense one."""
        each = enumerate(of_each)
        return [one for at, one in each if at * len(self.routers) // len(of_each) not in self.dense_heads]

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer_idx": self.layer_idx,
            "sliding_window": self.sliding_window,
            "dense_heads": list(self.dense_heads),
            "mass": self.mass.to_dict(),
            "heads": [head.to_dict() for head in self.heads],
            "routers": [asdict(router) for router in self.routers],
        }


@dataclass(frozen=True)
class Kept:
    """What is kept over some heads, all of them counting the same."""

    routers: int  # that these heads answer to
    pairs_kept: float  # mean over the routers
    distant_pairs_kept: float
    by_block: list[Mass]  # mean over the heads
    documents: Labels | None  # that each block lies in

    @property
    def mass(self) -> Mass:
        return mean_mass(self.by_block)

    def interval(self, name: str) -> Interval | None:
        """One of `SHARES` with its bootstrap over blocks, those of one document drawn together; None where a block has
        nothing to have a share of."""
        wholes = [getattr(mass, SHARES[name][1]) for mass in self.by_block]
        shares = [mass.share(name) for mass in self.by_block]
        known = [share for share in shares if share is not None]
        return mean_interval(known, wholes, together=self.documents) if len(known) == len(shares) else None

    def to_dict(self) -> dict[str, Any]:
        intervals = {name: self.interval(name) for name in SHARES}
        return {
            "routers": self.routers,
            "pairs_kept": self.pairs_kept,
            "distant_pairs_kept": self.distant_pairs_kept,
            "mass": self.mass.to_dict(),
            "intervals": {name: interval and interval.to_dict() for name, interval in intervals.items()},
            "by_block": [mass.to_dict() for mass in self.by_block],
        }


@dataclass(frozen=True)
class Coverage:
    """What `coverage_by_layer` measured."""

    layers: list[LayerCoverage]
    kept: Kept  # over all heads of these layers
    routed: Kept  # over those that are not dense
    blocks: int
    length: int
    queries: int  # of each block
    seconds: float

    @property
    def mass(self) -> Mass:
        return self.kept.mass

    def interval(self, name: str) -> Interval | None:
        return self.kept.interval(name)

    def to_dict(self) -> dict[str, Any]:
        documents = self.kept.documents
        return {
            "blocks": self.blocks,
            "documents": None if documents is None else list(documents),
            "length": self.length,
            "queries": self.queries,
            "seconds": self.seconds,
            **self.kept.to_dict(),
            "routed": self.routed.to_dict(),
            "layers": [layer.to_dict() for layer in self.layers],
        }


@torch.no_grad()
def coverage_by_layer(
    model: FocusModel,
    blocks: Tensor,
    *,
    queries: int | None = 128,
    documents: Labels | None = None,
    weights_at_once: int | None = None,
    watchers: Sequence[Watcher] = (),
    progress: Count | None = None,
) -> Coverage:
    """Run the base model over blocks of tokens [N, T] and measure what the active adapter would leave visible.

    Routers read the base model's own hidden states, so that each layer is judged by itself.

    Args:
        blocks: ids without padding, T above the window.
        queries: how many queries of each block are looked at, evenly spread over those that have distant keys; None:
            all of them. Pairs and group sizes are always those of every token.
        documents: a label for each block, such as the number of the document it lies in: what intervals draw together.
        weights_at_once: how many attention weights to hold at a time.
        watchers: shown what is measured, layer by layer and chunk by chunk.
    """
    positions = _query_positions(blocks, model.focus_config, queries)
    if documents is not None and len(documents) != len(blocks):
        raise ValueError(f"`documents` must be a label for each of the {len(blocks)} blocks, got {len(documents)}")
    under_way: dict[tuple[int, int], _BlockSums] = {}  # by layer and block
    done: dict[tuple[int, int], _Block] = {}
    began = time.perf_counter()

    def look(view: AttentionView) -> None:
        place = view.layer_idx, view.block
        if place not in under_way:
            under_way[place] = _BlockSums(view)
        under_way[place].add(view)
        for watch in watchers:
            watch(view)
        if view.last:
            done[place] = under_way.pop(place).finish(len(positions))

    watch_attention(model, blocks, positions, look, weights_at_once=weights_at_once, progress=progress)
    indices, numbers = sorted({layer_idx for layer_idx, _ in done}), range(len(blocks))
    layers = [_summary(layer_idx, [done[layer_idx, number] for number in numbers]) for layer_idx in indices]
    heads = [[done[layer_idx, number].heads for layer_idx in indices] for number in numbers]
    every = [replace(layer, dense_heads=()) for layer in layers]  # as if none were dense
    return Coverage(
        layers,
        _kept(every, heads, documents),
        _kept(layers, heads, documents),
        len(blocks),
        blocks.shape[1],
        len(positions),
        time.perf_counter() - began,
    )


def _query_positions(blocks: Tensor, config: FocusConfig, queries: int | None) -> Tensor:
    if blocks.dim() != 2 or blocks.is_floating_point() or not len(blocks):
        raise ValueError(f"`blocks` must be [blocks, tokens] ids, at least one block, got {list(blocks.shape)}")
    if queries is not None and queries < 1:
        raise ValueError(f"`queries` must be at least 1, or None for all, got {queries}")
    first = config.window + config.num_sinks + 1  # the first query with a distant key
    there_are = blocks.shape[1] - first
    if there_are < 1:
        raise ValueError(
            f"blocks of {blocks.shape[1]} tokens have nothing beyond a window of {config.window} and "
            f"{config.num_sinks} sinks: use longer blocks"
        )
    wanted = min(queries or there_are, there_are)
    return first + (2 * torch.arange(wanted) + 1) * there_are // (2 * wanted)


class _Block(NamedTuple):
    """One layer on one block."""

    heads: list[Mass]
    sizes: dict[str, Tensor]  # each [R, ...]: the fields of `RouterCoverage`
    sliding_window: int | None
    dense_heads: tuple[int, ...]


class _BlockSums:
    """One layer on one block: sums over queries, [H] in fp64, and what its routers do with all tokens."""

    def __init__(self, view: AttentionView) -> None:
        heads, routers, device = len(view.weights), len(view.shared), view.weights.device
        zeros = torch.zeros(heads, dtype=torch.float64, device=device)
        self.window, self.sinks, self.distant, self.kept, self.apart = (zeros.clone() for _ in range(5))
        self.best, self.best_shared, self.pairs = (zeros.clone() for _ in range(3))  # pairs: distant ones kept
        self.acting, self.acting_kept, self.content_best = (zeros.clone() for _ in range(3))
        self.largest = LargestValues(heads, device)
        num_groups = view.pattern.num_groups
        self.flow = torch.zeros(routers, num_groups, num_groups, dtype=torch.float64, device=device)
        self.random = view.by_head(_chance_to_share(view.routing, num_groups))
        self.sizes, self.sliding_window = _sizes(view), view.pattern.sliding_window
        self.dense_heads = view.router.dense_heads

    def add(self, view: AttentionView) -> None:
        shared, pairs = view.by_head(view.shared), view.by_head(view.kept)
        self.window += (view.weights * view.window).sum((1, 2))
        self.sinks += (view.weights * view.sinks).sum((1, 2))
        self.distant += view.distant.sum((1, 2))
        self.kept += (view.distant * shared).sum((1, 2))
        self.apart += (view.weights * ~(shared | view.sinks)).sum((1, 2))
        self.best += sum_of_first(view.distant.sort(-1, descending=True).values, pairs).sum(1)
        of_router = view.distant.unflatten(0, (len(view.shared), -1)).sum(1)  # [R, n, T']
        together = view.by_head(of_router.argsort(-1, descending=True))
        self.best_shared += sum_of_first(view.distant.gather(-1, together), pairs).sum(1)
        self.pairs += pairs.sum(1)
        acting = view.acts_as_sink[:, None, :]  # [H, 1, T']
        content_pairs = (shared & view.is_distant & ~acting).sum(-1)
        self.acting += (view.distant * acting).sum((1, 2))
        self.acting_kept += (view.distant * (acting & shared)).sum((1, 2))
        content = (view.distant * ~acting).sort(-1, descending=True).values
        self.content_best += sum_of_first(content, content_pairs).sum(1)
        self.largest.add(view.distant)
        query, key = (
            members / members.sum(-1, keepdim=True)  # a token in several groups counts for a part in each
            for members in (memberships(ids[0], self.flow.shape[-1]).float() for ids in view.routing[:2])
        )
        self.flow += query[:, view.positions].transpose(1, 2) @ (of_router @ key[:, : of_router.shape[-1]])

    def finish(self, queries: int) -> _Block:
        best_total = self.largest.sum_of_largest(self.pairs)
        parts = (self.window, self.sinks, self.distant, self.kept, self.best, self.best_shared, best_total)
        content_random = (self.distant - self.acting) * self.random
        rest = (
            self.distant * self.random,
            self.acting,
            self.acting_kept,
            self.content_best,
            content_random,
            self.apart,
        )
        rows = torch.stack((*parts, *rest)) / queries
        return _Block(
            [Mass(*head) for head in rows.T.tolist()],
            {**self.sizes, "flow": self.flow.cpu()},
            self.sliding_window,
            self.dense_heads,
        )


def _summary(layer_idx: int, blocks: list[_Block]) -> LayerCoverage:
    mean = {name: torch.stack([block.sizes[name] for block in blocks]).mean(0) for name in blocks[0].sizes}
    mean["flow"] /= mean["flow"].sum((1, 2), keepdim=True).clamp_min(1e-30)
    routers = [
        RouterCoverage(router, **{name: value[router].tolist() for name, value in mean.items()})  # type: ignore[arg-type]
        for router in range(len(mean["flow"]))
    ]
    heads = [mean_mass(list(head)) for head in zip(*(block.heads for block in blocks), strict=True)]
    return LayerCoverage(layer_idx, blocks[0].sliding_window, heads, routers, blocks[0].dense_heads)


def _kept(layers: list[LayerCoverage], heads: list[list[list[Mass]]], documents: Labels | None) -> Kept:
    """heads: of each block and layer. Over those that the layers call routed."""
    routers = [router for layer in layers for router in layer.routed(layer.routers)]
    return Kept(
        len(routers),
        _mean([router.pairs_kept for router in routers]),
        _mean([router.distant_pairs_kept for router in routers]),
        [
            mean_mass([head for layer, some in zip(layers, block, strict=True) for head in layer.routed(some)])
            for block in heads
        ],
        documents,
    )


def sum_of_first(values: Tensor, how_many: Tensor) -> Tensor:
    """The sum of each row's first `how_many` values. values [..., n, T], how_many [..., n] -> [..., n]."""
    sums = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
    return sums.gather(-1, how_many[..., None])[..., 0]


class LargestValues:
    """Sums of the largest of many values between 0 and 1 for each head, without keeping the values.

    A histogram over the leading 16 bits of their fp32 form, which are in the order of the values: a bin is less than
    1 % wide, and only the bin at the threshold is shared out by its mean.
    """

    BINS = 0x3F80 + 1  # 1.0 is 0x3F800000

    def __init__(self, heads: int, device: torch.device) -> None:
        self.counts, self.sums = torch.zeros(2, heads, self.BINS, dtype=torch.float64, device=device)

    def add(self, values: Tensor) -> None:
        """values [H, ...] fp32."""
        heads = len(values)
        flat = values.reshape(heads, -1)
        bins = (flat.view(torch.int32) >> 16).long()
        bins += self.BINS * torch.arange(heads, device=values.device)[:, None]
        for total, weights in ((self.counts, None), (self.sums, flat.double().flatten())):
            total += torch.bincount(bins.flatten(), weights, heads * self.BINS).view(heads, -1)

    def sum_of_largest(self, how_many: Tensor) -> Tensor:
        """[H] -> [H]."""
        counts, sums = self.counts.flip(1).cumsum(1), self.sums.flip(1).cumsum(1)  # of this bin and those above it
        at = torch.searchsorted(counts, how_many[:, None].to(counts.dtype)).clamp_max(self.BINS - 1)
        above = [torch.nn.functional.pad(total, (1, 0)).gather(1, at)[:, 0] for total in (counts, sums)]
        here = [total.flip(1).gather(1, at)[:, 0] for total in (self.counts, self.sums)]
        return above[1] + (how_many - above[0]) * here[1] / here[0].clamp_min(1)


def _chance_to_share(routing: Routing, num_groups: int) -> Tensor:
    """[R] the chance that a query and a key, each drawn from all tokens, share a group."""
    chances = []
    for query, key in zip(routing.query_groups[0], routing.key_groups[0], strict=True):
        (queries, of_queries), (keys, of_keys) = (
            torch.unique(memberships(ids, num_groups), dim=0, return_counts=True) for ids in (query, key)
        )
        meet = (queries.double() @ keys.double().T) > 0
        chances.append((of_queries.double() @ meet.double() @ of_keys.double()) / (len(query) * len(key)))
    return torch.stack(chances)


def _sizes(view: AttentionView) -> dict[str, Tensor]:
    """What one block has of each field of `RouterCoverage` but the flow, [R, ...] on the CPU."""
    routing, tokens, pattern = view.routing, view.tokens, view.pattern
    visible = count_pairs(routing.query_groups, routing.key_groups, tokens, pattern)[0].double()
    # Groups that never meet leave the window and the sinks; a window without end leaves whatever can be reached.
    apart, two_groups = torch.zeros_like(routing.query_groups[:, :1, :, :1]), replace(pattern, num_groups=2)
    near = count_pairs(apart, apart + 1, tokens, two_groups)[0].double()
    reachable = count_pairs(apart, apart, tokens, replace(two_groups, window=EVERYTHING))[0].double()
    causal = count_pairs(apart, apart, tokens, Pattern(1, EVERYTHING))[0].double()
    query, key = (memberships(ids, pattern.num_groups)[0].double().mean(1) for ids in routing[:2])
    temperature = view.router.config.temperature
    confident = [(scores[0] / temperature).softmax(-1).amax(-1).mean(-1).double() for scores in routing[2:]]
    sizes = {
        "pairs_kept": visible / causal,
        "distant_pairs_kept": (visible - near) / (reachable - near).clamp_min(1),
        "query_shares": query,
        "key_shares": key,
        "query_confidence": confident[0],
        "key_confidence": confident[1],
    }
    return {name: value.cpu() for name, value in sizes.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
