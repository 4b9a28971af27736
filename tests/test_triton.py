"""The Triton kernels against the oracle: on the GPU where there is one, otherwise in Triton's interpreter."""

import contextlib
import importlib.util
import itertools
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from attention_cases import Case, plain_attention, random_case
from kernel_bounds import bounded
from test_attention import NAMES, worst

from focus_attn import focus_attention
from focus_attn.attention import backward_copies, call, launch, near_far, sorted_rows
from focus_attn.attention.backends import reason_against

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter takes a second a case, a GPU half a minute to compile its kernels.
SEEDS = int(os.environ.get("FOCUS_TEST_SEEDS", "12" if ON_GPU else "6"))
# The interpreter cuts fp32 to bf16 instead of rounding it, so that bf16 can be judged on a GPU alone.
HALVES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that an element nobody wrote is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    launch._setups.clear()
    call._passed.clear()
    yield
    torch.use_deterministic_algorithms(False)


def case_for(seed: int, gates: bool = False) -> Case:
    return random_case(seed, gates=gates, largest=50).to(DEVICE)


@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("seed", range(40_000, 40_000 + 2 * SEEDS))
def test_fp32_matches_the_oracle(seed: int, gates: bool) -> None:
    case = case_for(seed, gates)
    grad = torch.randn(*case.q.shape[:3], case.v.shape[-1], device=DEVICE)
    for name, got, want in zip(NAMES, case.run("triton", grad), case.run("reference", grad), strict=False):
        assert worst(got, want) <= 1e-5 * max(1.0, float(want.abs().max())), f"{name}: {case}"


@pytest.mark.parametrize("memory", [0, 1 << 37], ids=["head by head", "at once"])
@pytest.mark.parametrize("seed", range(45_000, 45_000 + SEEDS))
def test_gradients_of_keys_in_parts(seed: int, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long walks over the queries of a group are cut; a key's parts are those that its queries lie in."""
    monkeypatch.setattr(backward_copies, "ROWS_A_PART", 16)
    monkeypatch.setattr(backward_copies, "MOST_PARTS", 3)
    monkeypatch.setattr(sorted_rows, "memory", lambda device: memory)
    case = case_for(seed, gates=True)
    grad = torch.randn(*case.q.shape[:3], case.v.shape[-1], device=DEVICE)
    for name, got, want in zip(NAMES, case.run("triton", grad), case.run("reference", grad), strict=False):
        assert worst(got, want) <= 1e-5 * max(1.0, float(want.abs().max())), f"{name}: {case}"


@pytest.mark.parametrize("sizes", [(3, 0), (0, 5)], ids=str)
def test_where_there_is_nothing_to_see_nothing_is_learned(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_rows, "memory", lambda device: 1 << 37)
    tensors = [torch.randn(1, 2, n, 16, device=DEVICE, requires_grad=True) for n in (sizes[0], sizes[1], sizes[1])]
    query, key = (torch.zeros(1, 1, n, 1, dtype=torch.long, device=DEVICE) for n in sizes)
    gates = [torch.zeros(1, 1, n, 3, device=DEVICE, requires_grad=True) for n in sizes]
    query_positions, key_positions = (torch.arange(n, device=DEVICE)[None] for n in sizes)
    out = focus_attention(
        *tensors, query, key, num_groups=3, window=2, backend="triton", query_gate=gates[0], key_gate=gates[1],
        query_positions=query_positions, key_positions=key_positions,
    )  # fmt: skip
    grads = torch.autograd.grad(out.sum(), [*tensors, *gates])
    assert all(grad.shape == x.shape and not grad.any() for grad, x in zip(grads, [*tensors, *gates], strict=True))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("seed", range(50_000, 50_000 + SEEDS))
def test_half_precision_loses_no_more_than_twice_what_plain_pytorch_loses(seed: int, dtype: torch.dtype) -> None:
    case = case_for(seed).cast(dtype)
    grad = torch.randn(*case.q.shape[:3], case.v.shape[-1], device=DEVICE).to(dtype)
    want = case.cast(torch.float32).run("reference", grad.float())[:4]
    plain = plain_attention(case, grad)
    for name, got, exact, rough in zip(NAMES[:4], case.run("triton", grad)[:4], want, plain, strict=True):
        assert worst(got, exact) <= 2 * worst(rough, exact) + 1e-5, f"{name}: {case}"


@pytest.mark.parametrize("query_k", [1, 2])
@pytest.mark.parametrize("routers", [1, 2])
def test_gradients_of_plain_calls_in_half_precision(query_k: int, routers: int) -> None:
    """Where the last kernel writes them as they are wanted."""
    q, k, v = (torch.randn(1, 70, heads, 16, device=DEVICE).half().transpose(1, 2) for heads in (4, 2, 2))
    query_ids, key_ids = (torch.randint(0, 3, (1, routers, 70, n), device=DEVICE) for n in (query_k, 1))
    gates = [torch.randn(1, routers, 70, 3, device=DEVICE).log_softmax(-1) for _ in range(2)]
    grad, results = torch.randn(1, 70, 4, 16, device=DEVICE).half().transpose(1, 2), []
    for backend, dtype in (("triton", torch.float16), ("reference", torch.float32)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)] + [x.requires_grad_() for x in gates]
        out = focus_attention(
            *inputs[:3], query_ids, key_ids, num_groups=3, window=5, num_sinks=2, backend=backend,
            query_gate=inputs[3], key_gate=inputs[4],
        )  # fmt: skip
        results.append(torch.autograd.grad(out, inputs, grad.to(dtype)))
    for got, want in zip(*results, strict=True):
        assert worst(got, want) <= 3e-3 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("num_queries", [64, 128])
