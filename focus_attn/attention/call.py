"""AttentionCall: the arguments of one focus_attention call, checked and with their defaults filled in."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from focus_attn.router import value_checks
from focus_attn.visibility import EVERYTHING, Pattern, Tokens, count_positions

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True)
class AttentionCall:
    """What every backend gets. Shapes as in `focus_attention`; nothing in it needs checking again."""

    q: Tensor  # [B, H, Tq, D]
    k: Tensor  # [B, Hkv, Tk, D]
    v: Tensor  # [B, Hkv, Tk, Dv]
    query_groups: Tensor  # [B, R, Tq, query_k] int64
    key_groups: Tensor  # [B, R, Tk, key_k] int64
    tokens: Tokens
    pattern: Pattern
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [H]
    query_gate: Tensor | None = None  # [B, R, Tq, K]
    key_gate: Tensor | None = None  # [B, R, Tk, K]
    # What was found out about calls with the same layouts and numbers, shared by all of them.
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_groups: Tensor,
    key_groups: Tensor,
    *,
    num_groups: int,
    window: int,
    num_sinks: int,
    scale: float | None,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: Tensor | None,
    key_padding_mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    query_gate: Tensor | None,
    key_gate: Tensor | None,
) -> AttentionCall:
    given = (
        q, k, v, query_groups, key_groups, num_groups, window, num_sinks, scale, softcap, sliding_window, sink_logits,
        key_padding_mask, query_positions, key_positions, query_segments, key_segments, query_gate, key_gate,
    )  # fmt: skip
    known = _check_once(given)
    if value_checks(q):
        _check_ids("query_groups", query_groups, num_groups)
        _check_ids("key_groups", key_groups, num_groups)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    tokens = _resolve_tokens(
        q, k.shape[2], key_padding_mask, query_positions, key_positions, query_segments, key_segments
    )
    shared = query_groups is key_groups
    query_groups = query_groups.long()
    key_groups = query_groups if shared else key_groups.long()
    # Kernels count in 32 bits, and add to a window.
    pattern = Pattern(num_groups, min(window, EVERYTHING), num_sinks, sliding_window)
    return AttentionCall(
        q,
        k,
        v,
        query_groups,
        key_groups,
        tokens,
        pattern,
        float(scale),
        None if softcap is None else float(softcap),  # kernels are compiled for one type
        sink_logits,
        query_gate,
        key_gate,
        known,
    )


MOST_KINDS = 4096
_passed: dict[Any, dict[Any, Any]] = {}


def _check_once(given: tuple[Any, ...]) -> dict[Any, Any]:
    """`_check`, unless a call with the same layouts, dtypes and numbers has passed: a model's layers ask the same.
    -> what is known of such calls."""
    if torch.compiler.is_compiling():
        _check(*given)
        return {}
    key = tuple([x if x is None else _layout(x) if isinstance(x, Tensor) else (type(x), x) for x in given])
    try:
        known = _passed.get(key)
    except TypeError:  # what cannot be a key cannot pass either
        known = None
    if known is None:
        _check(*given)
        if len(_passed) >= MOST_KINDS:
            _passed.clear()
        known = _passed[key] = {}
    return known


def _layout(x: Tensor) -> tuple[Any, ...]:
    try:
        aligned = x.data_ptr() % 16 == 0
    except RuntimeError:  # a tensor without memory, as compilers and functional transforms have them
        aligned = None
    return x.shape, x.stride(), aligned, x.dtype, x.device


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_groups: Tensor,
    key_groups: Tensor,
    num_groups: int,
    window: int,
    num_sinks: int,
    scale: float | None,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: Tensor | None,
    key_padding_mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    query_gate: Tensor | None,
    key_gate: Tensor | None,
) -> None:
    """Everything that can be told without a look at values; raises a sentence that says how to mend it."""
    _check_qkv(q, k, v)
    batch, heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    _check_size("num_groups", num_groups, 1)
    _check_size("window", window, 0)
    _check_size("num_sinks", num_sinks, 0)
    if sliding_window is not None:
        _check_size("sliding_window", sliding_window, 1)
    if scale is not None:
        _check_number("scale", scale)
    if softcap is not None:
        _check_number("softcap", softcap)
        if softcap <= 0:
            raise ValueError(f"`softcap` must be positive, got {softcap}; None turns it off")

    _check_groups("query_groups", query_groups, q, num_queries, k.shape[1], num_groups)
    _check_groups("key_groups", key_groups, q, num_keys, k.shape[1], num_groups)
    if query_groups.shape[1] != key_groups.shape[1]:
        raise ValueError(
            f"`query_groups` has {query_groups.shape[1]} routers and `key_groups` {key_groups.shape[1]}: "
            "both must come from the same routers"
        )
    if sink_logits is not None:
        _check_tensor("sink_logits", sink_logits, (heads,), q)
        if sink_logits.dtype not in FLOATS:
            raise TypeError(f"`sink_logits` must be floating point, got {sink_logits.dtype}")
    if (query_gate is None) != (key_gate is None):
        raise ValueError("`query_gate` and `key_gate` go together: pass both or neither")
    if query_gate is not None and key_gate is not None:
        routers = query_groups.shape[1]
        _check_tensor("query_gate", query_gate, (batch, routers, num_queries, num_groups), q)
        _check_tensor("key_gate", key_gate, (batch, routers, num_keys, num_groups), q)
        for name, gate in (("query_gate", query_gate), ("key_gate", key_gate)):
            if gate.dtype not in FLOATS:
                raise TypeError(f"`{name}` must be floating point, got {gate.dtype}")

    queries_are_last = num_queries <= num_keys
    if key_padding_mask is not None:
        _check_tensor("key_padding_mask", key_padding_mask, (batch, num_keys), q)
        if key_padding_mask.dtype != torch.bool:
            raise TypeError(f"`key_padding_mask` must be bool (True = real token), got {key_padding_mask.dtype}")
        if key_positions is not None:
            raise ValueError("`key_padding_mask` and `key_positions` say the same thing: pass one (-1 marks padding)")
    for name, x, length in (
        ("query_positions", query_positions, num_queries),
        ("key_positions", key_positions, num_keys),
        ("query_segments", query_segments, num_queries),
        ("key_segments", key_segments, num_keys),
    ):
        if x is not None:
            _check_tensor(name, x, (batch, length), q)
            if x.dtype not in INTEGERS:
                raise TypeError(f"`{name}` must hold integers, got {x.dtype}")

    if key_segments is None and query_segments is not None:
        raise ValueError("`query_segments` needs `key_segments`: which keys belong to which sequence")
    if query_segments is None and key_segments is not None and not queries_are_last:
        raise ValueError(f"{num_queries} queries but {num_keys} keys: pass `query_segments`")
    if query_positions is None and not queries_are_last:
        raise ValueError(f"{num_queries} queries but {num_keys} keys: pass `query_positions`")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"`{name}` must be [batch, heads, tokens, width], got shape {list(x.shape)}")
        if x.dtype not in FLOATS:
            raise TypeError(f"`{name}` must be floating point, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, got {q.dtype} for `q` and {x.dtype} for `{name}`")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got {q.device} for `q` and {x.device} for `{name}`")
        if 0 in x.shape[:2] or x.shape[3] == 0:
            raise ValueError(f"`{name}` has an empty batch, head or width dimension: shape {list(x.shape)}")
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise ValueError(f"batch sizes differ: q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"k and v must agree in heads and tokens, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have one width, got {q.shape[3]} and {k.shape[3]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the {q.shape[1]} query heads are not a multiple of the {k.shape[1]} key/value heads")


def _check_groups(name: str, groups: Tensor, q: Tensor, length: int, kv_heads: int, num_groups: int) -> None:
    if not isinstance(groups, Tensor):
        raise TypeError(f"`{name}` must be a tensor of group ids, got {type(groups).__name__}")
    if groups.dtype not in INTEGERS:
        raise TypeError(f"`{name}` must hold integer ids, got {groups.dtype}")
    if groups.dim() != 4:
        raise ValueError(f"`{name}` must be [batch, routers, tokens, k], got shape {list(groups.shape)}")
    if groups.device != q.device:
        raise ValueError(f"`{name}` is on {groups.device}, q on {q.device}")
    if groups.shape[0] != q.shape[0] or groups.shape[2] != length:
        raise ValueError(f"`{name}` must have batch {q.shape[0]} and {length} tokens, got shape {list(groups.shape)}")
    if groups.shape[1] not in (1, kv_heads):
        raise ValueError(
            f"`{name}` must have 1 router or one for each of the {kv_heads} key/value heads, got {groups.shape[1]}"
        )
    if not 1 <= groups.shape[3] <= num_groups:
        raise ValueError(f"`{name}` gives {groups.shape[3]} ids a token; between 1 and `num_groups` ({num_groups}) fit")


def _check_ids(name: str, groups: Tensor, num_groups: int) -> None:
    if groups.numel() and (groups.min() < 0 or groups.max() >= num_groups):
        raise ValueError(
            f"`{name}` holds ids from {int(groups.min())} to {int(groups.max())}; with `num_groups={num_groups}` "
            f"they must lie in 0..{num_groups - 1}"
        )


def _check_tensor(name: str, x: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}")
    if tuple(x.shape) != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"`{name}` is on {x.device}, q on {q.device}")


def _check_size(name: str, value: int, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    if value < lowest:
        raise ValueError(f"`{name}` must be at least {lowest}, got {value}")


def _check_number(name: str, value: float) -> None:
    if torch.compiler.is_compiling():  # a dynamic size may stand behind it, which must not be looked at
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}")


def _resolve_tokens(
    q: Tensor,
    num_keys: int,
    key_padding_mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
) -> Tokens:
    """Positions default to counting real tokens, the queries being the last Tq of the Tk slots."""
    batch, num_queries = q.shape[0], q.shape[2]
    if key_segments is not None:
        key_segments = key_segments.long()
        if query_segments is None:
            query_segments = key_segments[:, num_keys - num_queries :]
        query_segments = query_segments.long()

    if key_padding_mask is None and key_positions is None and key_segments is None and query_positions is None:
        return _plain_tokens(batch, num_queries, num_keys, q.device)
    if key_positions is None:
        real = key_padding_mask
        if real is None:
            real = torch.ones(batch, num_keys, dtype=torch.bool, device=q.device)
        key_positions = count_positions(real, key_segments)
    if query_positions is None:
        query_positions = key_positions[:, num_keys - num_queries :]
    return Tokens(query_positions.long(), key_positions.long(), query_segments, key_segments)


def _plain_tokens(batch: int, num_queries: int, num_keys: int, device: torch.device) -> Tokens:
    """Kept, for every layer of a model asks for the same; a graph makes its own."""
    graphed = torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    if graphed:
        return _make_plain_tokens(batch, num_queries, num_keys, device)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    return _keep_plain_tokens(batch, num_queries, num_keys, device, stream)


def _make_plain_tokens(batch: int, num_queries: int, num_keys: int, device: torch.device) -> Tokens:
    with torch.inference_mode(False):
        slots = torch.arange(num_keys, device=device).expand(batch, -1)
    return Tokens(slots[:, num_keys - num_queries :], slots, plain=True)


@functools.lru_cache(maxsize=8)
def _keep_plain_tokens(batch: int, num_queries: int, num_keys: int, device: torch.device, stream: int) -> Tokens:
    """stream: another one might read them before they are written."""
    return _make_plain_tokens(batch, num_queries, num_keys, device)
