"""Is it right? No speed is reported for a wrong answer.

The bound is that of the tests: at most twice the error of plain PyTorch in the same dtype, plus 1e-5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from focus_attn.bench.setting import Groups, Inputs, Setting
from focus_attn.visibility import Tokens, visible_mask

SMALL = 1501  # tokens: odd, several windows, and the oracle's n² masks still fit
SAMPLED_ROWS = 48


class Verdict(NamedTuple):
    """The largest error found and what was allowed there; the worst case of all that was compared."""

    what: str
    length: int
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN

    def __str__(self) -> str:
        return f"{self.what} off by {self.error:.1e} at {self.length:,} tokens, {self.bound:.1e} allowed"


def check_against_oracle(setting: Setting, backward: bool, generator: torch.Generator) -> Verdict:
    """The setting at a small length, output and gradients, against backend="reference" in fp32."""
    length = max(SMALL, min(2 * setting.window + 1, 4097))  # some keys must lie outside the window
    inputs = setting.shape.draw(length, backward, generator)
    groups = setting.draw_groups(length, generator)
    exact_inputs = Inputs(*(None if x is None else x.detach().float().requires_grad_(backward) for x in inputs))  # type: ignore[arg-type]

    got = _results(setting.attend(groups), inputs)
    exact = _results(setting.attend(groups, "reference"), exact_inputs)
    mask = _mask(setting, groups, torch.arange(length, device=setting.shape.device))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        times = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * setting.shape.width**-0.5
        hidden = ~mask.repeat_interleave(q.shape[1] // mask.shape[1], dim=1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    return _worst(names, got, exact, _results(plain, inputs), length)


def check_rows(setting: Setting, inputs: Inputs, groups: Groups, generator: torch.Generator) -> Verdict:
    """Some queries of a call at its full length, output and gradient of q, computed directly in fp32."""
    length = inputs.q.shape[2]
    rows = torch.randint(length, (SAMPLED_ROWS,), generator=generator, device=generator.device)
    rows[0] = length - 1
    results = _results(setting.attend(groups), inputs)
    got = [result[0][:, rows] for result in results[:2]]  # the output, the gradient of q
    per_router = setting.shape.heads // setting.ids.routers
    per_kv_head = setting.shape.heads // setting.shape.kv_heads
    worst = Verdict("output", length, 0.0, 1e-5)
    mask = torch.empty(0)
    for head in range(setting.shape.heads):  # one at a time: a million keys in fp32 are large
        if head % per_router == 0:
            router = slice(head // per_router, head // per_router + 1)
            mask = _mask(setting, Groups(*(side[:, router] for side in groups)), rows)[0, 0]
        kv_head = head // per_kv_head
        q, k, v = (x.detach()[0, h] for x, h in zip(inputs[:3], (head, kv_head, kv_head), strict=True))
        grad = None if inputs.grad is None else inputs.grad[0, head, rows]
        exact = _rows(q[rows].float(), k.float(), v.float(), None if grad is None else grad.float(), mask)
        rough = _rows(q[rows], k, v, grad, mask)
        verdict = _worst(("output", "gradient of q"), [x[head] for x in got], exact, rough, length)
        worst = max(worst, verdict, key=_excess)
    return worst._replace(what=f"{worst.what} of sampled queries")


def _rows(q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None, mask: Tensor) -> list[Tensor]:
    """q [n, D] against all keys of one head -> output, and gradient of q where there is one of the output."""
    scale = q.shape[-1] ** -0.5
    p = (q @ k.T * scale).masked_fill(~mask, -torch.inf).softmax(-1)
    out = p @ v
    if grad is None:
        return [out]
    return [out, (p * (grad @ v.T - (grad * out).sum(-1, keepdim=True))) @ k * scale]


def _mask(setting: Setting, groups: Groups, rows: Tensor) -> Tensor:
    """Which keys the given queries see, [1, R, n, T] bool."""
    at = torch.arange(groups.key.shape[2], device=rows.device)[None]
    return visible_mask(groups.query[:, :, rows], groups.key, Tokens(rows[None], at), setting.pattern)


def _results(attend: object, inputs: Inputs) -> list[Tensor]:
    q, k, v, grad = inputs
    out = attend(q, k, v)  # type: ignore[operator]
    return [out.detach()] if grad is None else [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def _worst(names: tuple[str, ...], got: list[Tensor], exact: list[Tensor], rough: list[Tensor], length: int) -> Verdict:
    verdicts = []
    for name, one, want, plain in zip(names, got, exact, rough, strict=False):
        error, dtype_error = ((x.float() - want).abs().max().item() for x in (one, plain))
        bound = 2 * dtype_error + 1e-5 * max(1.0, want.abs().max().item())
        verdicts.append(Verdict(name, length, error, bound))
    return max(verdicts, key=_excess)


def _excess(verdict: Verdict) -> float:
    """How near to its bound, NaN counting as infinitely far beyond."""
    return verdict.error / verdict.bound if verdict.error == verdict.error else float("inf")