def test_full_tiles_need_no_masks(num_queries: int, heads: tuple[int, int]) -> None:
    """Lengths that tiles divide: queries and keys are read without a look at where they end."""
    make = torch.Generator().manual_seed(num_queries)
    q, k, v = (
        torch.randn(2, count, length, 16, generator=make).to(DEVICE).requires_grad_()
        for count, length in ((heads[0], num_queries), (heads[1], 128), (heads[1], 128))
    )
    ids = [torch.randint(0, 3, (2, heads[1], length, 1), generator=make).to(DEVICE) for length in (num_queries, 128)]
    case = Case(q, k, v, *ids, {"num_groups": 3, "window": 20, "num_sinks": 3})
    grad = torch.randn(q.shape, generator=make).to(DEVICE)
    with contextlib.nullcontext() if ON_GPU else bounded():
        got = case.run("triton", grad)
    for name, mine, want in zip(NAMES, got, case.run("reference", grad), strict=False):
        assert worst(mine, want) <= 1e-5 * max(1.0, float(want.abs().max())), name


def test_a_window_may_be_the_largest_number_there_is() -> None:
    """Kernels add a token to it."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, generator=make).to(DEVICE).requires_grad_() for _ in range(3))
    ids = [torch.randint(0, 3, (1, 1, 40, 1), generator=make).to(DEVICE) for _ in range(2)]
    grad = torch.randn(q.shape, generator=make).to(DEVICE)
    for most in (2**31 - 1, 2**63 - 1):
        case = Case(q, k, v, *ids, {"num_groups": 3, "window": most, "num_sinks": 2})
        for mine, want in zip(case.run("triton", grad), case.run("reference", grad), strict=True):
            assert worst(mine, want) <= 1e-5 * max(1.0, float(want.abs().max()))


def test_tiles_of_padding_alone_are_not_walked() -> None:
    q, k, v = (torch.randn(1, 2, 100, 16, device=DEVICE) for _ in range(3))
    v[:, :, 64:] = torch.nan
    ids = torch.zeros(1, 1, 100, 1, dtype=torch.long, device=DEVICE)
    real = torch.arange(100, device=DEVICE)[None] < 64
    out = focus_attention(q, k, v, ids, ids, num_groups=1, window=5, key_padding_mask=real, backend="triton")
    assert not out[:, :, 64:].any() and out.isfinite().all()


def test_rows_too_far_apart_for_32_bits_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 40, 2, 16, device=DEVICE).transpose(1, 2).requires_grad_() for _ in range(3))
    ids = torch.randint(0, 3, (1, 1, 40, 1), device=DEVICE)
    case, grad, passed = Case(q, k, v, ids, ids.clone(), {"num_groups": 3, "window": 5}), torch.randn_like(q), []
    real = near_far.rows_and_strides
    monkeypatch.setattr(launch, "FARTHEST", 32)
    monkeypatch.setattr(near_far, "rows_and_strides", lambda *given: passed.append(real(*given)) or passed[-1])
    got = case.run("triton", grad)
    assert passed and all(tensors[1].stride(2) == 16 for tensors, _ in passed)
    for mine, want in zip(got, case.run("reference", grad), strict=True):
        assert worst(mine, want) <= 1e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.skipif(ON_GPU, reason="compute-sanitizer does it there")
@pytest.mark.parametrize("memory", [0, 1 << 37], ids=["head by head", "at once"])
@pytest.mark.parametrize("seed", [45_001, 50_001, 50_002, 50_004])
def test_kernels_stay_inside_their_tensors(seed: int, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_rows, "memory", lambda device: memory)
    case = case_for(seed, gates=seed != 50_001)
    torch.use_deterministic_algorithms(False)  # several groups a key: atomic additions
    grad = torch.randn(*case.q.shape[:3], case.v.shape[-1])
    with bounded() as ran:
        case.run("triton", grad)
    assert {"near_kernel", "query_side_kernel", "key_side_kernel"} <= set(ran)


@pytest.mark.skipif(ON_GPU, reason="the interpreter's own")
@pytest.mark.parametrize("atomic", [False, True])
def test_an_address_outside_is_found(atomic: bool) -> None:
    room = torch.zeros(30)
    with bounded(), pytest.raises(Exception, match="outside of its tensors, 6 addresses of 16"):
        _write_sixteen[(1,)](room[:10], ATOMIC=atomic)
    assert not room.any()


@triton.jit
def _write_sixteen(X, ATOMIC: tl.constexpr):  # type: ignore[no-untyped-def]
    if ATOMIC:
        tl.atomic_add(X + tl.arange(0, 16), 1.0)
    else:
        tl.store(X + tl.arange(0, 16), 1.0)


@pytest.mark.parametrize(
    ("room", "width", "begin"), [(40, 40, 0), (72, 64, 0), (80, 64, 4)], ids=["odd width", "odd stride", "odd begin"]
)
def test_rows_out_of_step_have_tiles_without_warpgroup_products(room: int, width: int, begin: int) -> None:
    """Which a compiler gets wrong there (`launch.in_step`)."""
    rows = [torch.randn(1, 2, 70, room, device=DEVICE).half()[..., begin : begin + width] for _ in range(3)]
    inputs = [x.requires_grad_() for x in rows]
    ids, results, used = torch.randint(0, 3, (1, 1, 70, 1), device=DEVICE), [], []
    recorded = launch.launch_variant

    def record(variants, tag, kernel, grid, arguments, constants, warps, stages):  # type: ignore[no-untyped-def]
        used.append({name: constants().get(name) for name in ("BLOCK_M", "BLOCK_N")})
        recorded(variants, tag, kernel, grid, arguments, constants, warps, stages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch_variant", record)
        for backend in ("triton", "reference"):
            out = focus_attention(*inputs, ids, ids, num_groups=3, window=5, num_sinks=2, backend=backend)
            results.append([out.detach(), *torch.autograd.grad(out.sum(), inputs)])
    products = [tile for tile in used if None not in tile.values()]
    fewest = 4 if ON_GPU else 6  # cuDNN has the groups there
    assert len(products) >= fewest and all(max(tile.values()) <= 32 for tile in products)
    for got, want in zip(*results, strict=True):
        assert worst(got, want) <= 3e-3 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("room", [101_376, 166_912], ids=["99 KiB", "163 KiB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 256])
def test_tiles_shrink_to_the_memory_of_smaller_devices(
    width: int, dtype: torch.dtype, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes as Triton 3.6 compiled the kernels for sm_89 and sm_80: twice a tile's rows and keys at this width on the
    key side."""
    monkeypatch.setattr(near_far, "shared_memory", lambda device: room)
    q, k, v = (torch.randn(1, heads, 40, width, device=DEVICE, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    ids, results = torch.randint(0, 3, (1, 2, 40, 1), device=DEVICE), []
    for backend in ("triton", "reference"):
        out = focus_attention(q, k, v, ids, ids, num_groups=3, window=5, num_sinks=2, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))])
    for got, want in zip(*results, strict=True):
        assert worst(got, want) <= (1e-5 if dtype == torch.float32 else 5e-3) * max(1.0, float(want.abs().max()))
    for name in ("near", "far", "near, query side", "near, key side", "far, query side", "far, key side", "sinks"):
        call = SimpleNamespace(q=q, k=k, v=v)
        tile = near_far.tile_for(name, call)  # type: ignore[arg-type]
        item = q.element_size()
        assert near_far.bytes_of(tile, name, width * item, item == 4) <= room and min(tile.rows, tile.keys) >= 16


