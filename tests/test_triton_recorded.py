"""Recorded calls: the kernels that find their tensors through a table, when a call is recorded, and, on a GPU, that
replays serve every call as if it had been launched."""

import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import Case, plain_attention
from test_attention import worst
from torch import Tensor

pytest.importorskip("triton")
from test_triton import DEVICE, ON_GPU, fake_cudnn

from focus_attn import focus_attention
from focus_attn.attention import call as call_module
from focus_attn.attention import launch, near_far, recorded, square
from focus_attn.attention.backends import on_its_device
from focus_attn.attention.launch import Tile, fitting, setup_for
from focus_attn.attention.near_far import bytes_of
from focus_attn.attention.recorded import Way
from focus_attn.attention.triton import triton_forward

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
HAS_CUDNN = ON_GPU and importlib.util.find_spec("cudnn") is not None
on_gpu = pytest.mark.skipif(not HAS_CUDNN, reason="needs a CUDA device and nvidia-cudnn-frontend")


@pytest.fixture(autouse=True)
def _nothing_recorded() -> Iterator[None]:
    recorded._recordings.clear()
    launch._setups.clear()
    call_module._passed.clear()
    yield
    recorded._recordings.clear()


def draw(seed: int, length: int = 70, heads: tuple[int, int] = (2, 1), batch: int = 2, sinks: int = 0) -> Case:
    """One router whose ids queries and keys share: for `square.py`."""
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4, (batch, 1, length, 1), generator=make).to(DEVICE)
    q, k, v = (
        torch.randn(batch, count, length, 16, generator=make).to(DEVICE, DTYPE)
        for count in (heads[0], heads[1], heads[1])
    )
    return Case(q, k, v, ids, ids, {"num_groups": 4, "window": 9, "num_sinks": sinks})


def draw_apart(
    seed: int, length: int = 70, batch: int = 1, routers: int = 2, query_k: int = 1, queries: int = 0, **options: Any
) -> Case:
    """Two KV heads, a router for each unless said otherwise, ids of queries and keys apart: for `near_far.py`."""
    case, queries = draw(seed, length, (6, 2), batch, sinks=3), queries or length
    make = torch.Generator().manual_seed(1000 + seed)
    query_groups = torch.rand(batch, routers, queries, 4, generator=make).topk(query_k, -1).indices.to(DEVICE)
    key_groups = torch.randint(0, 4, (batch, routers, length, 1), generator=make).to(DEVICE)
    q = case.q[:, :, length - queries :].contiguous()
    return Case(q, case.k, case.v, query_groups, key_groups, {**case.options, **options})


DRAWS = pytest.mark.parametrize("draw_one", [draw, draw_apart], ids=["square", "near and far"])


def attend(case: Case) -> Tensor:
    out = focus_attention(case.q, case.k, case.v, case.query_groups, case.key_groups, backend="triton", **case.options)
    assert isinstance(out, Tensor)
    return out


def is_right(case: Case, out: Tensor) -> bool:
    """At most twice what plain PyTorch loses in this dtype, as everywhere."""
    grad = torch.zeros_like(case.q)
    exact = case.cast(torch.float32).run("reference", grad.float())[0]
    rough = plain_attention(case.cast(DTYPE), grad)[0]
    return worst(out, exact) <= 2 * worst(rough, exact) + 1e-5


def results(case: Case) -> tuple[Tensor, Tensor]:
    dtype = DTYPE if case.query_groups.shape[-1] == 1 else torch.float32  # as `_forward` makes them
    return torch.full_like(case.q, 7.0, dtype=dtype), torch.full(case.q.shape[:3], 7.0, device=DEVICE)


