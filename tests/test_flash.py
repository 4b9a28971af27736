"""`stock` by Flash attention: its lists, its batches, and on a GPU its kernels, against the oracle."""

import math
from collections.abc import Iterator

import pytest
import torch
from attention_cases import Case, plain_attention, random_case
from test_attention import NAMES, worst

from focus_attn.attention import flash, ragged, stock
from focus_attn.attention.flash import Rows
from focus_attn.attention.ragged import Batch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Flash attention runs on CUDA")


def sequences(batch: Batch) -> list[tuple[slice, slice]]:
    """The queries and keys of every sequence, from what the kernel is told."""
    starts, key_starts = batch.query_starts.tolist(), batch.key_starts.tolist()
    assert starts[0] == 0 and 0 < len(starts) - 1 <= ragged.MOST_SEQUENCES and starts == sorted(starts)
    assert batch.key_lengths is not None or key_starts == sorted(key_starts)
    lengths = batch.key_starts.diff().tolist() if batch.key_lengths is None else batch.key_lengths.tolist()
    assert int(batch.query_starts.diff().max()) <= batch.longest_queries
    assert max(lengths) <= batch.longest_keys
    return [
        (slice(a, b), slice(first, first + length))
        for a, b, first, length in zip(starts, starts[1:], key_starts, lengths, strict=False)
    ]


