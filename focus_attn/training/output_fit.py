"""The second fit: a layer's routers by what the output of its attention loses.

The coverage fit keeps attention, as much of it as the budget buys. What the rest is worth is for the model to say: with
S from `loss_gradients.py` an error e of the layer's output costs |e S|^2 / 2. The forward is that of serving, hard
groups and a softmax over what they leave; the backward goes through soft assignments, which meet every pair of the few
queries that are looked at. Nothing goes through the model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.layer import AttentionInputs
from focus_attn.training.layer_fit import CROWDING_WEIGHT, ObservedLayer, scores_by_side
from focus_attn.training.objectives import crowding
from focus_attn.training.observe import Observation

TEMPERATURE = 0.5  # of the soft assignments that the backward goes through
BUDGET_WEIGHT = 2.0
WARMUP = 10


class Lesson(NamedTuple):
    """n queries of one block: what they attend to, and what comes of it. Hkv heads of G queries each."""

    hidden: Tensor  # [T, d] normalised
    positions: Tensor  # [n]
    attention: Tensor  # [Hkv, G, n, T] of the dense layer
    elsewhere: Tensor  # [Hkv, G, n, 1] what goes to learned sinks
    near: Tensor  # [n, T] visible whatever the router says
    far: Tensor  # [n, T]
    v: Tensor  # [Hkv, 1, T, Dv]
    output: Tensor  # [n, H * Dv] of the dense layer


def make_lesson(seen: Observation, window: int, num_sinks: int) -> Lesson:
    inputs, positions = seen.inputs, seen.positions
    keys = torch.arange(inputs.k.shape[2], device=positions.device)
    distance = positions[:, None] - keys
    reachable = distance >= 0
    if inputs.sliding_window is not None:
        reachable &= distance < inputs.sliding_window
    attention = _attention(inputs, reachable)
    near = reachable & ((distance <= window) | (keys < num_sinks))
    v = inputs.v[0][:, None]
    elsewhere = 1 - attention.float().sum(-1, keepdim=True)
    if inputs.sink_logits is None:
        elsewhere = torch.zeros_like(elsewhere)
    lesson = Lesson(seen.hidden, positions, attention, elsewhere, near, reachable & ~near, v, v)
    return lesson._replace(output=output(lesson, reachable.to(attention.dtype)[None]))


def _attention(inputs: AttentionInputs, reachable: Tensor) -> Tensor:
    """[Hkv, G, n, T] in the model's dtype. reachable: [n, T]."""
    q, k = inputs.q[0], inputs.k[0]
    scores = (q.unflatten(0, (k.shape[0], -1)) @ k[:, None].transpose(-1, -2)).float() * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    scores = scores.masked_fill(~reachable, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    if inputs.sink_logits is not None:
        lse = torch.logaddexp(lse, inputs.sink_logits.float().view(*scores.shape[:2], 1, 1))
    return (scores - lse).exp().to(k.dtype)


def output(lesson: Lesson, visible: Tensor) -> Tensor:
    """The layer's attention [n, H * Dv] where it is cut down to what is visible, [R, n, T]."""
    kept = lesson.attention * visible[:, None].to(lesson.attention.dtype)
    total = kept.float().sum(-1, keepdim=True) + lesson.elsewhere
    out = (kept @ lesson.v).float() / total.clamp_min(torch.finfo(torch.float32).tiny)
    return out.permute(2, 0, 1, 3).flatten(1)


def cost(lesson: Lesson, visible: Tensor, factor: Tensor) -> Tensor:
    """Nats a token."""
    return (output(lesson, visible) - lesson.output).matmul(factor).square().sum(-1).mean() / 2


def cost_of_nearness(layer: ObservedLayer, factor: Tensor) -> float:
    """What it costs to see the window and the sinks alone: what there is to win. Dense heads see all as ever."""
    config, dense = layer.router.config, list(layer.router.dense_heads)
    total = 0.0
    for one in layer.seen:
        lesson = make_lesson(one, config.window, config.num_sinks)
        visible = lesson.near[None]
        if dense:
            visible = visible.repeat(layer.router.num_routers, 1, 1)
            visible[dense] = lesson.near | lesson.far
        total += cost(lesson, visible, factor).item()
    return total / len(layer.seen)


def assignments(scores: Tensor, k: int) -> Tensor:
    """Groups of every token, [R, K, T] with ones and zeros, and soft ones in gradient."""
    soft = (scores / TEMPERATURE).softmax(1)
    if k > 1 and k < scores.shape[1]:  # each group by itself, against the scores that stand at the edge
        best = scores.topk(k + 1, dim=1).values
        soft = ((scores - best[:, k - 1 :].mean(1, keepdim=True)) / TEMPERATURE).sigmoid()
    hard = torch.zeros_like(scores).scatter_(1, scores.topk(k, dim=1).indices, 1.0)
    return hard + soft - soft.detach()


def fit_output(
    layer: ObservedLayer,
    factor: Tensor,
    alone: float,
    steps: int,
    learning_rate: float,
    seed: int,
    far_budget: float,
    cap: float,
) -> float:
    """Fit the layer's router, from where it is. -> what is still lost, as a share of what nearness alone loses, which
    is `alone`."""
    if not alone > 0:
        return 0.0
    router, config = layer.router, layer.router.config
    lessons = [make_lesson(one, config.window, config.num_sinks) for one in layer.seen]
    generator = torch.Generator().manual_seed(seed * 100_003 + layer.layer_idx)
    order = torch.randperm(len(lessons), generator=generator).tolist()
    projection, centroids = (
        getattr(router, name).detach()[None].clone().requires_grad_() for name in ("projection", "centroids")
    )
    bias = router.served_bias[None]
    optimizer = torch.optim.Adam([projection, centroids], lr=learning_rate, betas=(0.9, 0.99))

    def visible(lesson: Lesson) -> tuple[Tensor, Tensor, Tensor]:
        """[R, n, T]; the share of the far pairs among it; the key groups."""
        scores = scores_by_side(projection, centroids, bias, lesson.hidden[None])
        query = assignments(scores[0], config.query_top_k)[..., lesson.positions]
        key = assignments(scores[-1], config.key_top_k)
        shared = query.transpose(1, 2) @ key
        if min(config.query_top_k, config.key_top_k) > 1:
            shared = shared.clamp_max(1.0)
        far = shared * lesson.far
        free = far if router.opening is None else far[router.choosing]  # whom the budget is for
        return lesson.near + far, free.sum() / (lesson.far.sum() * len(free)).clamp_min(1), key

    with torch.enable_grad():
        for step in range(steps):
            fall = max(0.05, 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * fall * min(1.0, (step + 1) / WARMUP)
            lesson = lessons[order[step % len(order)]]
            seen, kept, key = visible(lesson)
            loss = cost(lesson, seen, factor) / alone
            loss = loss + BUDGET_WEIGHT * (kept / far_budget - 1).clamp_min(0).square() / 2
            loss = loss + CROWDING_WEIGHT * crowding(key, cap).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        router.projection.copy_(projection[0])
        router.centroids.copy_(centroids[0])
        return sum(cost(lesson, visible(lesson)[0], factor).item() for lesson in lessons) / len(lessons) / alone