def test_gradients_are_brought_into_step() -> None:
    whole = torch.zeros(1, 2, 70, 80).half()
    odd = [whole[..., 4:68], whole.as_strided((1, 2, 70, 64), (7, 4480, 64, 1)), whole[..., :72]]
    assert [launch.in_step(launch.brought_into_step(x)) for x in odd] == [True, True, False]
    assert launch.brought_into_step(whole) is whole and launch.brought_into_step(odd[2]) is odd[2]


def test_results_repeat_bit_for_bit() -> None:
    case = case_for(60_001)
    grad = torch.randn(*case.q.shape[:3], case.v.shape[-1], device=DEVICE)
    for once, again in zip(case.run("triton", grad), case.run("triton", grad), strict=True):
        assert torch.equal(once, again)


def test_logsumexp_is_that_of_the_oracle() -> None:
    case = case_for(60_002)
    answers = [
        focus_attention(
            case.q, case.k, case.v, case.query_groups, case.key_groups, backend=backend, return_lse=True, **case.options
        )[1]
        for backend in ("triton", "reference")
    ]
    torch.testing.assert_close(*answers, rtol=0, atol=1e-5)


def test_what_it_cannot_serve_is_said() -> None:
    q = torch.randn(1, 2, 40, 8, device=DEVICE)
    ids = torch.zeros(1, 1, 40, 1, dtype=torch.int64, device=DEVICE)

    def why_not(q: torch.Tensor = q, ids: torch.Tensor = ids, **options: object) -> str:
        return reason_against("triton", Case(q, q, q, ids, ids, {"num_groups": 2, "window": 4, **options}).call()) or ""

    assert why_not() == ""
    assert "300" in why_not(torch.randn(1, 2, 40, 300, device=DEVICE))
    assert "float64" in why_not(q.double())
    assert "scale" in why_not(scale=-1.0)
    assert "bits" in why_not(ids=ids.expand(-1, -1, -1, 2), num_groups=64)


