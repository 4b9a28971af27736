"""The Triton kernels against the oracle: on the GPU where there is one, otherwise in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from attention_cases import Case, plain_attention, random_case
from test_attention import NAMES, worst

from focus_attn import focus_attention
from focus_attn.attention.backends import reason_against

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SEEDS = 40 if ON_GPU else 6  # the interpreter takes a second a case
# The interpreter cuts fp32 to bf16 instead of rounding it, so that bf16 can be judged on a GPU alone.
HALVES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that an element nobody wrote is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def case_for(seed: int, gates: bool = False) -> Case:
    case = random_case(seed, gates=gates, largest=50)

    def move(x: object) -> object:
        return x.detach().to(DEVICE).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    query_groups, key_groups = case.query_groups.to(DEVICE), case.key_groups.to(DEVICE)
    q, k, v = (move(x) for x in (case.q, case.k, case.v))
    return Case(q, k, v, query_groups, key_groups, {name: move(x) for name, x in case.options.items()})


@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("seed", range(40_000, 40_000 + 2 * SEEDS))
def test_fp32_matches_the_oracle(seed: int, gates: bool) -> None:
    case = case_for(seed, gates)
    grad = torch.randn(*case.q.shape[:3], case.v.shape[-1], device=DEVICE)
    for name, got, want in zip(NAMES, case.run("triton", grad), case.run("reference", grad), strict=False):
        assert worst(got, want) <= 1e-5 * max(1.0, float(want.abs().max())), f"{name}: {case}"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("seed", range(50_000, 50_000 + SEEDS))
def test_half_precision_loses_no_more_than_twice_what_plain_pytorch_loses(seed: int, dtype: torch.dtype) -> None:
    case = case_for(seed).cast(dtype)
    grad = torch.randn(*case.q.shape[:3], case.v.shape[-1], device=DEVICE).to(dtype)
    want = case.cast(torch.float32).run("reference", grad.float())[:4]
    plain = plain_attention(case, grad)
    for name, got, exact, rough in zip(NAMES[:4], case.run("triton", grad)[:4], want, plain, strict=True):
        assert worst(got, exact) <= 2 * worst(rough, exact) + 1e-5, f"{name}: {case}"


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
