"""Merging softmax parts over disjoint keys by their logsumexps."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the union of two disjoint key sets. out [..., T, D] and lse [..., T], fp32.

    o = (e^a o1 + e^b o2) / (e^a + e^b) as a convex combination with weight sigmoid(b - a); a part that saw nothing has
    lse -inf and takes no weight.
    """
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)  # both -inf: nothing seen yet, out stays 0
    return torch.lerp(out, part.float(), weight[..., None]), torch.logaddexp(lse, part_lse)


def merge_sink_logits(out: Tensor, lse: Tensor, sink_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Learned logits that take softmax mass and give nothing. sink_logits [H]; out [B, H, T, D], lse [B, H, T]."""
    sink = sink_logits.float()[None, :, None]
    out = out * torch.sigmoid(lse - sink)[..., None]
    return out, torch.logaddexp(lse, sink).masked_fill(lse == -math.inf, -math.inf)


def sink_logits_grad(grad: Tensor, out: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """d loss / d sink_logits [H] from the merged out and lse: the sink's probability times (0 - dO . O)."""
    delta = (grad.float() * out.float()).sum(-1)
    p = (sink_logits.float()[None, :, None] - lse).exp().masked_fill(lse == -math.inf, 0.0)
    return -(p * delta).sum((0, 2)).to(sink_logits.dtype)
