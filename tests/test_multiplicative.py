"""The multiplicative gate's kernels against its formula: on the GPU where there is one, else in the interpreter."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from kernels_everywhere import DEVICE, kernels_everywhere
from test_additive import CASES, LENGTH, case, run
from tiny import focus, tokens
from torch.autograd.graph import saved_tensors_hooks

from focus_attn import FocusConfig, kernel_use
from focus_attn.attention import multiplicative
from focus_attn.attention.soft import soft_gated_attention

pytest.importorskip("triton")
from focus_attn.attention import multiplicative_launch
from focus_attn.attention.launch import Tile

MORE_CASES = {
    **CASES,
    "softcap": {"softcap": 2.0},
    "softcap and sink logits": {"softcap": 2.0, "sink_logits": True, "kv_heads": 2},
    "many groups": {"groups": 40},
    "odd widths": {"value_width": 7},
}


@pytest.fixture(autouse=True)
def _kernel_everywhere() -> Iterator[None]:
    with kernels_everywhere():
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of queries and of keys in a short text."""
    monkeypatch.setattr(multiplicative_launch, "tile_for", lambda *_: Tile(32, 16, 4, 1))


def by_kernels(*args, **options):
    return soft_gated_attention(*args, gate="multiplicative", **options)


def by_formula(*args, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiplicative, "kernels_for", lambda *_: None)
        return soft_gated_attention(*args, gate="multiplicative", **options)


def made(softcap=None, **given):
    inputs, options, real = case(**given)
    return inputs, {**options, "softcap": softcap}, real


