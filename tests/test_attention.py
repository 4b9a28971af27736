"""Every backend against the oracle: outputs, gradients, memory, and what must not be done."""

import importlib.util
import math

import pytest
import torch
from attention_cases import Case, plain_attention, random_case

from focus_attn import focus_attention
from focus_attn.attention import kernels, pieces, stock
from focus_attn.attention.plan import branches, count_pairs
from focus_attn.visibility import Pattern, Tokens, count_visible_pairs, visible_mask

BACKENDS = ["stock"]
CASES_A_TEST = 20
NAMES = ("out", "q", "k", "v", "other", "other", "other")


@pytest.fixture(params=["blocks", "default"])
def _block_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that small texts have every kind of piece; and the sizes that users get."""
    if request.param == "blocks":
        monkeypatch.setattr(pieces, "NEAR_BLOCK", 16)
        monkeypatch.setattr(pieces, "FAR_BLOCK", 24)
        monkeypatch.setattr(pieces, "SINK_BLOCK", 40)
        monkeypatch.setattr(stock, "DENSE_PAIRS", 0)


def sparse_cases(chunk: int, **options: bool) -> list[Case]:
    """CASES_A_TEST random cases in which something is hidden: dense ones prove nothing and do not count."""
    cases, seed = [], 10_000 * chunk
    while len(cases) < CASES_A_TEST:
        case = random_case(seed, **options)
        seed += 1
        if case.is_sparse():
            cases.append(case)
    return cases


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).abs().max()) if want.numel() else 0.0


@pytest.mark.usefixtures("_block_sizes")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", range(16))
def test_fp32_matches_the_oracle(backend: str, chunk: int) -> None:
    for case in sparse_cases(chunk):
        grad = torch.randn(*case.q.shape[:3], case.v.shape[-1])
        for name, got, want in zip(NAMES, case.run(backend, grad), case.run("reference", grad), strict=False):
            assert worst(got, want) <= 1e-5 * max(1.0, float(want.abs().max())), f"{name}: {case}"


@pytest.mark.usefixtures("_block_sizes")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", range(16, 24))
def test_bf16_loses_no_more_than_twice_what_plain_pytorch_loses(backend: str, chunk: int) -> None:
    for full in sparse_cases(chunk):
        case = full.cast(torch.bfloat16)
        grad = torch.randn(*case.q.shape[:3], case.v.shape[-1]).bfloat16()
        want = case.cast(torch.float32).run("reference", grad.float())[:4]
        plain = plain_attention(case, grad)
        for name, got, exact, rough in zip(NAMES[:4], case.run(backend, grad)[:4], want, plain, strict=True):
            assert worst(got, exact) <= 2 * worst(rough, exact) + 1e-5, f"{name}: {case}"


@pytest.mark.usefixtures("_block_sizes")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", range(24, 28))
def test_gates_carry_the_gradient_of_the_log_assignments(backend: str, chunk: int) -> None:
    for case in sparse_cases(chunk, gates=True):
        grad = torch.randn(*case.q.shape[:3], case.v.shape[-1])
        for name, got, want in zip(NAMES, case.run(backend, grad), case.run("reference", grad), strict=False):
            assert worst(got, want) <= 1e-5 * max(1.0, float(want.abs().max())), f"{name}: {case}"


def test_a_gate_does_not_change_the_output() -> None:
    case = random_case(3, gates=True)
    without = {k: v for k, v in case.options.items() if "gate" not in k}
    for backend in ("reference", *BACKENDS):
        gated = focus_attention(
            case.q, case.k, case.v, case.query_groups, case.key_groups, backend=backend, **case.options
        )
        plain = focus_attention(case.q, case.k, case.v, case.query_groups, case.key_groups, backend=backend, **without)
        torch.testing.assert_close(gated, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_the_plan_holds_every_visible_pair_once(seed: int, published: bool) -> None:
    case = random_case(seed)
    call = case.call()
    if published and not stock.is_published_setting(call):
        ids = torch.randint(0, 4, (2, 1, 90, 1))
        q = torch.randn(2, 2, 90, 8)
        case = Case(q, q, q, ids, ids, {"num_groups": 4, "window": seed % 12})
        call = case.call()
    assert not published or stock.is_published_setting(call)
    routers = call.query_groups.shape[1]
    met = torch.zeros(call.q.shape[0], routers, call.q.shape[2], call.k.shape[2], dtype=torch.int64)
    for row in range(call.q.shape[0]):
        for branch in branches(call.query_groups, call.key_groups, call.tokens, call.pattern, row, published):
            queries = torch.arange(call.q.shape[2]) if branch.queries is None else branch.queries
            keys = torch.arange(call.k.shape[2]) if branch.keys is None else branch.keys
            at = torch.arange(len(keys))
            inside = (at >= branch.lo[:, None]) & (at < branch.hi[:, None])
            if branch.apart is not None:
                inside &= branch.apart[0][:, None] != branch.apart[1]
            heads = slice(None) if branch.router is None else slice(branch.router, branch.router + 1)
            met[row, heads, queries[:, None], keys] += inside.long()
    mask = visible_mask(call.query_groups, call.key_groups, call.tokens, call.pattern)
    torch.testing.assert_close(met, mask.long())
    counted = count_visible_pairs(call.query_groups, call.key_groups, call.tokens, call.pattern)
    torch.testing.assert_close(met.sum((-2, -1)), counted)
    torch.testing.assert_close(count_pairs(call.query_groups, call.key_groups, call.tokens, call.pattern), counted)


@pytest.mark.parametrize(("query_k", "key_k"), [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("pattern", [Pattern(5, 7, 3), Pattern(5, 0), Pattern(5, 3, 2, 11), Pattern(5, 200, 90)])
def test_pairs_of_a_plain_sequence_are_counted_right(query_k: int, key_k: int, pattern: Pattern) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randint(0, 5, (2, 3, 40, query_k)), torch.randint(0, 5, (2, 3, 61, key_k))
    at = torch.arange(61).expand(2, -1)
    tokens = Tokens(at[:, -40:], at, plain=True)
    counted = count_visible_pairs(queries, keys, tokens, pattern)
    torch.testing.assert_close(count_pairs(queries, keys, tokens, pattern), counted)
    torch.testing.assert_close(count_pairs(queries, keys, tokens._replace(plain=False), pattern), counted)


def test_the_published_split_is_taken_where_it_applies_and_nowhere_else() -> None:
    ids, other = torch.randint(0, 4, (2, 1, 1, 80, 1)).unbind()
    q = torch.randn(1, 2, 80, 8)
    options = {"num_groups": 4, "window": 8}
    assert stock.is_published_setting(Case(q, q, q, ids, ids, options).call())
    assert stock.is_published_setting(Case(q, q, q, ids, ids.clone(), options).call())
    assert not stock.is_published_setting(Case(q, q, q, ids, other, options).call())
    assert not stock.is_published_setting(Case(q, q, q, ids, ids, {**options, "num_sinks": 1}).call())
    assert not stock.is_published_setting(Case(q, q, q, ids.repeat(1, 1, 1, 2), ids, options).call())


def _shared_ids_case() -> tuple[Case, torch.Tensor]:
    ids = torch.randint(0, 2, (1, 1, 60, 1))
    q, k, v = (torch.randn(1, 1, 60, 16, requires_grad=True) for _ in range(3))
    return Case(q, k, v, ids, ids, {"num_groups": 2, "window": 8}), ids[0, 0, :, 0]


def test_adding_same_group_and_local_counts_their_overlap_twice() -> None:
    """The counter-example to the naive merge: two exact parts over sets that overlap do not merge to the union."""
    case, ids = _shared_ids_case()
    scores = (case.q @ case.k.transpose(-1, -2))[0, 0] / 4
    at = torch.arange(60)
    causal = at <= at[:, None]
    group, local = causal & (ids == ids[:, None]), causal & (at[:, None] - at <= 8)
    parts = []
    for mask in (group, local):
        s = scores.masked_fill(~mask, -math.inf)
        parts.append((s.softmax(-1) @ case.v[0, 0], s.logsumexp(-1)))
    (o1, l1), (o2, l2) = parts
    naive = torch.lerp(o2, o1, torch.sigmoid(l1 - l2)[:, None])
    exact = case.run("reference", torch.ones(1, 1, 60, 16))[0][0, 0]
    assert (naive - exact).abs().max() > 0.05
    assert (case.run("stock", torch.ones(1, 1, 60, 16))[0][0, 0] - exact).abs().max() < 1e-5


def test_autograd_through_a_merge_of_stock_kernels_is_silently_wrong() -> None:
    """Why the backward is written by hand: the kernel's logsumexp has a gradient that autograd never sees."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = (torch.randn(1, 1, 40, 16, requires_grad=True) for _ in range(3))
    (o1, l1), (o2, l2) = (flash(q, k[:, :, part], v[:, :, part]) for part in (slice(0, 15), slice(15, 40)))
    merged = torch.lerp(o2, o1, torch.sigmoid(l1 - l2).unsqueeze(-1))
    full = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
    torch.testing.assert_close(merged, full, rtol=0, atol=1e-5)  # the forward is right ...
    grad = torch.randn_like(full)
    wrong, right = (torch.autograd.grad(x, k, grad)[0] for x in (merged, full))
    assert (wrong - right).abs().max() > 0.05  # ... and the gradient is not


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_no_gradient_can_be_taken_through_the_returned_logsumexp(backend: str) -> None:
    case = random_case(5)
    _, lse = focus_attention(
        case.q, case.k, case.v, case.query_groups, case.key_groups, backend=backend, return_lse=True, **case.options
    )
    assert not lse.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        lse.sum().backward()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_logsumexp_matches_the_oracle_and_is_minus_infinity_where_nothing_is_seen(backend: str) -> None:
    q = torch.randn(2, 2, 30, 8, requires_grad=True)
    real = torch.ones(2, 30, dtype=torch.bool)
    real[0, :7] = False
    real[1] = False
    ids = torch.randint(0, 4, (2, 1, 30, 1))
    out, lse = focus_attention(
        q, q, q, ids, ids, num_groups=4, window=3, key_padding_mask=real, backend=backend, return_lse=True
    )
    hidden = ~real[:, None].expand(2, 2, 30)
    assert (lse[hidden] == -math.inf).all() and lse[~hidden].isfinite().all()
    assert (out[hidden] == 0).all()
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all() and (q.grad[hidden] == 0).all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("shape", ["no queries", "no keys"])
def test_nothing_in_nothing_out(backend: str, shape: str) -> None:
    queries, keys = (0, 5) if shape == "no queries" else (0, 0)
    q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8)
    groups = [torch.zeros(1, 1, n, 1, dtype=torch.int64) for n in (queries, keys)]
    out = focus_attention(q, k, k, *groups, num_groups=2, window=4, backend=backend)
    assert out.shape == (1, 2, queries, 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["queries beyond the keys", "gaps", "repeated positions"])