def check_table(way: Way, launched: Case, meant: Case) -> None:
    """Kernels launched for one call with the table of another serve the other."""
    untouched, filled, direct = results(launched), results(meant), results(meant)
    table = recorded.Table(launched.q.device)
    call, setup = table.setup(launched.call(), *untouched)
    table.fill(meant.call(), *filled)
    way.launch_forward(call, setup, way.make_room(call, setup), *untouched)
    assert is_right(meant, filled[0])
    assert all((x == 7).all() for x in untouched)
    way.forward(meant.call(), setup_for(meant.call()), *direct)
    torch.testing.assert_close(filled[1], direct[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("one_tensor", [False, True], ids=["three tensors", "q is k is v"])
def test_kernels_of_square_calls_find_their_tensors_through_a_table(
    one_tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_CUDNN:
        fake_cudnn(monkeypatch)
    heads, sinks = ((2, 2), 0) if one_tensor else ((2, 1), 3)
    launched, meant = (draw(seed, heads=heads, sinks=sinks) for seed in range(2))
    if one_tensor:
        launched.k = launched.v = launched.q
    check_table(square, launched, meant)


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2},
        {"length": 71, "query_k": 2},
        {"length": 300, "queries": 77},
        {"routers": 1, "softcap": 5.0, "num_sinks": 0},
    ],
    ids=["plain", "two visits", "after a cache", "one router, softcap, no sinks"],
)
def test_kernels_of_near_and_far_find_their_tensors_through_a_table(options: dict[str, Any]) -> None:
    check_table(near_far, *(draw_apart(seed, **options) for seed in range(2)))


def test_a_table_tells_tensors_apart_that_were_one_when_it_was_made() -> None:
    launched, meant = draw_apart(0), draw_apart(1)
    launched.q, launched.v, launched.query_groups = launched.k, launched.k, launched.key_groups
    meant.q = meant.q[:, :2].contiguous()
    check_table(near_far, launched, meant)


def test_what_goes_through_one_chain_of_launches_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def can(way: Way, case: Case) -> bool:
        call = case.call()
        return way.can_be_recorded(call, setup_for(call))

    memory = 1 << 40
    monkeypatch.setattr(recorded.sorted_rows, "memory", lambda device: memory)
    assert can(square, draw(0)) and can(near_far, draw_apart(0)) and can(near_far, draw_apart(0, query_k=2, queries=40))
    key_sets = draw_apart(0)
    key_sets.key_groups = key_sets.key_groups.expand(-1, -1, -1, 2)
    padded = draw_apart(0, key_padding_mask=torch.ones(1, 70, dtype=torch.bool, device=DEVICE))
    assert not any(can(near_far, case) for case in (key_sets, padded, draw_apart(0, sliding_window=30)))
    memory = 0  # one head at a time
    launch._setups.clear()
    call_module._passed.clear()
    assert not can(square, draw(0, heads=(6, 2))) and not can(near_far, draw_apart(0))


