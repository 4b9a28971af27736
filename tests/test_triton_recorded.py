"""Recorded calls: the kernels that find their tensors through a table, when a call is recorded, and, on a GPU, that
replays serve every call as if it had been launched."""

import importlib.util
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
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
from focus_attn.attention import call, cudnn, launch, recorded, square
from focus_attn.attention.backends import on_its_device
from focus_attn.attention.launch import Tile, setup_for
from focus_attn.attention.triton import _fitting

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
HAS_CUDNN = ON_GPU and importlib.util.find_spec("cudnn") is not None
on_gpu = pytest.mark.skipif(not HAS_CUDNN, reason="needs a CUDA device and nvidia-cudnn-frontend")


@pytest.fixture(autouse=True)
def _nothing_recorded() -> Iterator[None]:
    recorded._recordings.clear()
    launch._setups.clear()
    call._passed.clear()
    yield
    recorded._recordings.clear()


def draw(seed: int, length: int = 70, heads: tuple[int, int] = (2, 1), batch: int = 2, sinks: int = 0) -> Case:
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4, (batch, 1, length, 1), generator=make).to(DEVICE)
    q, k, v = (
        torch.randn(batch, count, length, 16, generator=make).to(DEVICE, DTYPE)
        for count in (heads[0], heads[1], heads[1])
    )
    return Case(q, k, v, ids, ids, {"num_groups": 4, "window": 9, "num_sinks": sinks})


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
    return torch.full_like(case.q, 7.0), torch.full(case.q.shape[:3], 7.0, device=DEVICE)


@pytest.mark.parametrize("one_tensor", [False, True], ids=["three tensors", "q is k is v"])
def test_kernels_find_their_tensors_through_a_table(one_tensor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched for one call with the table of another, they serve the other."""
    if not HAS_CUDNN:
        fake_cudnn(monkeypatch)
    heads, sinks = ((2, 2), 0) if one_tensor else ((2, 1), 3)
    launched, meant = (draw(seed, heads=heads, sinks=sinks) for seed in range(2))
    if one_tensor:
        launched.k = launched.v = launched.q
    untouched, filled = results(launched), results(meant)
    table = recorded.Table(launched.q.device)
    call, setup = table.setup(launched.call(), *untouched)
    table.fill(meant.call(), *filled)
    square.launch_forward(call, setup, square.make_room(call, setup), *untouched)
    assert is_right(meant, filled[0])
    assert all((x == 7).all() for x in untouched)
    direct = results(meant)
    square.square_forward(meant.call(), setup_for(meant.call()), *direct)
    torch.testing.assert_close(filled[1], direct[1], rtol=0, atol=1e-5)


class FakeRecording:
    """Keeps the books without a GPU."""

    size = 10

    def __init__(self, call: object, out: Tensor, lse: Tensor) -> None:
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
    monkeypatch.setattr(recorded, "_is_recordable", lambda call, setup: True)
    monkeypatch.setattr(recorded.sorted_rows, "memory", lambda device: 2500)
    monkeypatch.setattr(recorded.square, "square_forward", lambda *arguments: books.direct.append(arguments))
    return books


def serve(case: Case, times: int = 1) -> None:
    call = case.call()
    for _ in range(times):
        recorded.square_forward(call, setup_for(call), *results(case))


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
    lengths = {length: (setup_for(draw(0, length=length).call()), 0) for length in (70, 71, 72)}
    assert [length for length, key in lengths.items() if key in recorded._recordings] == [70, 72]


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
    assert not recorded._is_recordable(call, setup_for(call))


class FakeGraph:
    """A CUDA graph of `launch_forward`: what is launched while it captures is done when it is replayed."""

    capturing: "FakeGraph | None" = None
    real_launch = staticmethod(square.launch_forward)

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.replays = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        FakeGraph.capturing = self

    def capture_end(self) -> None:
        FakeGraph.capturing = None

    def replay(self) -> None:
        self.replays += 1
        for arguments in self.launches:
            self.real_launch(*arguments)

    @staticmethod
    def launch(*arguments: Any) -> None:
        if FakeGraph.capturing is None:
            FakeGraph.real_launch(*arguments)
        else:
            FakeGraph.capturing.launches.append(arguments)


@pytest.mark.skipif(ON_GPU, reason="the tests below do it with real graphs")
def test_focus_attention_replays_what_it_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cudnn(monkeypatch)
    monkeypatch.setattr(cudnn, "kernels_of_forward", lambda shape: (None, 0))
    monkeypatch.setattr(recorded, "_is_recordable", lambda call, setup: True)
    monkeypatch.setattr(recorded, "_capture_stream", lambda device: None)
    monkeypatch.setattr(recorded.sorted_rows, "memory", lambda device: 1 << 30)
    monkeypatch.setattr(square, "launch_forward", FakeGraph.launch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for seed in range(5):
        case = draw(seed, batch=1)
        assert is_right(case, attend(case)), seed
    (recording,) = recorded._recordings.values()
    assert recording._graph.replays == 2
    case = draw(9, batch=1).cast(DTYPE)
    case.run("triton", torch.zeros_like(case.q))
    assert recording._graph.replays == 2  # what is differentiated goes through the operator


@on_gpu
def test_replays_match_the_oracle_at_ever_new_addresses() -> None:
    """Two signatures in turns; inputs are freed while a replay may still be reading them, and drawn anew."""
    kept = []
    for seed in range(8):
        for heads, sinks, length in (((2, 2), 0, 300), ((6, 2), 3, 333)):
            case = draw(seed, length, heads, sinks=sinks)
            ids = case.key_groups.clone()
            clone = Case(case.q.clone(), case.k.clone(), case.v.clone(), ids, ids, case.options)
            out = attend(clone)
            del clone, ids
            kept.append((case, out))
            torch.randn_like(case.q)  # takes the place of what was freed
    assert len(recorded._recordings) == 2
    assert all(is_right(case, out) for case, out in kept)


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
    assert _fitting(Tile(128, 128, 8, 3), 256, room) == Tile(128, keys, 8, stages)