@pytest.mark.parametrize("seed", range(8))
def test_the_two_planners_agree(seed: int) -> None:
    """The counting sort of plain calls against the sort of any call."""
    from focus_attn.attention import device_plan, triton_plan
    from focus_attn.attention.call import make_call
    from focus_attn.attention.launch import setup_for

    pick = random.Random(seed)
    groups, choices, queries = pick.choice([1, 3, 8]), pick.choice([1, 1, 3]), pick.choice([1, 129, 700, 1500])
    keys = queries + pick.choice([0, 0, 50, 1100])
    make = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(0, groups, (2, 2, length, min(groups, k)), generator=make).to(DEVICE)
        for length, k in ((queries, choices), (keys, 1))
    ]
    q, k = (torch.zeros(2, 2, length, 8, device=DEVICE) for length in (queries, keys))
    absent = "scale softcap sliding_window sink_logits key_padding_mask query_positions key_positions".split()
    nothing = dict.fromkeys([*absent, "query_segments", "key_segments", "query_gate", "key_gate"])
    call = make_call(q, k, k, *ids, num_groups=groups, window=pick.choice([0, 7, 128]), num_sinks=4, **nothing)
    assert triton_plan.serves(call)
    plan = triton_plan.room_for_far(call, backward=True)
    triton_plan.plan_far(call, setup_for(call), plan)
    got, seen_by, _ = plan
    want = device_plan.plan_far(call, *device_plan.places(call.tokens))
    torch.testing.assert_close(got.group_starts, want.group_starts, rtol=0, atol=0)
    torch.testing.assert_close(got.ranges, want.ranges, rtol=0, atol=0)
    for line in itertools.product(range(2), range(2)):
        real = int((call.key_groups[line][4:]).numel())
        assert torch.equal(got.key_slots[line][:real], want.key_slots[line][:real])
        for choice in range(min(groups, choices)):
            real = int(want.group_starts[line][choice, -1])
            assert torch.equal(got.query_slots[line][choice, :real], want.query_slots[line][choice, :real])
    first, last = seen_by.unbind(3)
    want_first, want_last = device_plan.seen_by(want.ranges, keys).unbind(3)
    met = last > first
    assert torch.equal(met, want_last > want_first)
    assert torch.equal(first[met], want_first[met]) and torch.equal(last[met], want_last[met])


