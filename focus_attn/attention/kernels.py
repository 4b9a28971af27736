"""Existing kernels behind one interface: attention of a tile that also gives its logsumexp, and its backward.

A tile is q [N, G, Tq, D], k and v [N, Tk, D]: N key/value heads, G query heads on each. A backward is given the
*merged* output and logsumexp of all tiles that a query takes part in: with p = exp(s - lse) and delta = dO . O both
final, the gradients of the tiles simply add up to the exact ones. (Autograd through a logsumexp merge would be silently
wrong: these kernels drop the gradient of the logsumexp.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_attn.attention.call import AttentionCall

aten = torch.ops.aten


class Tile(NamedTuple):
    q: Tensor  # [N, G, Tq, D]
    k: Tensor  # [N, Tk, D]
    v: Tensor  # [N, Tk, Dv]
    scale: float
    causal: bool = False  # query i meets keys[: i + 1]
    bias: Tensor | None = None  # [Tq, Tk] or [N, Tq, Tk] in q's dtype: 0 = visible, -inf = not
    sees: Tensor | None = None  # [Tq] or [N, Tq] bool, with a bias: whether a query meets any key of the tile
    softcap: float | None = None


class TileGrads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    # With marks [Tk, C]: sums of the gradient of the scores over marked keys [N, G, Tq, C], and over queries [N, Tk].
    by_query: Tensor | None = None
    by_key: Tensor | None = None


class Kernel(Protocol):
    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """out [N, G, Tq, Dv], logsumexp [N, G, Tq] fp32, -inf for a query that meets nothing."""

    def backward(self, tile: Tile, final: tuple[Tensor, ...], marks: Tensor | None = None) -> TileGrads:
        """Gradients from `final`: the gradient of the merged output, that output, and the merged logsumexp, which is
        +inf for a query that meets nothing anywhere."""


def kernel_for(call: AttentionCall) -> Kernel:
    if call.softcap is not None or call.scale <= 0:  # the others hide a pair before they multiply with the scale
        return MathKernel()
    if call.q.device.type == "cpu":
        return CpuFlashKernel()
    if call.q.device.type == "cuda" and call.q.dtype != torch.float64:
        return CudaEfficientKernel()
    return MathKernel()


class MathKernel:
    """Plain matrix products in fp32, some queries at a time: for softcap, a scale of 0 or below, and devices without a
    kernel that returns the logsumexp."""

    rows = 256

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        parts = []
        for part in self._chunks(tile):
            scores = self._scores(part, tile)
            lse = scores.logsumexp(-1)
            p = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
            parts.append(((p @ tile.v[:, : p.shape[-1]].float().unsqueeze(1)).to(tile.v.dtype), lse))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(self, tile: Tile, final: tuple[Tensor, ...], marks: Tensor | None = None) -> TileGrads:
        k, v = tile.k.float(), tile.v.float()
        grad_k, grad_v, by_key = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(k[..., 0])
        grads_q, by_query = [], []
        for rows in self._chunks(tile):
            grad, out, lse = (x[:, :, rows].float() for x in final)
            scores = self._scores(rows, tile)
            seen = slice(0, scores.shape[-1])
            p = (scores - lse[..., None]).exp()
            delta = (grad * out).sum(-1, keepdim=True)
            grad_scores = p * (grad @ v[:, seen].transpose(-1, -2).unsqueeze(1) - delta)
            if marks is not None:
                by_query.append(grad_scores @ marks[seen].float())
                by_key[:, seen] += grad_scores.sum((1, 2))
            if tile.softcap is not None:  # d tanh; where masked, p is 0 already
                grad_scores = grad_scores * (1 - (scores.masked_fill(p == 0, 0.0) / tile.softcap).square())
            grads_q.append(grad_scores @ k[:, seen].unsqueeze(1) * tile.scale)
            grad_k[:, seen] += (grad_scores.transpose(-1, -2) @ tile.q[:, :, rows].float()).sum(1) * tile.scale
            grad_v[:, seen] += (p.transpose(-1, -2) @ grad).sum(1)
        if marks is None:
            return TileGrads(torch.cat(grads_q, 2), grad_k, grad_v)
        return TileGrads(torch.cat(grads_q, 2), grad_k, grad_v, torch.cat(by_query, 2), by_key)

    def _chunks(self, tile: Tile) -> list[slice]:
        count = tile.q.shape[2]
        return [slice(start, min(start + self.rows, count)) for start in range(0, count, self.rows)]

    def _scores(self, rows: slice, tile: Tile) -> Tensor:
        """[N, G, rows, keys]; of a causal tile only the keys that these rows reach."""
        keys = rows.stop if tile.causal else tile.k.shape[1]
        scores = tile.q[:, :, rows].float() @ tile.k[:, :keys].float().transpose(-1, -2).unsqueeze(1) * tile.scale
        if tile.softcap is not None:
            scores = tile.softcap * torch.tanh(scores / tile.softcap)
        if tile.causal:
            at = torch.arange(keys, device=scores.device)
            scores = scores.masked_fill(at > at[rows, None], -math.inf)
        return scores if tile.bias is None else scores + _over_heads(tile.bias[..., rows, :])


class _PaddedKernel(ABC):
    """What the fused kernels have in common: one width for q, k and v, and an additive mask."""

    width_multiple = 1

    @abstractmethod
    def _run(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, tile: Tile) -> tuple[Tensor, Tensor]:
        """out and logsumexp; all tensors [N, G, T, D], bias [N or 1, 1, Tq, Tk]."""

    @abstractmethod
    def _run_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, all [N, G, T, D]."""

    def _bias(self, tile: Tile) -> Tensor | None:
        return None if tile.bias is None else _over_heads(tile.bias)

    def _share(self, x: Tensor, heads: int) -> Tensor:
        """[N, T, D] -> [N, G, T, D] without a copy: the query heads of a KV head read the same keys."""
        return x[:, None].expand(-1, heads, -1, -1)

    def _width(self, *widths: int) -> int:
        return -(-max(widths) // self.width_multiple) * self.width_multiple

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        value_width, heads = tile.v.shape[-1], tile.q.shape[1]
        width = self._width(tile.q.shape[-1], value_width)
        q, k, v = widen(tile.q, width), widen(tile.k, width), widen(tile.v, width)
        out, lse = self._run(q, self._share(k, heads), self._share(v, heads), self._bias(tile), tile)
        out, lse = out[..., :value_width], lse.float()
        if tile.sees is not None:  # the kernels leave 0 or NaN where nothing is visible
            blind = ~_over_heads(tile.sees[..., None])
            out, lse = out.masked_fill(blind, 0.0), lse.masked_fill(blind.squeeze(-1), -math.inf)
        return out, lse

    def backward(self, tile: Tile, final: tuple[Tensor, ...], marks: Tensor | None = None) -> TileGrads:
        grad, out, lse = final
        heads, d, value_width = tile.q.shape[1], tile.q.shape[-1], tile.v.shape[-1]
        q, k, num_marks = tile.q, tile.k, 0
        if marks is not None:
            # Columns that add nothing to q . k but whose gradients are the sums wanted: marks on k's side against zeros
            # on q's, ones on q's side against zeros on k's.
            num_marks = marks.shape[-1]
            marks = marks.to(k.dtype).expand(k.shape[0], -1, -1)
            q = torch.cat([q, q.new_zeros(*q.shape[:-1], num_marks), q.new_ones(*q.shape[:-1], 1)], -1)
            k = torch.cat([k, marks, k.new_zeros(*k.shape[:-1], 1)], -1)
        width = self._width(q.shape[-1], value_width)
        q, k, v = widen(q, width), widen(k, width), widen(tile.v, width)
        grads = self._run_backward(
            widen(grad, width),
            q,
            self._share(k, heads),
            self._share(v, heads),
            self._bias(tile),
            widen(out, width),
            lse,
            tile,
        )
        grad_q, grad_k, grad_v = (g.float() for g in grads)
        grad_k, grad_v = grad_k.sum(1), grad_v.sum(1)
        by_query = by_key = None
        if marks is not None:
            by_query = grad_q[..., d : d + num_marks] / tile.scale
            by_key = grad_k[..., d + num_marks] / tile.scale
        return TileGrads(grad_q[..., :d], grad_k[..., :d], grad_v[..., :value_width], by_query, by_key)


class CpuFlashKernel(_PaddedKernel):
    """PyTorch's flash attention for the CPU. Given bf16, its backward loses up to four times what plain bf16 attention
    loses, so half precision is widened for it."""

    def _run(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, tile: Tile) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.causal, attn_mask=bias, scale=tile.scale
        )

    def _run_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.dtype != torch.float32:  # the merged output and logsumexp are fp32 too
            grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
            bias = None if bias is None else bias.float()
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, tile.causal, attn_mask=bias, scale=tile.scale
        )


