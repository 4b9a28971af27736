"""The backends by name, what each can serve, and which is chosen for a call."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from focus_attn.attention.call import AttentionCall
from focus_attn.attention.dense import is_dense
from focus_attn.attention.ops import Forward, make_operator
from focus_attn.attention.reference import reference_attention
from focus_attn.attention.stock import Gradients, stock_backward, stock_forward
from focus_attn.kernel_use import launching_on
from focus_attn.visibility import EVERYTHING

_stock = make_operator("stock", stock_forward, stock_backward, unrounded=True, token_major=False)

WIDEST_HEAD = 256
MOST_GROUPS = 1023
MOST_GROUPS_AS_BITS = 63


def run_backend(name: str, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out [B, H, Tq, Dv], logsumexp [B, H, Tq]; ValueError where the backend cannot serve the call."""
    if name not in call.known:
        if name not in BACKENDS:
            raise ValueError(f"unknown `backend` {name!r}: choose from 'auto', {', '.join(map(repr, BACKENDS))}")
        why_not = reason_against(name, call)
        if why_not is not None:
            raise ValueError(f"backend {name!r} {why_not}")
        call.known[name] = True
    return BACKENDS[name](call)


def choose_backend(call: AttentionCall) -> str:
    """The fastest exact backend for a call: never a change of meaning."""
    chosen: str | None = call.known.get("auto")
    if chosen is None:
        order = ("triton", "stock") if call.q.device.type == "cuda" else ("stock",)
        chosen = next((name for name in order if reason_against(name, call) is None), "reference")
        call.known["auto"] = chosen
    return chosen


class RawBackend(NamedTuple):
    """A backend without autograd, for those who have a gradient of their own to make of several calls."""

    forward: Callable[[AttentionCall], tuple[Tensor, Tensor]]
    backward: Callable[[AttentionCall, Tensor, Tensor, Tensor], Gradients]  # the call, dO, merged output and lse


def raw_backend(call: AttentionCall) -> RawBackend:
    """The fastest. Whole causal attention is the business of kernels that exist."""
    if choose_backend(call) == "triton" and call.pattern.window < EVERYTHING:
        from focus_attn.attention.triton import triton_forward
        from focus_attn.attention.triton_backward import triton_backward

        return RawBackend(on_its_device(triton_forward), on_its_device(triton_backward))
    return RawBackend(stock_forward, stock_backward)


def explain(call: AttentionCall) -> list[tuple[str, str]]:
    """What `auto` does with a call, best first: (backend, why it is taken or passed over)."""
    if is_dense(call):
        return [("dense", "taken: every pair that may meet is near, so this is PyTorch's own attention")]
    taken = choose_backend(call)
    reasons = [(taken, f"taken: {_MERITS[taken]}")]
    for name in BACKENDS:
        if name != taken:
            why_not = reason_against(name, call)
            reasons.append((name, f"not taken: {why_not or _FAULTS[name]}"))
    return reasons


_MERITS = {
    "triton": "its kernels were the fastest at every length measured on CUDA (results/)",
    "stock": "existing kernels over blocks of pairs, in memory linear in length; the fastest where Triton does not run",
    "reference": "nothing else serves this call; it takes memory for every pair",
}
_FAULTS = {
    "triton": "another is faster here",
    "stock": "slower than Triton's kernels on CUDA",
    "reference": "computes all pairs and masks them: the oracle, for tests",
}


def reason_against(name: str, call: AttentionCall) -> str | None:
    """Why a backend cannot serve a call, as the rest of a sentence; None when it can."""
    query_k, key_k = call.query_groups.shape[-1], call.key_groups.shape[-1]
    if name != "reference" and call.query_gate is not None and min(query_k, key_k) > 1:
        return (
            "takes gates only where a pair can share one group at most (query_k or key_k = 1), got "
            f"query_k = {query_k} and key_k = {key_k}: use backend='reference'"
        )
    if name == "stock" and call.query_gate is not None and call.scale == 0:
        return "cannot tell the gradients of gates at `scale` 0: use backend='reference'"
    if name != "triton":
        return None
    if not _is_installed("triton"):
        return "needs Triton: `pip install triton` (Linux), or use backend='stock'"
    if call.q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"runs on CUDA devices, got {call.q.device}: use backend='stock'"
    if call.q.element_size() > 4:
        return f"computes in fp32, bf16 or fp16, got {call.q.dtype}: use backend='stock'"
    if call.scale <= 0:
        return f"needs a positive `scale`, got {call.scale}: use backend='stock'"
    if call.pattern.num_groups > MOST_GROUPS:
        return f"has room for {MOST_GROUPS} groups, got {call.pattern.num_groups}: use backend='stock'"
    width = max(call.q.shape[-1], call.v.shape[-1])
    if width > WIDEST_HEAD:
        return f"serves heads up to {WIDEST_HEAD} wide, got {width}: use backend='stock'"
    per_kv_head = call.q.shape[1] // call.k.shape[1]
    if per_kv_head > 32:
        return f"packs up to 32 query heads on a key/value head, got {per_kv_head}: use backend='stock'"
    if min(query_k, key_k) > 1 and call.pattern.num_groups > MOST_GROUPS_AS_BITS:
        return (
            f"keeps id sets as bits, for up to {MOST_GROUPS_AS_BITS} groups where both sides have several, got "
            f"{call.pattern.num_groups}: use backend='stock'"
        )
    return None


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _triton() -> Forward:
    """Made at its first use: Triton is optional and takes a moment to import."""
    from focus_attn.attention.triton import triton_forward, triton_inference
    from focus_attn.attention.triton_backward import triton_backward

    return make_operator(
        "triton",
        on_its_device(triton_forward),
        on_its_device(triton_backward),
        unrounded=False,
        token_major=True,
        plain=on_its_device(triton_inference),
    )


def on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    def there(call: AttentionCall, *rest: Any) -> Any:
        with launching_on(call.q.device):
            return run(call, *rest)

    return there


BACKENDS: dict[str, Forward] = {
    "reference": reference_attention,
    "stock": _stock,
    "triton": lambda call: _triton()(call),
}
