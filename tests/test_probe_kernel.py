"""The probes' kernel against PyTorch's operators: on the GPU where there is one, otherwise in Triton's interpreter."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels_everywhere import DEVICE, kernels_everywhere
from tiny import focus, tokens
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from focus_attn import FocusConfig, focus_attention, kernel_use
from focus_attn.training.probe import Probe, _Given, by_operators, gate_gradients
from focus_attn.training.step import StepOptions, training_step
from focus_attn.visibility import Pattern, Tokens, count_positions

pytest.importorskip("triton")
from focus_attn.attention.launch import Tile
from focus_attn.training import probe_kernel


@pytest.fixture(autouse=True)
def _kernel_everywhere() -> Iterator[None]:
    with kernels_everywhere():
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of probes and of keys in a short text."""
    monkeypatch.setattr(probe_kernel, "tile_for", lambda q, v: Tile(16, 16, 4, 1))
    monkeypatch.setattr(probe_kernel, "BLOCKS_AT_ONCE", 4)


def case(
    *, batch: int = 1, heads: int = 3, kv_heads: int = 1, routers: int = 1, length: int = 83, probes: int = 21,
    width: int = 32, value_width: int | None = None, groups: int = 5, query_k: int = 1, key_k: int = 1,
    window: int = 6, num_sinks: int = 2, sliding: int | None = None, softcap: float | None = None,
    padding: int = 0, documents: int = 1, at: list[int] | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:  # fmt: skip
    """What `gate_gradients` takes: a forward of the oracle, and a gradient of its output."""
    make = functools.partial(torch.randn, device=DEVICE)
    q, k, v = (
        make(batch, length, n, d).transpose(1, 2).to(dtype)  # as a model has them: heads inside tokens
        for n, d in ((heads, width), (kv_heads, width), (kv_heads, value_width or width))
    )
    real = torch.ones(batch, length, dtype=torch.bool, device=DEVICE)
    real[0, :padding] = False
    segments = None if documents == 1 else (torch.arange(length, device=DEVICE) * documents // length).expand(batch, -1)
    positions = count_positions(real, segments).int()
    where, pattern = Tokens(positions, positions, segments, segments), Pattern(groups, window, num_sinks, sliding)
    ids = [torch.randint(0, groups, (batch, routers, length, n), device=DEVICE) for n in (query_k, key_k)]
    out, lse = focus_attention(
        q, k, v, *ids, num_groups=groups, window=window, num_sinks=num_sinks, softcap=softcap, sliding_window=sliding,
        query_positions=positions, key_positions=positions, query_segments=segments, key_segments=segments,
        backend="reference", return_lse=True,
    )  # fmt: skip
    probe = Probe(length, window + 1, probes, 1.5, q.device)
    if at is not None:
        probe.positions = torch.tensor(at, device=DEVICE)
    grad = make(batch, length, heads, v.shape[-1]).transpose(1, 2).to(dtype)
    return _Given(probe, where, pattern, width**-0.5, softcap), grad, out, q, k, v, lse, *ids


CASES = {
    "H1": {"heads": 1},
    "H3-per-KV": {"heads": 6, "kv_heads": 2, "routers": 2},
    "R1-of-Hkv2": {"heads": 6, "kv_heads": 2, "routers": 1},
    "query_k2": {"query_k": 2},
    "key_k2": {"key_k": 2},
    "both_k2": {"query_k": 2, "key_k": 2, "groups": 7},
    "softcap": {"softcap": 1.5},
    "sliding": {"sliding": 25},
    "no-sinks": {"num_sinks": 0, "window": 0},
    "padding": {"batch": 2, "padding": 37},
    "documents": {"batch": 2, "documents": 3},
    "duplicates": {"at": [9, 40, 40, 40, 41, 60, 60, 82, 82]},
    "one-probe": {"at": [50]},
    "last-key-reached-by-none": {"window": 60},
    "D64-Dv32": {"width": 64, "value_width": 32},
    "D128": {"width": 128, "length": 50},
    "D40": {"width": 40},
    "K17": {"groups": 17},
}


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    for mine, exact in zip(got, want, strict=True):
        assert mine.shape == exact.shape and mine.dtype == exact.dtype
        assert float((mine - exact).abs().max()) <= tolerance * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("small_tiles")
def test_gradients_are_those_of_the_operators(name: str) -> None:
    given = case(**CASES[name])
    want = by_operators(*given)
    assert min(float(x.abs().max()) for x in want) > 0.01  # or nothing would be compared
    assert_same(gate_gradients(*given), want, 1e-5)


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_tiles_for_every_width(width: int) -> None:
    given = case(width=width, length=150, probes=70)
    assert_same(gate_gradients(*given), by_operators(*given), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_half_precision_loses_little(dtype: torch.dtype) -> None:
    given = case(heads=6, kv_heads=2, routers=2, dtype=dtype)
    assert_same(gate_gradients(*given), by_operators(*given), 3e-3)  # the oracle widens the same inputs to fp32


@pytest.mark.usefixtures("small_tiles")
def test_results_repeat_bit_for_bit() -> None:
    given = case(at=[9, 40, 40, 40, 41, 60, 60, 82, 82], heads=4, kv_heads=2)
    for once, again in zip(gate_gradients(*given), gate_gradients(*given), strict=True):
        assert torch.equal(once, again)


@pytest.mark.parametrize("documents", [1, 3])
def test_blocks_that_cannot_meet_are_passed_over(documents: int) -> None:
    given, *_ = case(documents=documents, length=160, window=20, at=list(range(21, 160)))
    tile = Tile(16, 16, 4, 1)
    reach = probe_kernel.find_reach(given.probe.positions, given.tokens, given.pattern, tile)
    far = given.probe.far(given.tokens, given.pattern)[0, 0]
    begin, end = reach.bounds[0].tolist()
    for block in range(10):
        met = far[:, 16 * block : 16 * block + 16].any(1).nonzero()[:, 0].tolist()
        assert all(begin[block] <= i < end[block] for i in met)
    assert end[-1] <= begin[-1]  # nobody stands beyond a window of 20 from the last keys
    visited = sum(max(0, b - a) for a, b in zip(begin, end, strict=True))
    assert visited < 10 * 139 * (0.55 if documents == 1 else 0.3)


def test_whoever_watches_sees_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case()
    want, calls = by_operators(*given), []
    monkeypatch.setattr(probe_kernel, "gate_gradients", lambda *some: calls.append(some))
    with FlopCounterMode(display=False) as counted:
        got = gate_gradients(*given)
    assert not calls and counted.get_total_flops() > 0
    assert_same(got, want, 1e-6)


def test_a_step_learns_the_same_through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = focus(config=FocusConfig(num_groups=4, window=8, num_sinks=2, router_dim=8)).train().to(DEVICE)
    ids, calls = tokens(length=40).to(DEVICE), []
    launch = probe_kernel.gate_gradients
    monkeypatch.setattr(probe_kernel, "gate_gradients", lambda *given: calls.append(given) or launch(*given))
    results = []
    for devices in ((DEVICE,), ()):
        monkeypatch.setattr(kernel_use, "DEVICES", devices)
        torch.manual_seed(1)
        model.zero_grad()
        training_step(model, ids, options=StepOptions(probes=12)).loss.backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(calls) == len(model.focus_layers())
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_what_the_kernel_has_no_room_for_goes_by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_kernel, "gate_gradients", None)
    given = case(groups=200)
    assert_same(gate_gradients(*given), by_operators(*given), 0)
