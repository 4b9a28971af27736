"""Short square calls as one launch: the host takes longer to make five of them than the device to work them off.

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
from typing import Any

import torch
from torch import Tensor

from focus_attn.attention import cudnn, sorted_rows, square
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.launch import Setup
from focus_attn.attention.tiles import fill_table_kernel

LONGEST = 1 << 15  # tokens; beyond, the device takes so long that the host is far ahead of it
NEVER = 1 << 60  # calls
FIRST = 3  # the call of a signature that is recorded: lengths that come once are not worth it
SHARE = 100  # of the device's memory, one part in so many

_recordings: OrderedDict[tuple[Setup, int], Recording] = OrderedDict()
_one_at_a_time = threading.Lock()  # between a table and its replay there must be no other call's table


class Table:
    """Where a call's tensors lie, on the device. Entries stand 16 bytes apart: so kernels expect of addresses."""

    def __init__(self, device: torch.device) -> None:
        self._addresses = torch.empty(6, 2, dtype=torch.int64, device=device)
        self._fill: Any = None

    def fill(self, call: AttentionCall, out: Tensor, lse: Tensor) -> None:
        tensors = call.q, call.k, call.v, call.key_groups, out, lse
        addresses = [tensor.data_ptr() for tensor in tensors]
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
        call = replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
        tensors = call.q, call.k, call.v, call.key_groups, out, lse
        entries = {id(x): entry.view(x.dtype) for x, entry in zip(tensors, self._addresses, strict=True)}
        return call, Setup(call, entries)


class Recording:
    """The launches of a signature's calls on one stream. Making it serves the call it is made for."""

    def __init__(self, call: AttentionCall, out: Tensor, lse: Tensor) -> None:
        self._table = Table(call.q.device)
        self._table.fill(call, out, lse)
        call, setup = self._table.setup(call, out, lse)
        self._room = square.make_room(call, setup)
        self.size = sum(copy.nbytes for copy in self._room[1:])  # what its plan takes is small beside the copies
        square.launch_forward(call, setup, self._room, out, lse)  # compiles what a capture must find compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_capture_stream(call.q.device)):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads go on
            try:
                square.launch_forward(call, setup, self._room, out, lse)
            finally:
                graph.capture_end()
        self._graph = graph
        self._kernels = cudnn.kernels_of_forward(square.heads_at_once(call, setup)[1])

    def replay(self, call: AttentionCall, out: Tensor, lse: Tensor) -> None:
        self._table.fill(call, out, lse)
        self._graph.replay()


def square_forward(call: AttentionCall, setup: Setup, out: Tensor, lse: Tensor) -> None:
    """`square.square_forward`, from a recording where there is one; made here once it is worth it."""
    if not setup.once("recordable", lambda: _is_recordable(call, setup)) or torch.cuda.is_current_stream_capturing():
        square.square_forward(call, setup, out, lse)
        return
    key = setup, torch._C._cuda_getCurrentRawStream(call.q.device.index)
    with _one_at_a_time:
        recording = _recordings.get(key)
        if recording is not None:
            recording.replay(call, out, lse)
            _recordings.move_to_end(key)
            return
        setup.calls += 1
        if setup.calls >= FIRST and _record(key, call, out, lse):
            return
    square.square_forward(call, setup, out, lse)


def _record(key: tuple[Setup, int], call: AttentionCall, out: Tensor, lse: Tensor) -> bool:
    """Whether that went well, and so served the call."""
    try:
        _recordings[key] = Recording(call, out, lse)
    except RuntimeError as error:  # what can go wrong in a capture is CUDA's to say, and all of it can be done without
        key[0].calls = -NEVER
        warnings.warn(f"short calls are launched kernel by kernel, as they cannot be recorded: {error}", stacklevel=2)
        return False
    most = sorted_rows.memory(call.q.device) // SHARE
    while sum(recording.size for recording in _recordings.values()) > most:
        _recordings.popitem(last=False)
    return True


def _is_recordable(call: AttentionCall, setup: Setup) -> bool:
    q, k, v = call.q, call.k, call.v
    return (
        q.device.type == "cuda"
        and q.shape[2] <= LONGEST
        and square.heads_at_once(call, setup)[0] == k.shape[1]
        and all(x.stride(-1) == 1 for x in (q, k, v))
        and all(x.data_ptr() % 16 == 0 for x in (q, k, v, call.key_groups))
    )


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Captures are not possible on the default stream."""
    return torch.cuda.Stream(device)
