"""The router: hidden states -> scores -> the groups a token looks into (query side) and belongs to (key side).

Hard ids are a function of the token's own hidden state and nothing else, so they are causal and append-only:
prefill, chunked prefill, decoding and the training forward agree. Normalisation across tokens (Sinkhorn) shapes the
soft assignments that training uses, never the ids, unless `routing="paper_leaky"` asks for the published form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from focus_attn.config import FocusConfig
from focus_attn.kernel_use import kernels
from focus_attn.router_training import EPS, TrainedScores, goes_by_hand
from focus_attn.router_weight import forget_weight

# Added to the score of a dense head's first group: no hidden state outweighs it, and it is finite where logs are taken.
OPENING = 1e4


class Routing(NamedTuple):
    """What a router says of a batch of tokens. R routers, K groups."""

    query_groups: Tensor  # [B, R, T, query_k] int64
    key_groups: Tensor  # [B, R, T, key_k] int64
    query_scores: Tensor  # [B, R, T, K] fp32, bias included
    key_scores: Tensor  # [B, R, T, K] fp32, bias included


class Router(nn.Module):
    """R independent routers of one attention layer, one for each KV head or one for all.

    Plain parameters rather than `nn.Linear`s: peft's "all-linear" must not find them. They stay fp32 whatever the
    base model's dtype is: a router is tiny, and an id must not flip because of how a score was rounded.
    """

    def __init__(
        self,
        config: FocusConfig,
        hidden_size: int,
        num_routers: int,
        device: torch.device | str | None = None,
        dense_heads: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = hidden_size
        self.num_routers = num_routers
        self.dense_heads = dense_heads  # routers that send every token to one group, whatever they have learned
        self.num_sides = 1 if config.shared_router else 2  # [shared] or [query, key]
        sides, width, groups = self.num_sides, config.router_dim, config.num_groups
        make = {"dtype": torch.float32, "device": device}
        self.projection = nn.Parameter(torch.empty(sides, num_routers, hidden_size, width, **make))  # type: ignore[arg-type]
        self.centroids = nn.Parameter(torch.empty(sides, num_routers, groups, width, **make))  # type: ignore[arg-type]
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(sides, num_routers, groups, **make))  # type: ignore[arg-type]
        self.opening: Tensor | None
        if dense_heads:
            self.register_buffer("opening", torch.empty(num_routers, groups, **make), persistent=False)  # type: ignore[arg-type]
        else:
            self.opening = None  # no empty buffer: accelerate's offloading stumbles over those
        self.choosing: Tensor  # the routers that have something to choose
        choosing = torch.empty(num_routers - len(dense_heads), dtype=torch.long, device=device)
        self.register_buffer("choosing", choosing, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Random start, scaled so that scores of a normalised hidden state have unit variance."""
        for parameter, width in ((self.projection, self.hidden_size), (self.centroids, self.config.router_dim)):
            device = parameter.device if generator is None else generator.device
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device=device) / math.sqrt(width))
        self.bias.zero_()
        if self.opening is not None:
            self.opening.zero_()
            self.opening[list(self.dense_heads), 0] = OPENING
        self.choosing.copy_(torch.tensor([i for i in range(self.num_routers) if i not in self.dense_heads]))

    @property
    def served_bias(self) -> Tensor:
        """[sides, R, K]: what is added to the scores. Beside `bias`, which starts and balancing write as they like."""
        return self.bias if self.opening is None else self.bias + self.opening

    def combined_weight(self) -> Tensor:
        """[sides, R, K, d]. Projection and centroids first, small as they are: one product with hidden states then
        serves all sides, routers and groups."""
        return self.centroids @ self.projection.transpose(-1, -2)

    def _check_hidden(self, hidden: Tensor) -> None:
        if hidden.dim() != 3 or hidden.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden states must be [batch, tokens, {self.hidden_size}], got {list(hidden.shape)}: "
                "this router was made for another model width"
            )
        if hidden.device != self.projection.device:
            raise ValueError(f"hidden states are on {hidden.device}, the router on {self.projection.device}")

    def forward(self, hidden: Tensor, token_mask: Tensor | None = None) -> Routing:
        """[B, T, d] -> Routing. `token_mask` [B, T] (True = real) matters to `paper_leaky` alone."""
        self._check_hidden(hidden)
        routing = None if torch.compiler.is_compiling() else _route_by_kernel(self, hidden)
        if routing is not None:
            return routing
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            weight = self.combined_weight()

            def compute() -> tuple[Tensor, ...]:
                return self._scores_and_ids(hidden, weight, token_mask)

            by_hand = goes_by_hand(weight)
            answers = TrainedScores.apply(hidden, weight, compute) if by_hand else compute()
        routing = self.routing_of(answers)
        _check_scores(*answers[: self.num_sides])
        return routing

    def routing_of(self, answers: tuple[Tensor, ...]) -> Routing:
        """Scores of each side, then ids, as `_scores_and_ids` gives them. A shared router has one side, so that both
        are one object: backends recognise shared ids by identity."""
        scores, ids = answers[: self.num_sides], answers[self.num_sides :]
        return Routing(ids[0], ids[-1], scores[0], scores[-1])

    def _scores_and_ids(self, hidden: Tensor, weight: Tensor, token_mask: Tensor | None) -> tuple[Tensor, ...]:
        """For each side [B, R, T, K] fp32 scores, bias included; then ids, once where both sides have the same."""
        flat = nn.functional.linear(normalise(hidden), weight.flatten(0, 2), self.served_bias.flatten())
        scores = flat.unflatten(-1, self.bias.shape).permute(2, 0, 3, 1, 4).contiguous()
        ranked, config = scores, self.config
        if config.routing == "paper_leaky":
            ranked = sinkhorn(tempered(scores.detach(), config.temperature), config.sinkhorn_iters, token_mask)
        if config.query_top_k == config.key_top_k:
            return *scores.unbind(), *top_groups(ranked, config.query_top_k).unbind()
        ids = top_groups(ranked[0], config.query_top_k), top_groups(ranked[-1], config.key_top_k)
        return *scores.unbind(), *ids

    def log_assignments(self, scores: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Log of the soft assignments, rows summing to 1. `scores` and the result are [..., B, R, T, K].

        Sinkhorn looks across the tokens of each sequence (and so at later ones); softmax does not.
        """
        logits = tempered(scores, self.config.temperature)
        if self.config.normalization == "softmax":
            return logits.log_softmax(-1)
        balanced = sinkhorn(logits, self.config.sinkhorn_iters, token_mask)
        if self.opening is None:
            return balanced
        one_group = (self.opening - OPENING)[:, None]  # of a dense head: even groups would not be what is served
        return torch.where(self.opening.any(-1)[:, None, None], one_group, balanced)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        forget_weight(self)  # or what is kept would stay on a device that the router leaves
        return super()._apply(fn, recurse)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, routers={self.num_routers}, groups={self.config.num_groups}, "
            f"width={self.config.router_dim}, shared={self.config.shared_router}"
        )


def normalise(hidden: Tensor) -> Tensor:
    """Hidden states at unit root mean square, fp32: without parameters, so that one temperature serves every layer."""
    return nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=EPS)


def tempered(scores: Tensor, temperature: float) -> Tensor:
    """Scores over the temperature; at 1, as most configs have it, they are that already."""
    return scores if temperature == 1 else scores / temperature


def top_groups(scores: Tensor, k: int) -> Tensor:
    """Ids of the k highest scores, best first, ties to the lower id. [..., K] -> [..., k] int64."""
    if k == 1:
        return scores.argmax(-1, keepdim=True)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def sinkhorn(logits: Tensor, iterations: int, token_mask: Tensor | None = None) -> Tensor:
    """Sinkhorn's balanced assignment in log space. [..., B, R, T, K] -> log assignments of the same shape, fp32.

    Each iteration divides by the sum over tokens, then by the sum over groups, so rows sum to 1 exactly and columns to
    T / K as far as the iterations carry. At unit-variance scores, T = 1024, K = 8, 10 iterations: the columns are
    within 0.1 % of T / K at tau = 1; at tau = 0.1 the largest stands about a third above it (a test holds both).
    `token_mask` [B, T]: padding takes no part in the balance, and is in all groups alike.
    """
    log_p = logits.float().transpose(-1, -2)  # [..., K, T]: both sums are then quick on a GPU, one kernel each
    padding = None if token_mask is None else ~token_mask[:, None, None]
    for _ in range(iterations):
        if padding is not None:  # finite, so that an empty row does not become NaN
            log_p = log_p.masked_fill(padding, torch.finfo(log_p.dtype).min / 2)
        log_p = log_p.log_softmax(-1).log_softmax(-2)
    return log_p.transpose(-1, -2).contiguous()


def _route_by_kernel(router: Router, hidden: Tensor) -> Routing | None:
    """None where the kernel cannot: not on this device, or when PyTorch is to see what is computed."""
    kernel = kernels("focus_attn.router_kernel", hidden.device)
    routing: Routing | None = None if kernel is None else kernel.route(router, hidden)
    if routing is not None:
        _check_scores(routing.query_scores, routing.key_scores)
    return routing


def _check_scores(*scores: Tensor) -> None:
    for some in scores:
        if value_checks(some) and not torch.isfinite(some).all():
            raise ValueError(
                "the router met NaN or infinite hidden states: the base model's activations have overflowed; "
                "look at its dtype and at the input of this layer"
            )


def value_checks(tensor: Tensor) -> bool:
    """Whether to look at values: on the CPU and in Python's debug mode of torch, never where it would synchronise."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" or torch.is_anomaly_enabled()