class FakeRecording:
    """Keeps the books without a GPU."""

    size = 10

    def __init__(self, way: object, call: object, out: Tensor, lse: Tensor) -> None:
        self.replays: list[Tensor] = []

    def replay(self, call: object, out: Tensor, lse: Tensor) -> None:
        self.replays.append(out)


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device of 2,500 bytes whose current stream is `books.stream`; what is launched without a recording is in
    `books.direct`."""
    books = SimpleNamespace(stream=0, direct=[])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: books.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: books.stream == "capturing")
    monkeypatch.setattr(recorded, "Recording", FakeRecording)
    monkeypatch.setattr(recorded, "_is_recordable", lambda way, call, setup: True)
    monkeypatch.setattr(recorded.sorted_rows, "memory", lambda device: 2500)
    for way in (square, near_far):
        monkeypatch.setattr(way, "forward", lambda *arguments: books.direct.append(arguments))
    return books


def serve(case: Case, times: int = 1, way: Way = square) -> None:
    call = case.call()
    for _ in range(times):
        recorded.forward(way, call, setup_for(call), *results(case))


def test_the_third_call_of_a_signature_is_recorded_and_later_ones_replayed(books: SimpleNamespace) -> None:
    serve(draw(0), 2)
    serve(draw(0, length=71), 2)
    assert len(books.direct) == 4 and not recorded._recordings
    serve(draw(1), 3)
    (recording,) = recorded._recordings.values()
    assert len(books.direct) == 4 and len(recording.replays) == 2


def test_every_stream_has_its_own_recording(books: SimpleNamespace) -> None:
    serve(draw(0), 3)
    books.stream = 1
    serve(draw(0), 2)
    first, second = recorded._recordings.values()
    assert (len(first.replays), len(second.replays)) == (0, 1)


def test_both_ways_of_one_signature_have_their_own(books: SimpleNamespace) -> None:
    """Whether ids are shared is no matter of layouts, so that one setup serves both."""
    case = draw(0)
    serve(case, 4)
    case.query_groups = case.query_groups.clone()
    serve(case, 2, near_far)
    assert len(recorded._recordings) == 1
    serve(case, 3, near_far)
    first, second = recorded._recordings.values()
    assert (len(first.replays), len(second.replays)) == (1, 2)


def test_calls_inside_another_capture_are_launched(books: SimpleNamespace) -> None:
    serve(draw(0), 3)
    books.stream = "capturing"
    serve(draw(0))
    assert len(books.direct) == 3


def test_what_was_not_used_for_longest_is_dropped(books: SimpleNamespace) -> None:
    """A hundredth of the memory has room for two."""
    for length in (70, 71):
        serve(draw(0, length=length), 3)
    serve(draw(0, length=70))
    serve(draw(0, length=72), 3)
    lengths = {length: (square, setup_for(draw(0, length=length).call()), 0) for length in (70, 71, 72)}
    assert [length for length, key in lengths.items() if key in recorded._recordings] == [70, 72]


def test_what_is_too_large_is_recorded_once_and_never_again(
    books: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(draw(0, length=71), 3)
    monkeypatch.setattr(FakeRecording, "size", 26)
    serve(draw(0), 5)
    assert len(recorded._recordings) == 1 and len(books.direct) == 2 + 2 + 2  # the third of each was a recording's


def test_a_failed_recording_is_said_and_not_tried_again(
    books: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorded, "Recording", fail)
    with pytest.warns(UserWarning, match="kernel by kernel.*not permitted"):
        serve(draw(0), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        serve(draw(0), 3)
    assert len(books.direct) == 6 and not recorded._recordings


def test_without_a_gpu_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cudnn(monkeypatch)
    call = Case(*(x.cpu() for x in vars(draw(0)).values() if isinstance(x, Tensor)), draw(0).options).call()
    assert not recorded._is_recordable(square, call, setup_for(call))


class FakeGraph:
    """A CUDA graph of `launch_forward`: what is launched while it captures is done when it is replayed."""

    capturing: "FakeGraph | None" = None

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []
        self.replays = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        FakeGraph.capturing = self

    def capture_end(self) -> None:
        FakeGraph.capturing = None

    def replay(self) -> None:
        self.replays += 1
        for again in self.launches:
            again()

    @staticmethod
    def held(launch_forward: Callable[..., None]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            if FakeGraph.capturing is None:
                launch_forward(*arguments)
            else:
                FakeGraph.capturing.launches.append(partial(launch_forward, *arguments))

        return launch


@pytest.mark.skipif(ON_GPU, reason="the tests below do it with real graphs")
@DRAWS
def test_focus_attention_replays_what_it_recorded(
    draw_one: Callable[[int], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cudnn(monkeypatch)
    monkeypatch.setattr(recorded, "_is_recordable", lambda way, call, setup: True)
    monkeypatch.setattr(recorded, "_capture_stream", lambda device: None)
    monkeypatch.setattr(recorded.sorted_rows, "memory", lambda device: 1 << 30)
    for way in (square, near_far):
        monkeypatch.setattr(way, "launch_forward", FakeGraph.held(way.launch_forward))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for seed in range(5):
        case = draw_one(seed)
        assert is_right(case, attend(case)), seed
    (recording,) = recorded._recordings.values()
    assert recording._graph.replays == 2
    case = draw_one(9).cast(DTYPE)
    case.run("triton", torch.zeros_like(case.q))
    assert recording._graph.replays == 2  # what is differentiated goes through the operator


@on_gpu
def test_replays_match_the_oracle_at_ever_new_addresses() -> None:
    """Signatures in turns; inputs are freed while a replay may still be reading them, and drawn anew."""
    draws: list[Callable[[int], Case]] = [
        lambda seed: draw(seed, 300, (2, 2)),
        lambda seed: draw(seed, 333, (6, 2), sinks=3),
        lambda seed: draw_apart(seed, 300),
        lambda seed: draw_apart(seed, 333, query_k=2),
        lambda seed: draw_apart(seed, 300, routers=1, queries=101, softcap=5.0),
    ]
    kept = []
    for seed in range(8):
        for draw_one in draws:
            case = draw_one(seed)
            query_groups = key_groups = case.key_groups.clone()
            if case.query_groups is not case.key_groups:
                query_groups = case.query_groups.clone()
            clone = Case(case.q.clone(), case.k.clone(), case.v.clone(), query_groups, key_groups, case.options)
            out = attend(clone)
            del clone, query_groups, key_groups
            kept.append((case, out))
            torch.randn_like(case.q)  # takes the place of what was freed
    assert len(recorded._recordings) == len(draws)
    assert all(is_right(case, out) for case, out in kept)


@on_gpu
@DRAWS
def test_replays_are_what_launches_give_bit_for_bit(draw_one: Callable[[int, int], Case]) -> None:
    cases = [draw_one(seed, 333) for seed in range(6)]
    launched = [triton_forward(case.call())[0] for case in cases]
    assert not recorded._recordings
    replayed = [attend(case) for case in cases]
    assert len(recorded._recordings) == 1
    assert all(map(torch.equal, replayed, launched))


@on_gpu
def test_steps_of_decoding_are_launched() -> None:
    for seed in range(5):
        case = draw_apart(seed, 300, queries=1)
        assert is_right(case, attend(case))
    assert not recorded._recordings


@on_gpu
def test_replays_on_two_streams_do_not_meet() -> None:
    cases = [draw(seed, 500, (4, 2)) for seed in range(12)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs = []
    for number, case in enumerate(cases):
        with torch.cuda.stream(streams[number % 2]):
            outs.append(attend(case))
    torch.cuda.synchronize()
    assert len(recorded._recordings) == 2
    assert all(is_right(case, out) for case, out in zip(cases, outs, strict=True))


@on_gpu
@pytest.mark.parametrize("own_stream", [True, False], ids=["a stream each", "one stream"])
def test_threads_do_not_take_each_others_table(own_stream: bool) -> None:
    cases = [[draw(100 * thread + seed, 200, (4, 2)) for seed in range(10)] for thread in range(2)]
    for _ in range(recorded.FIRST - 1):  # compiled here, recorded by the threads
        attend(cases[0][0])
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]

    def work(thread: int) -> None:
        stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            outs[thread] = [attend(case) for case in cases[thread]]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(recorded._recordings) == (2 if own_stream else 1)
    for thread in range(2):
        assert all(is_right(case, out) for case, out in zip(cases[thread], outs[thread], strict=True))


@on_gpu
def test_a_graph_around_a_recorded_call_holds_its_launches() -> None:
    case, other = draw(0, 300), draw(1, 300)
    for _ in range(4):
        attend(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case)
    between = attend(other)
    new = draw(2, 300)
    for mine, theirs in ((case.q, new.q), (case.k, new.k), (case.v, new.v), (case.key_groups, new.key_groups)):
        mine.copy_(theirs)
    graph.replay()
    assert is_right(new, out)
    assert is_right(other, between) and is_right(other, attend(other))


@on_gpu
def test_gradients_come_as_before() -> None:
    for seed in range(4):
        attend(draw(seed, 300))
    case = draw(9, 300).cast(DTYPE)
    grad = torch.randn_like(case.q)
    exact = case.cast(torch.float32).run("reference", grad.float())
    rough = plain_attention(case, grad)
    for got, want, plain in zip(case.run("triton", grad), exact, rough, strict=True):
        assert worst(got, want) <= 2 * worst(plain, want) + 1e-5


def test_kernels_run_on_the_device_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a model is spread over several and another one is current."""
    entered: list[torch.device] = []

    def device(wanted: torch.device) -> Any:
        entered.append(wanted)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    run = on_its_device(lambda call, more: (call.q.device.index, more))
    calls = [SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda", index))) for index in (0, 1)]
    assert [run(one, "more") for one in calls] == [(0, "more"), (1, "more")]
    assert entered == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("room", "stages", "keys"), [(232_448, 3, 128), (166_912, 2, 128), (101_376, 1, 128), (65_536, 1, 64)]
)
def test_tiles_fit_into_the_shared_memory_of_the_device(room: int, stages: int, keys: int) -> None:
    """H200, A100, GeForce, Turing; bf16 heads of 128."""
    tile = fitting(Tile(128, 128, 8, 3), lambda tile: bytes_of(tile, "far", 256, exact=False), room)
    assert tile == Tile(128, keys, 8, stages)
