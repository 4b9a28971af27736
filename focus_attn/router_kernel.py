"""A router's forward as one Triton kernel.

In eager PyTorch a router is ten launches, and takes as long as the sparse attention that it is for. Here a program
reads some tokens' hidden states once and in their own dtype, and walks over their width with the sum of squares and
the products with the combined weight side by side: dividing by the root mean square can wait to the end.

Scores must be those of fp32, or ids would flip. bf16 hidden states are exact in bf16, so the weight is written as a sum
of three bf16 parts, 24 bits together: three products on tensor cores, exact but for how they are summed. The small
parts are summed apart, since tensor cores cut off digits whenever they add to a large sum. Other dtypes take TF32 in
three products, 22 bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_attn.attention.launch import brought_into_step, ceil_div, launch_variant, power_of_2, shared_memory
from focus_attn.kernel_use import launching_on, needs_operators
from focus_attn.router import Router, Routing
from focus_attn.router_training import EPS, TrainedScores, goes_by_hand
from focus_attn.router_weight import forget_weight, kept_weight, split, weight_parts

MOST_GROUPS = 128  # the scores of one router lie in one tile, which can have no more columns than this
MOST_CHOICES = 8  # each is one more search for the largest score
_variants: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


@triton.jit(do_not_specialize=["rows", "tokens"], do_not_specialize_on_alignment=["BIAS"])
def _router_kernel(
    HIDDEN, WEIGHT, BIAS, QUERY_SCORES, KEY_SCORES, QUERY_IDS, KEY_IDS, rows, tokens,
    D: tl.constexpr, SIDES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    QUERY_K: tl.constexpr, KEY_K: tl.constexpr, MOST_K: tl.constexpr,
    PARTS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_T rows of HIDDEN [B * T, D] and BLOCK_R of the SIDES * R routers, whose groups are padded to
    BLOCK_K. WEIGHT is [PARTS, SIDES * R * K, D]; the rest is as in a Routing, contiguous."""
    programs_a_row: tl.constexpr = (SIDES * R + BLOCK_R - 1) // BLOCK_R
    COLUMNS: tl.constexpr = BLOCK_R * BLOCK_K
    row = (tl.program_id(0) // programs_a_row) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(0) % programs_a_row * BLOCK_R
    column = tl.arange(0, COLUMNS)
    router, group = first + column // BLOCK_K, column % BLOCK_K
    real = (router < SIDES * R) & (group < K)
    live = row < rows
    line = router * K + group
    d = tl.arange(0, BLOCK_D)
    hidden = HIDDEN + row.to(tl.int64)[:, None] * D + d[None, :]
    weight = WEIGHT + line[:, None] * D + d[None, :]

    squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    large, small = tl.zeros([BLOCK_T, COLUMNS], tl.float32), tl.zeros([BLOCK_T, COLUMNS], tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        if D % BLOCK_D == 0:
            x_mask, w_mask = live[:, None], real[:, None]
        else:
            inside = (start + d < D)[None, :]
            x_mask, w_mask = live[:, None] & inside, real[:, None] & inside
        x = tl.load(hidden + start, mask=x_mask, other=0.0)
        exact = x.to(tl.float32)
        squares += exact * exact
        x = x.to(WEIGHT.dtype.element_ty)
        for part in tl.static_range(PARTS):
            w = tl.load(weight + part * (SIDES * R * K * D) + start, mask=w_mask, other=0.0)
            if part == 0:
                large = tl.dot(x, tl.trans(w), large, input_precision=PRECISION)
            else:
                small = tl.dot(x, tl.trans(w), small, input_precision=PRECISION)

    scale = tl.rsqrt(tl.sum(squares, 1) / D + EPS)
    bias = tl.load(BIAS + line, mask=real, other=0.0)
    scores = (large + small) * scale[:, None] + bias[None, :]

    # [B, R, T, ...]: where a token's scores and ids lie on either side.
    batch, token = (row // tokens).to(tl.int64), row % tokens
    at = (batch[:, None] * R + (router % R)[None, :]) * tokens + token[:, None]
    keep = live[:, None] & real[None, :]
    is_query = (router < R)[None, :]
    tl.store(QUERY_SCORES + at * K + group[None, :], scores, mask=keep & is_query)
    if SIDES == 2:
        tl.store(KEY_SCORES + at * K + group[None, :], scores, mask=keep & ~is_query)

    # Like PyTorch, NaN is larger than anything.
    ranked = tl.where(real[None, :], tl.where(scores != scores, float("inf"), scores), -float("inf"))
    ranked = tl.reshape(ranked, [BLOCK_T, BLOCK_R, BLOCK_K])
    router = first + tl.arange(0, BLOCK_R)
    at = (batch[:, None] * R + (router % R)[None, :]) * tokens + token[:, None]
    keep = live[:, None] & (router < SIDES * R)[None, :]
    is_query, is_key = (router < R)[None, :], (router >= SIDES * R - R)[None, :]
    for choice in tl.static_range(MOST_K):
        best = tl.argmax(ranked, 2, tie_break_left=True)
        if choice < QUERY_K:
            tl.store(QUERY_IDS + at * QUERY_K + choice, best.to(tl.int64), mask=keep & is_query)
        if (SIDES == 2 or KEY_K != QUERY_K) and choice < KEY_K:
            tl.store(KEY_IDS + at * KEY_K + choice, best.to(tl.int64), mask=keep & is_key)
        ranked = tl.where(tl.arange(0, BLOCK_K)[None, None, :] == best[:, :, None], -float("inf"), ranked)


def route(router: Router, hidden: Tensor) -> Routing | None:
    """[B, T, d] -> Routing; None where it must come from PyTorch's operators."""
    with launching_on(hidden.device):
        return _route(router, hidden)


def _route(router: Router, hidden: Tensor) -> Routing | None:
    projection, centroids = router.projection, router.centroids  # looked up once: a module takes its time over it
    grad = torch.is_grad_enabled()
    trains = (grad or router.training) and (projection.requires_grad or centroids.requires_grad)
    if trains:
        forget_weight(router)  # what comes next may change the parameters behind their versions' back, as FSDP does
    if not _serves(router, projection, centroids, hidden):
        return None
    if trains and not grad:  # a checkpointed layer's first pass: the second, with gradients, must say the same
        return _launch_fitting(router, hidden, weight_parts(router, hidden.dtype))
    if trains:
        return _route_with_gradients(router, hidden)
    if grad and hidden.requires_grad:
        return None
    return _launch_fitting(router, hidden, kept_weight(router, projection, centroids, hidden.dtype))


def _route_with_gradients(router: Router, hidden: Tensor) -> Routing | None:
    """Ids and scores from the kernel, gradients by hand."""
    with torch.autocast(device_type=hidden.device.type, enabled=False):
        weight = router.combined_weight()
    if not goes_by_hand(weight):
        return None

    def compute() -> tuple[Tensor, ...]:
        query_ids, key_ids, *scores = _launch_fitting(router, hidden, split(weight, hidden.dtype))
        return *scores[: router.num_sides], query_ids, *([] if key_ids is query_ids else [key_ids])

    return router.routing_of(TrainedScores.apply(hidden, weight, compute))


def _launch_fitting(router: Router, hidden: Tensor, weight: Tensor) -> Routing:
    """With the tile that fits."""
    rows, routers = hidden.shape[0] * hidden.shape[1], router.num_sides * router.num_routers
    parts, size = weight.shape[0], weight.element_size()
    tile = tile_for(power_of_2(rows), routers, router.config.num_groups, parts, size, hidden.device)
    if hidden.shape[-1] % 16:  # `in_step` says why
        tile = tile._replace(tokens=min(32, tile.tokens), warps=4)
    return launch(router, hidden, weight, tile)


def _serves(router: Router, projection: Tensor, centroids: Tensor, hidden: Tensor) -> bool:
    """Nobody watches PyTorch's operators, and the sizes fit."""
    config = router.config
    return (
        not needs_operators(hidden, projection, centroids)
        and not projection.is_inference()  # such tensors have no versions
        and not centroids.is_inference()
        and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and hidden.numel() > 0
        and config.routing == "causal"
        and config.num_groups <= MOST_GROUPS
        and max(config.query_top_k, config.key_top_k) <= MOST_CHOICES
    )


def launch(router: Router, hidden: Tensor, weight: Tensor, tile: Tile) -> Routing:
    """weight: as `router_weight.py` makes it."""
    config, (batch, tokens, width) = router.config, hidden.shape
    sides, routers, groups, device = router.num_sides, router.num_routers, config.num_groups, hidden.device
    query_k, key_k = config.query_top_k, config.key_top_k
    hidden, bias = brought_into_step(hidden.contiguous()), router.served_bias.contiguous()
    query_scores = key_scores = torch.empty(batch, routers, tokens, groups, dtype=torch.float32, device=device)
    query_ids = key_ids = torch.empty(batch, routers, tokens, query_k, dtype=torch.int64, device=device)
    if sides == 2:
        key_scores = torch.empty_like(query_scores)
    if sides == 2 or key_k != query_k:
        key_ids = torch.empty(batch, routers, tokens, key_k, dtype=torch.int64, device=device)
    rows = batch * tokens
    launch_variant(
        _variants,
        (tile, width, sides, routers, groups, query_k, key_k, hidden.dtype, hidden.data_ptr() % 16 == 0, device),
        _router_kernel,
        (ceil_div(rows, tile.tokens) * ceil_div(sides * routers, tile.routers), 1, 1),
        (hidden, weight, bias, query_scores, key_scores, query_ids, key_ids, rows, tokens),
        lambda: {
            "D": width, "SIDES": sides, "R": routers, "K": groups,
            "QUERY_K": query_k, "KEY_K": key_k, "MOST_K": max(query_k, key_k),
            "PARTS": weight.shape[0], "EPS": EPS, "PRECISION": "tf32x3" if torch.version.cuda else "ieee",
            "BLOCK_T": tile.tokens, "BLOCK_R": tile.routers, "BLOCK_K": power_of_2(groups), "BLOCK_D": tile.depth,
        },
        tile.warps,
        tile.stages,
    )  # fmt: skip
    return Routing(query_ids, key_ids, query_scores, key_scores)


class Tile(NamedTuple):
    """Tokens and routers of a program, width of a step, warps, pipeline stages."""

    tokens: int
    routers: int
    depth: int
    warps: int
    stages: int


@functools.lru_cache(maxsize=1024)
def tile_for(rows: int, routers: int, groups: int, parts: int, bytes_a_weight: int, device: torch.device) -> Tile:
    """The largest tile that leaves no large part of the device idle: it reads hidden states and weights least often."""
    processors, columns = _processors(device), power_of_2(groups)
    fewest = max(1, 16 // columns)  # what a tensor core takes
    most = max(fewest, min(power_of_2(routers), MOST_GROUPS // columns))
    choices = [(tokens, most) for tokens in (128, 64)]
    choices += [(tokens, max(fewest, most // share)) for share in (2, 4, 8, 16) for tokens in (64, 32, 16)]
    # A third of the device with tiles of 64 tokens is faster than all of it with smaller ones (H200).
    enough = {128: processors * 3 // 4, 64: processors // 3, 32: processors // 3, 16: 0}
    tokens, together = next(
        choice for choice in choices if ceil_div(rows, choice[0]) * ceil_div(routers, choice[1]) >= enough[choice[0]]
    )
    depth = (64 if tokens >= 64 else 128) // (bytes_a_weight // 2)
    step = depth * (tokens + parts * together * columns) * bytes_a_weight
    stages = max(1, min(4, shared_memory(device) * 9 // 10 // step))
    return Tile(tokens, together, depth, 8 if tokens == 128 else 4, stages)


@functools.cache
def _processors(device: torch.device) -> int:
    """Triton's interpreter has none: there it is an H200's number."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
