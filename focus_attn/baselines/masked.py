"""Attention under a mask, a few queries at a time, so that no [H, T, T] tensor ever lives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from focus_attn.baselines.call import Cost, LayerCall, Shape

# (start, stop) -> which of the keys before `stop` the queries from `start` to `stop` see, as bool
# [B or 1, H or 1, stop - start, stop]. Keys after the query may be marked: they are masked here.
Visible = Callable[[int, int], Tensor]

SCORES_AT_ONCE = 1 << 26  # elements: 256 MB in fp32


class SparseMethod(ABC):
    """A method that is softmax attention over some of the pairs."""

    causal: ClassVar[bool] = True

    @abstractmethod
    def run(self, call: LayerCall) -> tuple[Tensor, float]:
        """-> ([B, H, T, Dv], how many pairs it kept in all rows and heads)."""

    def selection(self, shape: Shape) -> float:
        """Multiply-adds that choosing the pairs takes, all heads of one sequence."""
        return 0.0

    def expected_pairs(self, shape: Shape) -> float:
        """Pairs that a head keeps of one sequence, before any text is seen."""
        raise NotImplementedError

    def expected_multiply_adds(self, shape: Shape) -> float:
        """Selection, scores and values of one sequence, all heads."""
        return self.selection(shape) + self.expected_pairs(shape) * shape.heads * shape.pair_cost

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        out, kept = self.run(call)
        return out, pairs_cost(call, kept, self.selection(call.shape))


class MaskMethod(SparseMethod):
    """One that says which pairs, as a mask; the rest is the same for all."""

    @abstractmethod
    def visible(self, call: LayerCall) -> Visible:
        """Which pairs this layer sees."""

    def run(self, call: LayerCall) -> tuple[Tensor, float]:
        return masked_attention(call, self.visible(call))


def pairs_cost(call: LayerCall, kept: float, selection: float) -> Cost:
    """kept: pairs in all rows and heads; selection: multiply-adds for one row."""
    rows, shape = call.q.shape[0], call.shape
    share = kept / (rows * shape.heads * shape.causal_pairs)
    return Cost(kept * shape.pair_cost + rows * selection, share)


def masked_attention(call: LayerCall, visible: Visible) -> tuple[Tensor, float]:
    """Softmax over the visible pairs. -> ([B, H, T, Dv], how many pairs in all rows and heads)."""
    rows, heads = call.q.shape[:2]
    outs, kept = [], torch.zeros((), dtype=torch.int64, device=call.q.device)
    for start, stop in query_chunks(call):
        mask = visible(start, stop) & causal_mask(start, stop, call.q.device)
        if call.counted:
            kept += mask.sum() * (rows * heads // (mask.shape[0] * mask.shape[1]))
        outs.append(attend_chunk(call, start, stop, mask))
    return torch.cat(outs, dim=2), float(kept)


def query_chunks(call: LayerCall) -> list[tuple[int, int]]:
    """Bounds of the query chunks."""
    rows, heads, length, _ = call.q.shape
    step = max(1, SCORES_AT_ONCE // (rows * heads * length))
    step = 1 << (step.bit_length() - 1)
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def causal_mask(start: int, stop: int, device: torch.device) -> Tensor:
    """[1, 1, stop - start, stop] bool."""
    query, key = positions(start, stop, device)
    return key <= query


def positions(start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the queries [1, 1, stop - start, 1] and of the keys [1, 1, 1, stop] of a chunk."""
    slots = torch.arange(stop, device=device)
    return slots[None, None, start:, None], slots[None, None, None, :]


def top_keys(scores: Tensor, count: int) -> Tensor:
    """The `count` keys of the highest score for each query. scores [B, H, C, stop] -> bool of the same shape."""
    if count >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    chosen = scores.topk(count, dim=-1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)


def first_keys_pairs(length: int, keys: int) -> int:
    """Causal pairs when a query keeps `keys` keys, or all of them while there are fewer."""
    keys = min(keys, length)
    return keys * (keys + 1) // 2 + (length - keys) * keys


def attend_chunk(call: LayerCall, start: int, stop: int, mask: Tensor) -> Tensor:
    """Queries start ... stop - 1 over the masked keys, [B, H, stop - start, Dv]. Every query sees itself at least."""
    q, k, v = call.q[:, :, start:stop], call.keys[:, :, :stop], call.values[:, :, :stop]
    if call.softcap is None and call.sink_logits is None:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)
    return softmax_with_sinks(call, chunk_scores(call, start, stop).masked_fill(~mask, -torch.inf)).to(v.dtype) @ v


def chunk_scores(call: LayerCall, start: int, stop: int) -> Tensor:
    """The model's own scores, scaled and capped, [B, H, stop - start, stop] fp32. Not masked."""
    scores = products(call.q[:, :, start:stop], call.keys[:, :, :stop]) * call.scale
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def products(query: Tensor, key: Tensor) -> Tensor:
    """q . k in fp32, as fused kernels have it: rounded to bf16, a large score would be off by more than it matters."""
    return query.float() @ key.float().transpose(-1, -2)


def softmax_with_sinks(call: LayerCall, scores: Tensor) -> Tensor:
    """Softmax; a learned sink of the model takes its part of the weight and gives nothing."""
    if call.sink_logits is None:
        return scores.softmax(-1)
    sinks = call.sink_logits.float()[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
