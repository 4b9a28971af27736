"""The additive gate by wider vectors against its formula over all pairs: outputs, gradients, memory."""

import functools

import pytest
import torch
from tiny import focus, tokens
from torch.autograd.graph import saved_tensors_hooks

from focus_attn import FocusConfig
from focus_attn.attention import additive, backends
from focus_attn.attention.additive import additive_attention
from focus_attn.attention.soft import soft_gated_attention
from focus_attn.visibility import Pattern, Tokens, count_positions

LENGTH = 61
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "plain": {},
    "a router a KV head": {"kv_heads": 2, "routers": 2},
    "one router": {"heads": 6, "kv_heads": 3},
    "no sinks": {"num_sinks": 0},
    "padding": {"padding": 9},
    "documents": {"documents": 3},
    "sliding": {"sliding": 17, "kv_heads": 2},
    "sink logits": {"sink_logits": True, "padding": 4},
    "values of another width": {"value_width": 12},
    "sharp": {"sharpness": 100.0},
    "everything near": {"window": 80},
}


def case(
    *, heads=4, kv_heads=4, routers=1, groups=5, padding=0, documents=1, sliding=None, num_sinks=2, window=6,
    sink_logits=False, width=16, value_width=16, sharpness=3.0, dtype=torch.float32,
):  # fmt: skip
    torch.manual_seed(0)
    make = functools.partial(torch.randn, 2, device=DEVICE)
    q, k, v = (make(n, LENGTH, d).to(dtype) for n, d in ((heads, width), (kv_heads, width), (kv_heads, value_width)))
    gates = [(3 * make(routers, LENGTH, groups)).log_softmax(-1) for _ in range(2)]
    real = torch.ones(2, LENGTH, dtype=torch.bool, device=DEVICE)
    real[0, :padding] = False
    segments = None if documents == 1 else (torch.arange(LENGTH, device=DEVICE) * documents // LENGTH).expand(2, -1)
    at = count_positions(real, segments)
    options = {
        "sharpness": sharpness,
        "tokens": Tokens(at, at, segments, segments, plain=not padding and documents == 1),
        "pattern": Pattern(groups, window, num_sinks, sliding),
        "scale": 0.3,
    }
    learned = [torch.randn(heads, device=DEVICE)] if sink_logits else []
    return [x.requires_grad_() for x in (q, k, v, *gates, *learned)], options, real


def run(attend, inputs, options, real):
    q, k, v, query_gate, key_gate, *learned = inputs
    sinks = learned[0] if learned else None
    out = attend(q, k, v, query_gate, key_gate, sink_logits=sinks, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out) * real[:, None, :, None]
    return [out * real[:, None, :, None], *torch.autograd.grad(out, inputs, grad)]


def dense(*args, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(additive, "serves", lambda *_: False)
        return soft_gated_attention(*args, gate="additive", **options)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_formula(name):
    inputs, options, real = case(**CASES[name])
    sharp = max(1.0, options["sharpness"] / 20)  # it multiplies what is rounded
    for got, want in zip(*(run(attend, inputs, options, real) for attend in (additive_attention, dense)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4 * sharp, atol=2e-5 * sharp)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_rounding(dtype):
    inputs, options, real = case(dtype=dtype, sharpness=20.0)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    results = run(additive_attention, inputs, options, real), run(dense, exact, options, real)
    for got, want in zip(*results, strict=True):
        assert got.dtype in (dtype, torch.float32)
        assert (got.float() - want).abs().max() <= 0.03 * max(1.0, float(want.abs().max()))


def test_the_kernels_of_triton_give_the_same(monkeypatch):
    pytest.importorskip("triton")
    inputs, options, real = case(kv_heads=2, routers=2)
    want = run(additive_attention, inputs, options, real)
    monkeypatch.setattr(backends, "choose_backend", lambda call: "triton")
    for got, expected in zip(run(additive_attention, inputs, options, real), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def test_nothing_that_grows_with_all_pairs_is_kept():
    largest = {}
    for attend in (additive_attention, dense):
        inputs, options, real = case()
        sizes = []
        with saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            run(attend, inputs, options, real)
        largest[attend] = max(sizes)
    assert largest[dense] == 2 * 4 * LENGTH**2 > largest[additive_attention] == 2 * 4 * LENGTH * 32


@pytest.mark.filterwarnings("ignore:a soft gate")
def test_what_does_not_fit_into_the_scores_goes_by_the_formula(monkeypatch):
    taken = []
    attend = additive.additive_attention
    monkeypatch.setattr(additive, "additive_attention", lambda *a, **o: taken.append(o) or attend(*a, **o))
    for architecture, sharpness, times in (("llama", 10.0, 2), ("llama", 1e4, 0), ("gemma2", 10.0, 0)):
        taken.clear()
        config = FocusConfig(num_groups=4, window=3, gate="additive", gate_sharpness=sharpness)
        focus(architecture, config).train()(tokens(length=30))
        assert len(taken) == times
    assert not additive.serves(torch.zeros(1, dtype=torch.float16), 100.0, 0.001, None)


@pytest.mark.parametrize("name", ["padding", "documents"])
def test_positions_in_32_bits_are_as_good(name, monkeypatch):
    """As masks of transformers have them; kernels count farther."""
    inputs, options, real = case(**CASES[name])
    wanted = run(additive_attention, inputs, options, real)
    seen, serve = [], additive.raw_backend
    monkeypatch.setattr(additive, "raw_backend", lambda call: seen.append(call.tokens) or serve(call))
    narrow = Tokens(*(None if x is None else x.int() for x in options["tokens"][:4]), plain=options["tokens"].plain)
    for got, one in zip(run(additive_attention, inputs, {**options, "tokens": narrow}, real), wanted, strict=True):
        torch.testing.assert_close(got, one)
    assert {x.dtype for tokens in seen for x in tokens[:4] if x is not None} == {torch.int64}