def visible_in(batch: Batch, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[Tq, Tk] of one sequence: all, or a causal band from the bottom right."""
    if batch.window is None:
        return torch.ones(queries, keys, dtype=torch.bool, device=device)
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance <= batch.window)


def plain_scores(rows: Rows, at: tuple[slice, slice], batch: Batch, scale: float) -> torch.Tensor:
    """[heads, Tq, Tk] in fp32, -inf where nothing is to be seen."""
    q, k = rows.q[at[0]].float().transpose(0, 1), rows.k[at[1]].float().transpose(0, 1)
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2) * scale
    return scores.masked_fill(~visible_in(batch, q.shape[1], k.shape[1], q.device), -math.inf)


def plain_run(rows: Rows, batch: Batch, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What `flash._run` promises, by plain products."""
    heads = rows.q.shape[1]
    out = rows.q.new_full((len(rows.q), heads, rows.v.shape[-1]), math.nan, dtype=torch.float32)
    lse = rows.q.new_full((len(rows.q), heads), math.nan, dtype=torch.float32)
    for at in sequences(batch):
        scores = plain_scores(rows, at, batch, scale)
        v = rows.v[at[1]].float().transpose(0, 1)
        p = scores.softmax(-1).nan_to_num(0.0)
        out[at[0]] = (p @ v.repeat_interleave(heads // len(v), 0)).transpose(0, 1)
        lse[at[0]] = scores.logsumexp(-1).t()
    return out.to(rows.q.dtype), lse


def plain_run_backward(rows: Rows, final: list[torch.Tensor], batch: Batch, scale: float) -> list[torch.Tensor]:
    """What `flash._run_backward` promises; a row that no sequence has keeps NaN, and one that two have fails."""
    grads = [torch.full_like(x, math.nan, dtype=torch.float32) for x in rows]
    for at in sequences(batch):
        grad, out, lse = (x[at[0]].float().transpose(0, 1) for x in final)
        k, v = (x[at[1]].float().transpose(0, 1) for x in rows[1:])
        groups = rows.q.shape[1] // len(k)
        p = (plain_scores(rows, at, batch, scale) - lse).exp()
        scores = p * (grad @ v.repeat_interleave(groups, 0).transpose(1, 2) - (grad * out).sum(-1, keepdim=True))
        parts = (
            scores @ k.repeat_interleave(groups, 0),
            scores.transpose(1, 2) @ rows.q[at[0]].float().transpose(0, 1),
            p.transpose(1, 2) @ grad,
        )
        factors = scale, scale, 1.0
        for total, place, part, factor in zip(grads, (at[0], at[1], at[1]), parts, factors, strict=True):
            assert total[place].isnan().all()
            total[place] = part.transpose(0, 1).unflatten(1, (total.shape[1], -1)).sum(2) * factor
    return grads


def plain_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q.float() @ k.float().transpose(-1, -2) * scale + bias
    return scores.softmax(-1) @ v.float(), scores.logsumexp(-1)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that small texts have every kind of batch; Flash wherever it serves."""
    for name, size in (
        ("BLOCK", 8),
        ("BACKWARD_BLOCK", 4),
        ("EDGE_KEYS", 8),
        ("BACKWARD_EDGE_KEYS", 8),
        ("EDGE_BYTES", 1),
    ):
        monkeypatch.setattr(flash, name, size)
    monkeypatch.setattr(stock, "_is_short", lambda call, times: False)


@pytest.fixture
def _plain_kernels(_small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, plain in (
        ("_run", plain_run),
        ("_run_backward", plain_run_backward),
        ("efficient_attention", plain_masked),
    ):
        monkeypatch.setattr(flash, name, plain)
    monkeypatch.setattr(flash, "has_kernel", lambda device, dtype: True)
    monkeypatch.setattr(flash, "_widest", lambda device: 256)


def cases(
    seed: int, gates: bool, by_flash: bool = True, largest: int = 150, dtype: torch.dtype = torch.float32
) -> Iterator[Case]:
    """A dozen random ones that are sparse; by_flash: and go that way."""
    found, device = 0, "cuda" if torch.cuda.is_available() else "cpu"
    while found < 12:
        case = random_case(seed, gates=gates, largest=largest).cast(dtype).to(device)
        seed += 1
        if (not by_flash or stock._flash_band(case.call()) is not None) and case.is_sparse():
            found += 1
            yield case


@pytest.mark.usefixtures("_plain_kernels")
@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gates"])
@pytest.mark.parametrize("chunk", range(6))
def test_lists_and_batches_hold_what_the_oracle_sees(chunk: int, gates: bool) -> None:
    for case in cases(50_000 + 10_000 * chunk, gates):
        grad = torch.randn(*case.q.shape[:3], case.v.shape[-1], device=case.q.device)
        for name, got, want in zip(NAMES, case.run("stock", grad), case.run("reference", grad), strict=False):
            assert worst(got, want) <= 1e-5 * max(1.0, float(want.abs().max())), f"{name}: {case}"


@pytest.mark.usefixtures("_plain_kernels")
def test_what_flash_cannot_do_goes_another_way() -> None:
    """A scale of 0 or below, at which the kernel gives NaN; padding alone; positions with gaps."""
    q, ids = torch.randn(1, 2, 40, 16), torch.randint(0, 3, (1, 1, 40, 1))
    options = {"num_groups": 3, "window": 4}
    served = Case(q, q, q, ids, ids, options)
    assert stock._flash_band(served.call()) is not None
    gaps = 2 * torch.arange(40)[None]
    for more in (
        {"scale": -0.2},
        {"scale": 0.0},
        {"key_padding_mask": torch.zeros(1, 40, dtype=torch.bool)},
        {"query_positions": gaps, "key_positions": gaps},
        {"softcap": 5.0},
    ):
        case = Case(*(x.clone().requires_grad_() for x in (q, q, q)), ids, ids, {**options, **more})
        assert stock._flash_band(case.call()) is None
        grad = torch.randn_like(q)
        for got, want in zip(case.run("stock", grad), case.run("reference", grad), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gates"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("largest", [150, 3600], ids=["short", "long"])
@pytest.mark.parametrize("chunk", range(2))
def test_half_precision_on_a_gpu_loses_no_more_than_twice_what_plain_pytorch_loses(
    chunk: int, largest: int, dtype: torch.dtype, gates: bool
) -> None:
    """As users have it: short ones whichever way they go, long ones by Flash."""
    for case in cases(90_000 + 10_000 * chunk, gates, largest > 150, largest, dtype):
        check_on_a_gpu(case)


@on_gpu
@pytest.mark.parametrize("routers", [1, 4])
@pytest.mark.parametrize(("query_k", "sinks"), [(1, 0), (1, 4), (3, 4)])
def test_blocks_as_users_have_them(routers: int, query_k: int, sinks: int) -> None:
    make = torch.Generator().manual_seed(0)
    length, heads, kv_heads, groups = 3001, 8, 4, 8
    q, k, v = (torch.randn(2, h, length, 64, generator=make).requires_grad_() for h in (heads, kv_heads, kv_heads))
    query_groups = torch.randint(0, groups, (2, routers, length, query_k), generator=make)
    key_groups = torch.randint(0, groups, (2, routers, length, 1), generator=make)
    options = {"num_groups": groups, "window": 100, "num_sinks": sinks}
    case = Case(q, k, v, query_groups, key_groups, options).cast(torch.bfloat16).to("cuda")
    assert stock._flash_band(case.call()) is not None
    check_on_a_gpu(case)


def check_on_a_gpu(case: Case) -> None:
    """Gradients may lose a rounding more: the kernel rounds their parts (near, levels) before they are added up."""
    grad = torch.randn(*case.q.shape[:3], case.v.shape[-1], dtype=case.q.dtype, device="cuda")
    want = case.cast(torch.float32).run("reference", grad.float())
    plain = plain_attention(case, grad)
    got = case.run("stock", grad)
    for name, mine, exact, rough in zip(NAMES[:4], got[:4], want[:4], plain, strict=True):
        once_more = 0.0 if name == "out" else float(exact.abs().max()) * torch.finfo(mine.dtype).eps / 2
        assert worst(mine, exact) <= 2 * worst(rough, exact) + once_more + 1e-5, f"{name}: {case}"
    for mine, exact in zip(got[4:], want[4:], strict=True):  # sink logits and gates, which plain PyTorch has none of
        assert worst(mine, exact) <= 0.02 * max(1.0, float(exact.abs().max())), str(case)