@pytest.mark.parametrize("name", MORE_CASES)
def test_they_compute_the_formula(name, small_tiles):
    inputs, options, real = made(**MORE_CASES[name])
    for got, want in zip(*(run(attend, inputs, options, real) for attend in (by_kernels, by_formula)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_rounding(dtype):
    inputs, options, real = made(dtype=dtype, sharpness=10.0, kv_heads=2)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    results = run(by_kernels, inputs, options, real), run(by_formula, exact, options, real)
    for got, want in zip(*results, strict=True):
        assert got.dtype in (dtype, torch.float32)
        assert (got.detach().float() - want).abs().max() <= 0.03 * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_heads_of_usual_widths_have_tiles_that_a_compiler_gets_right(width, documents):
    """Four query heads on one KV head, as Gemma-3-270M has: with 64 rows and eight warps ptxas 12.8 reads elsewhere."""
    given = made(dtype=torch.bfloat16, width=width, value_width=width, kv_heads=1, documents=documents)
    inputs, options, real = given
    options["scale"] = width**-0.5
    exact = [x.detach().float().requires_grad_() for x in inputs]
    results = run(by_kernels, inputs, options, real), run(by_formula, exact, options, real)
    for got, want in zip(*results, strict=True):
        assert (got.detach().float() - want).abs().max() <= 0.03 * max(1.0, float(want.detach().abs().max()))


def test_a_text_whose_queries_are_the_last_of_the_slots(small_tiles):
    inputs, options, _ = made(kv_heads=2)
    q, _, _, query_gate, _ = inputs
    late = slice(20, LENGTH)
    tail = [x[:, :, late].detach().requires_grad_() for x in (q, query_gate)]
    given = [tail[0], *inputs[1:3], tail[1], inputs[4]]
    at = options["tokens"].query_positions
    options["tokens"] = options["tokens"]._replace(query_positions=at[:, late])
    real = torch.ones_like(at[:, late], dtype=torch.bool)
    for got, want in zip(*(run(attend, given, options, real) for attend in (by_kernels, by_formula)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def test_nothing_that_grows_with_all_pairs_is_kept():
    largest = {}
    for attend in (by_kernels, by_formula):
        inputs, options, real = made()
        sizes = []
        with saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            run(attend, inputs, options, real)
        largest[attend] = max(sizes)
    assert largest[by_formula] == 2 * 4 * LENGTH**2 > largest[by_kernels] == 2 * 4 * LENGTH * 16


@pytest.mark.filterwarnings("ignore:a soft gate")
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_training_step_gives_routers_the_same_gradients(architecture, monkeypatch):
    config = FocusConfig.paper(num_groups=4, window=3)
    grads = []
    launched = []
    forward = multiplicative_launch.forward
    monkeypatch.setattr(multiplicative_launch, "forward", lambda *a: launched.append(a) or forward(*a))
    for by_hand in (True, False):
        if not by_hand:
            monkeypatch.setattr(multiplicative, "kernels_for", lambda *_: None)
        model, ids = focus(architecture, config), tokens(length=40)
        model.to(DEVICE).train()
        mask = torch.ones_like(ids)
        mask[0, :6] = 0
        ids, mask = ids.to(DEVICE), mask.to(DEVICE)
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(launched) == sum(layer.router is not None for layer in model.focus_layers())
    assert all(grad.abs().max() > 0 for grad in grads[0])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


def test_what_no_kernel_is_for_goes_by_the_formula():
    q = torch.randn(1, 2, 5, 16, device=DEVICE)
    assert multiplicative.kernels_for(q, q, q, 4) is multiplicative_launch
    assert multiplicative.kernels_for(q.double(), q.double(), q.double(), 4) is None
    assert multiplicative.kernels_for(q, q, q, 200) is None
    wide = torch.randn(1, 2, 5, 512, device=DEVICE)
    assert multiplicative.kernels_for(wide, wide, q, 4) is None


def test_one_row_of_positions_is_that_of_every_text(small_tiles):
    inputs, options, real = made()
    one = options["tokens"]
    options["tokens"] = one._replace(query_positions=one.query_positions[:1], key_positions=one.key_positions[:1])
    for got, want in zip(*(run(attend, inputs, options, real) for attend in (by_kernels, by_formula)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("room", [232448, 163 * 1024, 99 * 1024])
def test_kernels_fit_into_the_shared_memory_of_devices(room, monkeypatch):
    monkeypatch.setattr(multiplicative_launch, "shared_memory", lambda device: room)
    for item, width, groups in itertools.product((2, 4), (64, 128, 256), (8, 64)):
        assert multiplicative_launch.has_room(width, item, groups, torch.device(DEVICE))
    for item, width in itertools.product((2, 4), (64, 128, 256)):
        largest = item == 4 and width == 256 and room < 2**17  # the one that 99 KiB are too few for
        assert multiplicative_launch.has_room(width, item, 128, torch.device(DEVICE)) is not largest
    assert not multiplicative_launch.has_room(512, 2, 8, torch.device(DEVICE))
    monkeypatch.setattr(multiplicative_launch, "shared_memory", lambda device: 2**14)
    q = torch.randn(1, 2, 5, 256, device=DEVICE)
    assert multiplicative.kernels_for(q, q, q, 8) is None


@pytest.mark.filterwarnings("ignore:a soft gate")
@pytest.mark.parametrize(("backend", "launches"), [("reference", 0), ("stock", 0), ("triton", 2), ("auto", 2)])
def test_the_backend_that_was_asked_for_is_taken(backend, launches, monkeypatch):
    launched = []
    forward = multiplicative_launch.forward
    monkeypatch.setattr(multiplicative_launch, "forward", lambda *a: launched.append(a) or forward(*a))
    model = focus("llama", FocusConfig.paper(num_groups=4, window=3, backend=backend)).to(DEVICE).train()
    model(tokens(length=20).to(DEVICE))
    assert len(launched) == launches


@pytest.mark.parametrize(
    ("tile", "width", "item", "columns", "compiled"),
    [
        (Tile(64, 32, 4, 1), 64, 2, 16, 45056),
        (Tile(64, 32, 4, 1), 128, 2, 16, 75776),
        (Tile(32, 16, 8, 1), 256, 2, 16, 55296),
        (Tile(32, 32, 8, 1), 128, 2, 64, 65536),
        (Tile(32, 16, 8, 1), 128, 4, 16, 57344),
        (Tile(32, 16, 8, 1), 256, 4, 16, 106496),
    ],
)
def test_bytes_are_no_fewer_than_compiled(tile, width, item, columns, compiled):
    """By Triton 3.6 for Hopper and for Ampere, of the kernel that takes the most."""
    assert compiled <= multiplicative_launch.bytes_of(tile, width, item, columns) <= 1.6 * compiled


@pytest.mark.filterwarnings("ignore:a soft gate")
def test_kernels_that_are_not_there_are_not_replaced_in_silence(monkeypatch):
    monkeypatch.setattr(kernel_use, "DEVICES", ())
    model = focus("llama", FocusConfig.paper(num_groups=4, window=3, backend="triton")).to(DEVICE).train()
    with pytest.raises(ValueError, match=r"no kernels of the multiplicative gate.*backend=.auto."):
        model(tokens(length=20).to(DEVICE))


def test_a_second_derivative_is_refused():
    inputs, options, _ = made()
    out = by_kernels(*inputs, **options)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