def test_positions_may_be_anything(backend: str, case: str) -> None:
    queries, keys, num_sinks = 600, 600, 0
    if case == "queries beyond the keys":
        keys, num_sinks = 20, 2
        query_positions, key_positions = torch.arange(queries), torch.arange(keys)
    elif case == "gaps":
        query_positions = key_positions = 40 * torch.arange(queries)
    else:
        query_positions = key_positions = torch.arange(queries) // 2
    ids = torch.randint(0, 4, (1, 1, queries, 1))
    q, k = torch.randn(1, 2, queries, 8, requires_grad=True), torch.randn(1, 2, keys, 8, requires_grad=True)
    options = {"num_groups": 4, "window": 25, "num_sinks": num_sinks}
    options |= {"query_positions": query_positions[None], "key_positions": key_positions[None]}
    made = Case(q, k, k, ids, ids if keys == queries else ids[:, :, :keys], options)
    grad = torch.randn(1, 2, queries, 8)
    for got, want in zip(made.run(backend, grad), made.run("reference", grad), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [700, 16], ids=["plain causal", "sparse"])
def test_softcap_never_forms_a_square_and_ignores_autocast(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    scores_of = kernels.MathKernel._scores

    def watched(self: kernels.MathKernel, rows: slice, tile: kernels.Tile) -> torch.Tensor:
        nonlocal largest
        scores = scores_of(self, rows, tile)
        largest = max(largest, scores.shape[-2] * scores.shape[-1])
        return scores

    monkeypatch.setattr(kernels.MathKernel, "_scores", watched)
    q = torch.randn(1, 2, 700, 8, requires_grad=True)
    ids = torch.zeros(1, 1, 700, 1, dtype=torch.int64)
    case = Case(q, q, q, ids, ids, {"num_groups": 2, "window": window, "softcap": 10.0})
    grad = torch.randn(1, 2, 700, 8)
    want = case.run("reference", grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case.run("stock", grad)
    assert largest <= 256 * 700
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("window", [4, 100], ids=["sparse", "plain causal"])
@pytest.mark.parametrize("backend", ["auto", "stock"])
def test_scores_may_be_turned_round(backend: str, window: int, scale: float) -> None:
    """PyTorch's kernels give NaN there: minus infinity times the scale."""
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    ids = torch.randint(0, 3, (1, 1, 40, 1))
    case = Case(q, k, v, ids, ids, {"num_groups": 3, "window": window, "scale": scale})
    grad = torch.randn_like(q)
    for got, want in zip(case.run(backend, grad), case.run("reference", grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_double_precision_is_served_to_fp32_accuracy() -> None:
    case = random_case(8)
    grad = torch.randn(*case.q.shape[:3], case.v.shape[-1])
    for got, want in zip(
        case.cast(torch.float64).run("stock", grad.double()), case.run("reference", grad), strict=True
    ):
        assert worst(got, want) < 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_ids_count_once(backend: str) -> None:
    case = random_case(11)
    q = torch.randn(1, 2, 70, 8, requires_grad=True)
    ids = torch.randint(0, 5, (1, 2, 70, 3))
    ids[..., 1] = ids[..., 0]
    case = Case(q, q, q, ids, ids.roll(3, dims=2), {"num_groups": 5, "window": 4})
    doubled = Case(q, q, q, ids[..., [0, 2]], ids.roll(3, dims=2)[..., [0, 2]], case.options)
    grad = torch.randn(1, 2, 70, 8)
    for got, want in zip(case.run(backend, grad), doubled.run("reference", grad), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def test_compiles_without_a_graph_break_and_passes_pytorchs_operator_checks() -> None:
    case = random_case(21, gates=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return focus_attention(q, k, v, case.query_groups, case.key_groups, backend="stock", **case.options)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got, want = compiled(case.q, case.k, case.v), attend(case.q, case.k, case.v)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for a, b in zip(*(torch.autograd.grad(x.sum(), case.leaves()) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)

    ids = torch.randint(0, 4, (1, 1, 50, 1))
    q, at = torch.randn(1, 2, 50, 8, requires_grad=True), torch.arange(50)[None]
    arguments = (q, q, q, ids, ids, at, at, None, None, None, None, None, 4, 8, 2, None, 0.3, None, False)
    torch.library.opcheck(torch.ops.focus_attn.stock.default, arguments)


@pytest.mark.parametrize("slide", [1, 7, 39, 40])
def test_a_window_as_long_as_the_slide_is_sliding_attention(slide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that slides and is left alone: PyTorch's attention, a few queries at a time."""
    monkeypatch.setattr("focus_attn.attention.dense.QUERIES_AT_ONCE", 16)
    q, k, v = (torch.randn(2, heads, 40, 8, requires_grad=True) for heads in (4, 2, 2))
    groups = torch.zeros(2, 1, 40, 1, dtype=torch.long)
    options = {"num_groups": 2, "window": slide - 1, "sliding_window": slide}
    case = Case(q, k, v, groups, groups + 1, options)
    grad = torch.randn(2, 4, 40, 8)
    expected = case.run("reference", grad)
    monkeypatch.setattr("focus_attn.attention.api.choose_backend", lambda call: pytest.fail("not left to PyTorch"))
    for ours, theirs in zip(case.run("auto", grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("queries", [40, 1])
def test_a_window_as_long_as_the_text_is_plain_causal_attention(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from focus_attn.attention import api
    from focus_attn.attention.backends import explain

    q = torch.randn(2, 4, queries, 8, requires_grad=True)
    k, v = torch.randn(2, 2, 2, 40, 8).unbind(0)
    query_groups, key_groups = torch.randint(0, 3, (2, 1, queries, 1)), torch.randint(0, 3, (2, 1, 40, 1))
    options = {"num_groups": 3, "window": 39}
    want = focus_attention(q, k, v, query_groups, key_groups, backend="reference", **options)
    seen = []
    monkeypatch.setattr(api, "choose_backend", lambda call: seen.append(call))
    got = focus_attention(q, k, v, query_groups, key_groups, **options)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), q) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    assert not seen

    monkeypatch.undo()
    masked = {**options, "key_padding_mask": torch.ones(2, 40, dtype=torch.bool)}  # who knows what is in it
    for case, first in ((options, "dense"), (masked, "stock"), ({**options, "window": 5}, "stock")):
        names = [name for name, _ in explain(Case(q, k, v, query_groups, key_groups, case).call())]
        assert names[0] == first
    assert set(names) == {"stock", "triton", "reference"}


@pytest.mark.parametrize("backend", ["stock", *(["triton"] if importlib.util.find_spec("triton") else [])])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_a_node_without_an_operator_gives_what_the_operator_gives(
    backend: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 30, heads, 16).transpose(1, 2).requires_grad_() for heads in (4, 2, 2))
    gates = [torch.randn(1, 2, 30, 3).log_softmax(-1).requires_grad_() for _ in range(2)]
    ids, grad = torch.randint(0, 3, (2, 1, 2, 30, 1)), torch.randn(1, 30, 4, 16).transpose(1, 2)
    results = []
    for as_operator in (False, True):
        if as_operator:
            monkeypatch.setattr("focus_attn.attention.ops.needs_operators", lambda *tensors: True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out, lse = focus_attention(
                q, k, v, *ids, num_groups=3, window=4, num_sinks=1, backend=backend, return_lse=True,
                query_gate=gates[0], key_gate=gates[1],
            )  # fmt: skip
        assert not lse.requires_grad
        assert ("Node" in type(out.grad_fn).__name__) != as_operator
        results.append((out, lse, *torch.autograd.grad(out, (q, k, v, *gates), grad)))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