def fake_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's part by plain PyTorch, job after job."""
    from focus_attn.attention import cudnn

    def runs(shape, jobs):
        queries = (jobs.offsets[0] // (shape.heads * shape.width)).tolist()
        keys = (jobs.offsets[1] // (shape.kv_heads * shape.width)).tolist()
        assert torch.equal(jobs.offsets[2] * shape.width, jobs.offsets[0])
        lengths = zip(jobs.query_lengths.tolist(), jobs.key_lengths.tolist(), strict=True)
        for query, key, (rows, columns) in zip(queries, keys, lengths, strict=False):
            assert (rows > 0) == (columns > 0) and rows <= shape.longest_queries and columns <= shape.longest_keys
            if rows:
                yield slice(query, query + rows), slice(key, key + columns)

    def probabilities(shape, q, k, lse=None):
        scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(shape.heads // shape.kv_heads, 1)) * shape.scale
        if shape.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        lse = scores.logsumexp(-1) if lse is None else lse
        return (scores - lse[..., None]).exp(), lse

    def rows(shape, x):
        return x.view(-1, x.shape[-2], x.shape[-1])

    def forward(shape, jobs, *tensors):
        q, k, v, out, lse = (rows(shape, x) for x in tensors[:5])
        for queries, keys in runs(shape, jobs):
            p, total = probabilities(shape, q[queries].float(), k[keys].float())
            values = v[keys].float().repeat_interleave(shape.heads // shape.kv_heads, 1)
            out[queries], lse[queries] = torch.einsum("hij,jhd->ihd", p, values).to(out.dtype), total.T[..., None]

    def backward(shape, jobs, tensors, grads):
        repeat = shape.heads // shape.kv_heads
        tensors, grads = ([rows(shape, x) for x in some] for some in (tensors, grads))
        for at, _ in runs(shape, jobs):
            q, k, v, out, lse, grad = (x[at].float() for x in tensors)
            p, _ = probabilities(shape, q, k, lse[..., 0].T)
            dp = torch.einsum("ihd,jhd->hij", grad, v.repeat_interleave(repeat, 1))
            ds = p * (dp - (grad * out).sum(-1).T[..., None]) * shape.scale
            grads[0][at] = torch.einsum("hij,jhd->ihd", ds, k.repeat_interleave(repeat, 1))
            grads[1][at] = torch.einsum("hij,ihd->jhd", ds, q).unflatten(1, (-1, repeat)).sum(2)
            grads[2][at] = torch.einsum("hij,ihd->jhd", p, grad).unflatten(1, (-1, repeat)).sum(2)

    monkeypatch.setattr(cudnn, "can_serve", lambda shape: True)
    monkeypatch.setattr(cudnn, "can_differentiate", lambda shape, deterministic: True)
    monkeypatch.setattr(cudnn, "room_for_forward", lambda shape: (torch.empty(1), None))
    monkeypatch.setattr(cudnn, "forward", forward)
    monkeypatch.setattr(cudnn, "backward", backward)


def shared_ids(length: int, heads: tuple[int, int], sinks: int) -> tuple[Case, torch.Tensor]:
    """A call whose queries and keys have the same ids, and a gradient."""
    make = torch.Generator().manual_seed(0)
    groups = torch.randint(0, 5, (2, 1, length, 1), generator=make)
    groups[groups == 3] = 4  # an empty one
    groups = groups.to(DEVICE)
    q, k, v = (
        torch.randn(2, count, length, 16, generator=make).to(DEVICE, torch.bfloat16 if ON_GPU else torch.float32)
        for count in (heads[0], heads[1], heads[1])
    )
    options = {"num_groups": 5, "window": 20, "num_sinks": sinks}
    grad = torch.randn(*q.shape, generator=make).to(DEVICE, q.dtype)
    return Case(*(x.requires_grad_() for x in (q, k, v)), groups, groups, options), grad


def check_shared_ids(case: Case, grad: torch.Tensor) -> None:
    """Triton's outputs and gradients against the oracle's."""
    got = case.run("triton", grad)
    want = case.cast(torch.float32).run("reference", grad.float())
    rough = plain_attention(case, grad) if ON_GPU else [None] * 4
    for name, mine, exact, plain in zip(NAMES[:4], got, want, rough, strict=False):
        bound = 2 * worst(plain, exact) + 1e-5 if ON_GPU else 1e-5 * max(1.0, float(exact.abs().max()))
        assert worst(mine, exact) <= bound, name


@pytest.mark.parametrize("copies_fit", [True, False], ids=["at once", "head by head"])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("length", [201, 192], ids=["a part of a tile left over", "full tiles"])
def test_shared_ids_go_through_one_causal_attention_a_group(
    length: int, heads: tuple[int, int], sinks: int, copies_fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with cuDNN's package its own kernels do it; the arithmetic around them is checked everywhere."""
    from focus_attn.attention import cudnn, sorted_rows

    if importlib.util.find_spec("cudnn") is None or not ON_GPU:
        fake_cudnn(monkeypatch)
    monkeypatch.setattr(sorted_rows, "heads_at_once", lambda call, copies: heads[1] if copies_fit else 1)
    calls = []
    real = cudnn.forward
    monkeypatch.setattr(cudnn, "forward", lambda *arguments: (calls.append(arguments), real(*arguments)))
    check_shared_ids(*shared_ids(length, heads, sinks))
    assert len(calls) == (1 if copies_fit else heads[1])


def test_where_cudnn_has_no_backward_the_general_way_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from focus_attn.attention import cudnn

    if importlib.util.find_spec("cudnn") is None or not ON_GPU:
        fake_cudnn(monkeypatch)
    monkeypatch.setattr(cudnn, "can_differentiate", lambda shape, deterministic: False)
    monkeypatch.setattr(cudnn, "backward", None)
    check_shared_ids(*shared_ids(150, (2, 2), 3))


@pytest.mark.parametrize("copies_fit", [True, False], ids=["at once", "head by head"])
@pytest.mark.parametrize("routers", ["layer", "kv_head"])
@pytest.mark.parametrize("query_k", [1, 2])
def test_long_prefixes_go_through_cudnn(
    query_k: int, routers: str, copies_fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from focus_attn.attention import bulk, cudnn, sorted_rows

    if importlib.util.find_spec("cudnn") is None or not ON_GPU:
        fake_cudnn(monkeypatch)
    for name, value in (("SHORTEST", 1), ("JOB", 70), ("LEAST_KEYS", 9)):
        monkeypatch.setattr(bulk, name, value)
    monkeypatch.setattr(sorted_rows, "heads_at_once", lambda call, copies: 2 if copies_fit else 1)
    make = torch.Generator().manual_seed(query_k)
    count = 1 if routers == "layer" else 2
    query_groups = torch.rand(2, count, 300, 4, generator=make).topk(query_k, -1).indices.to(DEVICE)
    key_groups = torch.randint(0, 3, (2, count, 333, 1), generator=make).to(DEVICE)  # group 3 has no keys
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    q, k, v = (
        torch.randn(2, heads, length, 16, generator=make).to(DEVICE, dtype).requires_grad_()
        for heads, length in ((6, 300), (2, 333), (2, 333))
    )
    case = Case(q, k, v, query_groups, key_groups, {"num_groups": 4, "window": 20, "num_sinks": 2})
    calls, real = [], cudnn.forward
    monkeypatch.setattr(cudnn, "forward", lambda *arguments: (calls.append(arguments), real(*arguments)))
    grad = torch.randn(q.shape, generator=make).to(DEVICE, dtype)
    got = case.run("triton", grad)
    assert len(calls) == query_k * (1 if copies_fit else 2)
    assert all(int(jobs.key_lengths.sum()) > 0 for _, jobs, *_ in calls)
    want = case.cast(torch.float32).run("reference", grad.float())
    rough = plain_attention(case, grad) if ON_GPU else [None] * 4
    for name, mine, exact, plain in zip(NAMES[:4], got, want, rough, strict=False):
        bound = 2 * worst(plain, exact) + 1e-5 if ON_GPU else 1e-5 * max(1.0, float(exact.abs().max()))
        assert worst(mine, exact) <= bound, name


def test_ids_may_be_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other id of a longer list: kernels read ids one after the other."""
    if importlib.util.find_spec("cudnn") is None or not ON_GPU:
        fake_cudnn(monkeypatch)
    make = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    q, k, v = (torch.randn(1, 2, 99, 16, generator=make).to(DEVICE, dtype).requires_grad_() for _ in range(3))
    ids, others = (torch.randint(0, 4, (1, 1, 99, 2), generator=make).to(DEVICE)[..., :1] for _ in range(2))
    grad = torch.randn(q.shape, generator=make).to(DEVICE, dtype)
    for key_groups in (ids, others):  # shared and not
        case = Case(q, k, v, ids, key_groups, {"num_groups": 4, "window": 10})
        for got, want in zip(case.run("triton", grad), case.run("reference", grad), strict=True):
            assert worst(got, want) <= (1e-5 if dtype == torch.float32 else 0.05) * max(1.0, float(want.abs().max()))
