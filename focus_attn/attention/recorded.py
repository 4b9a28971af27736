"""Short calls as one launch: the host takes longer to make five of them than the device to work them off.

The third call of a signature records its launches in a CUDA graph; later ones replay it. A graph launches its kernels
with the arguments they were recorded with, but every call has other tensors. Those kernels therefore get their
addresses from a table on the device, which a kernel of its own fills before each replay. Everything else they touch is
a recording's own and is kept with it: up to a hundredth of the device's memory for all recordings together, those that
were not used for longest being dropped first.

A recording belongs to one stream. Its table and its memory are used in the order of that stream, so nothing is
overwritten while it is in use, and dropped memory goes back to PyTorch on the stream that used it last.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from focus_attn.attention import sorted_rows
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.launch import Setup, lies_in_rows
from focus_attn.attention.tiles import fill_table_kernel

LONGEST = 1 << 15  # tokens; beyond, the device takes so long that the host is far ahead of it
FEWEST = 64  # queries that go on from a cache; fewer are a step of decoding, and the next step has another length
NEVER = 1 << 60  # calls
FIRST = 3  # the call of a signature that is recorded: lengths that come once are not worth it
SHARE = 100  # of the device's memory, one part in so many

_recordings: OrderedDict[tuple[Way, Setup, int], Recording] = OrderedDict()
_one_at_a_time = threading.Lock()  # between a table and its replay there must be no other call's table


class Way(Protocol):
    """A way through a call, as `square.py` and `near_far.py` are."""

    def forward(self, call: AttentionCall, setup: Setup, out: Tensor, lse: Tensor) -> None:
        """Fills out and lse."""

    def can_be_recorded(self, call: AttentionCall, setup: Setup) -> bool:
        """Whether `launch_forward` is all that `forward` does, and goes over the heads once."""

    def make_room(self, call: AttentionCall, setup: Setup) -> tuple[Any, ...]:
        """All that the launches touch beside the call's tensors, out and lse."""

    def launch_forward(self, call: AttentionCall, setup: Setup, room: Any, out: Tensor, lse: Tensor) -> None:
        """Launches alone, and no new tensors."""


class Table:
    """Where a call's tensors lie, on the device. Entries stand 16 bytes apart: so kernels expect of addresses."""

    def __init__(self, device: torch.device) -> None:
        self._addresses = torch.empty(7, 2, dtype=torch.int64, device=device)
        self._fill: Any = None

    def fill(self, call: AttentionCall, out: Tensor, lse: Tensor) -> None:
        addresses = [tensor.data_ptr() for tensor in _tensors(call, out, lse)]
        if self._fill is not None:
            self._fill(self._addresses, *addresses)
            return
        compiled = fill_table_kernel[1, 1, 1](self._addresses, *addresses, num_warps=1)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._fill = compiled[1, 1, 1]

    def setup(self, call: AttentionCall, out: Tensor, lse: Tensor) -> tuple[AttentionCall, Setup]:
        """A setup whose kernels, launched for this call, serve the one that the table was last filled with.

        The call comes back with tensors apart: what is one tensor here may be several in the next call.
        """
        q, k, v, query_groups = (x.detach() for x in (call.q, call.k, call.v, call.query_groups))
        call = replace(call, q=q, k=k, v=v, query_groups=query_groups)
        tensors = zip(_tensors(call, out, lse), self._addresses, strict=True)
        return call, Setup(call, {id(tensor): entry.view(tensor.dtype) for tensor, entry in tensors})


def _tensors(call: AttentionCall, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    return call.q, call.k, call.v, call.query_groups, call.key_groups, out, lse


class Recording:
    """The launches of a signature's calls on one stream. Making it serves the call it is made for."""

    def __init__(self, way: Way, call: AttentionCall, out: Tensor, lse: Tensor) -> None:
        self._table = Table(call.q.device)
        self._table.fill(call, out, lse)
        call, setup = self._table.setup(call, out, lse)
        self._room = way.make_room(call, setup)
        self.size = _bytes(self._room)
        way.launch_forward(call, setup, self._room, out, lse)  # compiles what a capture must find compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_capture_stream(call.q.device)):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads go on
            try:
                way.launch_forward(call, setup, self._room, out, lse)
            finally:
                graph.capture_end()
        self._graph = graph

    def replay(self, call: AttentionCall, out: Tensor, lse: Tensor) -> None:
        self._table.fill(call, out, lse)
        self._graph.replay()


def forward(way: Way, call: AttentionCall, setup: Setup, out: Tensor, lse: Tensor) -> None:
    """`way.forward`, from a recording where there is one; made here once it is worth it."""
    recordable = setup.once(("recordable", way), lambda: _is_recordable(way, call, setup))
    if not recordable or torch.cuda.is_current_stream_capturing():
        way.forward(call, setup, out, lse)
        return
    key = way, setup, torch._C._cuda_getCurrentRawStream(call.q.device.index)
    with _one_at_a_time:
        recording = _recordings.get(key)
        if recording is not None:
            recording.replay(call, out, lse)
            _recordings.move_to_end(key)
            return
        setup.calls[way] += 1
        if setup.calls[way] >= FIRST and _record(key, call, out, lse):
            return
    way.forward(call, setup, out, lse)


def _record(key: tuple[Way, Setup, int], call: AttentionCall, out: Tensor, lse: Tensor) -> bool:
    """Whether that went well, and so served the call."""
    way, setup, _ = key
    try:
        recording = Recording(way, call, out, lse)
    except RuntimeError as error:  # what can go wrong in a capture is CUDA's to say, and all of it can be done without
        setup.calls[way] = -NEVER
        warnings.warn(f"short calls are launched kernel by kernel, as they cannot be recorded: {error}", stacklevel=2)
        return False
    most = sorted_rows.memory(call.q.device) // SHARE
    if recording.size > most:  # it would push out all others, and then itself
        setup.calls[way] = -NEVER
        return True
    _recordings[key] = recording
    while sum(recording.size for recording in _recordings.values()) > most:
        _recordings.popitem(last=False)
    return True


def _bytes(room: Any) -> int:
    """Of all tensors in it, a plan's among them."""
    if isinstance(room, Tensor):
        return room.nbytes
    return sum(map(_bytes, room)) if isinstance(room, tuple) else 0


def _is_recordable(way: Way, call: AttentionCall, setup: Setup) -> bool:
    (_, _, queries, _), (_, _, keys, _) = call.q.shape, call.k.shape
    return (
        call.q.device.type == "cuda"
        and keys <= LONGEST
        and (queries == keys or queries >= FEWEST)
        and way.can_be_recorded(call, setup)
        and all(map(lies_in_rows, (call.q, call.k, call.v)))
        and all(x.data_ptr() % 16 == 0 for x in (call.q, call.k, call.v, call.query_groups, call.key_groups))
    )


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Captures are not possible on the default stream."""
    return torch.cuda.Stream(device)
