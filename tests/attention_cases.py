"""Random calls of focus_attention that cover every combination it promises, and what plain PyTorch makes of them."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from focus_attn import focus_attention
from focus_attn.attention.call import AttentionCall, make_call
from focus_attn.visibility import count_causal_pairs, count_visible_pairs, visible_mask

DEFAULTS: dict[str, Any] = dict.fromkeys(
    "scale softcap sliding_window sink_logits key_padding_mask query_positions key_positions query_segments "
    "key_segments query_gate key_gate".split()
)


@dataclass
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    query_groups: Tensor
    key_groups: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def call(self) -> AttentionCall:
        options = {**DEFAULTS, "num_sinks": 0, **self.options}
        return make_call(self.q, self.k, self.v, self.query_groups, self.key_groups, **options)

    def leaves(self) -> list[Tensor]:
        """What has a gradient."""
        optional = (self.options.get(name) for name in ("sink_logits", "query_gate", "key_gate"))
        return [self.q, self.k, self.v, *(x for x in optional if x is not None)]

    def run(self, backend: str, grad: Tensor) -> list[Tensor]:
        """out, then the gradient of every leaf."""
        out = focus_attention(
            self.q, self.k, self.v, self.query_groups, self.key_groups, backend=backend, **self.options
        )
        grads = torch.autograd.grad(out, self.leaves(), grad, allow_unused=True)
        return [
            out.detach(),
            *(torch.zeros_like(x) if g is None else g for x, g in zip(self.leaves(), grads, strict=True)),
        ]

    def cast(self, dtype: torch.dtype) -> "Case":
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (self.q, self.k, self.v))
        return Case(q, k, v, self.query_groups, self.key_groups, self.options)

    def to(self, device: str) -> "Case":
        def move(x: Any) -> Any:
            return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

        q, k, v, query_groups, key_groups = map(move, (self.q, self.k, self.v, self.query_groups, self.key_groups))
        return Case(q, k, v, query_groups, key_groups, {name: move(x) for name, x in self.options.items()})

    def is_sparse(self) -> bool:
        call = self.call()
        visible = count_visible_pairs(call.query_groups, call.key_groups, call.tokens, call.pattern)
        return bool((visible < count_causal_pairs(call.tokens)[:, None]).any())

    def __str__(self) -> str:
        given = {k: v for k, v in self.options.items() if v is not None}
        shown = {k: list(v.shape) if isinstance(v, Tensor) else v for k, v in given.items()}
        sizes = {name: list(getattr(self, name).shape) for name in ("q", "k", "v", "query_groups", "key_groups")}
        return f"{sizes} {shown}"


def random_case(seed: int, gates: bool = False, largest: int = 150) -> Case:
    pick = random.Random(seed)
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make).requires_grad_()

    def ids(*shape: int) -> Tensor:
        # Skewed: some groups are large, some stay empty.
        weights = torch.rand(groups, generator=make).pow(2) + 0.02
        weights[torch.rand(groups, generator=make) < 0.2] = 0
        weights[pick.randrange(groups)] += 0.1
        drawn = torch.multinomial(weights, int(torch.tensor(shape).prod()), replacement=True, generator=make)
        return drawn.view(shape)

    batch, kv_heads, per_kv = pick.choice([1, 2]), pick.choice([1, 2, 3]), pick.choice([1, 1, 2, 3])
    keys = pick.randint(20, largest)
    queries = pick.choice([keys, keys, pick.randint(1, keys)])
    width, value_width = pick.choice([16, 24, 40]), pick.choice([16, 24, 40])
    groups = pick.choice([2, 3, 4, 8])
    query_k, key_k = pick.randint(1, groups), pick.randint(1, groups)
    if gates or pick.random() < 0.5:
        query_k, key_k = pick.choice([(1, 1), (1, key_k), (query_k, 1)])
    routers = pick.choice([1, kv_heads])

    key_groups = ids(batch, routers, keys, key_k)
    query_groups = ids(batch, routers, queries, query_k)
    if query_k == key_k and queries == keys and pick.random() < 0.5:
        query_groups = key_groups
    if routers > 1 and pick.random() < 0.3:  # a dense head beside routed ones
        key_groups[:, -1] = query_groups[:, -1] = 0
    heads = kv_heads * per_kv
    options: dict[str, Any] = {
        "num_groups": groups,
        "window": pick.choice([0, 3, 9, 20]),
        "num_sinks": pick.choice([0, 0, 1, 4]),
    }
    if pick.random() < 0.2:
        options["softcap"] = 5.0
    if pick.random() < 0.2:
        options["sliding_window"] = pick.randint(1, keys)
    if pick.random() < 0.2:
        options["sink_logits"] = normal(heads)
    if pick.random() < 0.2:
        options["scale"] = 0.3
    if pick.random() < 0.3:
        options["key_segments"] = torch.randint(0, 4, (batch, keys), generator=make).sort(-1).values
    if pick.random() < 0.4:
        options["key_padding_mask"] = _padding(pick, make, batch, keys)
    elif pick.random() < 0.2:  # a static cache: slots written up to a point, -1 after it
        written = pick.randint(1, keys)
        positions = torch.arange(keys).expand(batch, -1).clone()
        positions[:, written:] = -1
        first = max(0, written - queries)
        options["key_positions"] = positions
        options["query_positions"] = torch.arange(first, first + queries).clamp(max=written - 1).expand(batch, -1)
    if gates:
        options["query_gate"], options["key_gate"] = (normal(batch, routers, n, groups) for n in (queries, keys))
    q, k, v = normal(batch, heads, queries, width), normal(batch, kv_heads, keys, width), None
    v = normal(batch, kv_heads, keys, value_width)
    return Case(q, k, v, query_groups, key_groups, options)


def _padding(pick: random.Random, make: torch.Generator, batch: int, keys: int) -> Tensor:
    """Left, right or scattered padding; some rows full, now and then one with nothing in it."""
    at = torch.arange(keys).expand(batch, -1)
    amount = torch.randint(0, keys, (batch, 1), generator=make)
    kind = pick.choice(["left", "right", "scattered"])
    if kind == "left":
        return at >= amount
    if kind == "right":
        return at < amount
    return torch.rand(batch, keys, generator=make) > 0.3


def plain_attention(case: Case, grad: Tensor) -> list[Tensor]:
    """Textbook attention under the same mask in the dtype of q: what the dtype itself costs."""
    call = case.call()
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (call.k, call.v))
    scores = call.q @ k.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    mask = visible_mask(call.query_groups, call.key_groups, call.tokens, call.pattern)
    mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
    scores = scores.masked_fill(~mask, -torch.inf)
    if call.sink_logits is not None:
        sink = call.sink_logits.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        p = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1)
    out = p.masked_fill(~mask.any(-1, keepdim=True), 0.0) @ v
    grads = torch.autograd.grad(out, (case.q, case.k, case.v), grad)
    return [out.detach(), *(g.nan_to_num(0.0) for g in grads)]