class CudaEfficientKernel(_PaddedKernel):
    """PyTorch's memory-efficient attention: takes a bias, returns the logsumexp, runs on every CUDA GPU. Its backward
    returns NaN in half precision for some biases when heads share keys, so plain products take that over."""

    width_multiple = 8

    def backward(self, tile: Tile, final: tuple[Tensor, ...], marks: Tensor | None = None) -> TileGrads:
        if tile.q.dtype in (torch.bfloat16, torch.float16):
            return MathKernel().backward(tile, final, marks)
        return super().backward(tile, final, marks)

    def _bias(self, tile: Tile) -> Tensor | None:
        bias = super()._bias(tile)
        if bias is None:
            return None
        length = bias.shape[-1]
        bias = F.pad(bias, (0, -length % 16))[..., :length]  # rows must start on 16-byte boundaries
        return bias.expand(tile.q.shape[0], tile.q.shape[1], -1, -1)

    def _share(self, x: Tensor, heads: int) -> Tensor:
        return super()._share(x, heads).contiguous()  # its backward writes gradients into the strides of k and v

    def _run(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, tile: Tile) -> tuple[Tensor, Tensor]:
        return efficient_attention(q, k, v, bias, tile.scale, tile.causal)

    def _run_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = out.to(q.dtype), F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad,
            q,
            k,
            v,
            bias,
            out,
            lse,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            tile.causal,
            scale=tile.scale,
        )
        return grad_q, grad_k, grad_v


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """out and logsumexp; all tensors [N, G, T, D], bias [N, G, Tq, Tk] with rows on 16-byte boundaries."""
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[-2]]  # the kernel pads it to a multiple of 32


def _over_heads(x: Tensor) -> Tensor:
    """[Tq, Tk] or [N, Tq, Tk] -> [N or 1, 1, Tq, Tk]."""
    return x[None, None] if x.dim() == 2 else x[:, None]


def widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
