"""cuDNN's attention over many jobs of different sizes in one call, through the `nvidia-cudnn-frontend` package.

PyTorch's own way to cuDNN takes batches of one length, or builds a new graph at every call. Here a graph is built
once for a *bound* on the length and kept; how long each job is, and where it begins, are tensors on the device.
Nothing is padded, nothing is read back, and the call can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import warnings
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """What a graph is built for: `jobs` attentions, each of a run of queries to a run of keys.

    The lengths are bounds. causal: query i of a job sees its keys up to i; otherwise all of them.
    """

    jobs: int
    heads: int
    kv_heads: int
    longest_queries: int
    longest_keys: int
    total: int  # tokens in all, which bounds what a backward needs
    causal: bool
    width: int
    dtype: torch.dtype
    scale: float
    device: torch.device


class Jobs(NamedTuple):
    """Where the jobs lie in [tokens, heads, width] tensors. A job of no queries and no keys is none."""

    query_lengths: Tensor  # [jobs] int32
    key_lengths: Tensor  # [jobs] int32
    offsets: Tensor  # [3, jobs + 1] int64, in elements: of tensors like q, like k, and like the logsumexp


class _Uid(IntEnum):
    Q, K, V, OUT, LSE, GRAD, GRAD_Q, GRAD_K, GRAD_V = range(1, 10)
    QUERY_LENGTHS, KEY_LENGTHS, QUERY_OFFSETS, KEY_OFFSETS, LSE_OFFSETS = range(20, 25)


def bound(length: int) -> int:
    """`length` rounded up to one of eight steps an octave: few graphs serve all lengths."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step


def can_serve(shape: Shape) -> bool:
    """Whether cuDNN, its Python package and this GPU can do it; the graphs are built here, once."""
    if shape.device.type != "cuda" or shape.dtype not in (torch.bfloat16, torch.float16):
        return False
    if shape.width > 128 or shape.width % 8:
        return False
    return importlib.util.find_spec("cudnn") is not None and _graph(shape, False, False) is not None


def can_differentiate(shape: Shape, deterministic: bool) -> bool:
    """Whether there is a backward where there is a forward. The deterministic one may want room for all pairs of the
    longest group there could be: not much of the memory is given to that."""
    found = _graph(shape, True, deterministic)
    if found is None:
        return False
    return not deterministic or found[1] <= torch.cuda.get_device_properties(shape.device).total_memory // 16


def forward(
    shape: Shape, jobs: Jobs, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, workspace: Tensor | None = None
) -> None:
    """q, out [tokens, heads, width], k, v [tokens, kv_heads, width], lse [tokens, heads] fp32. out may be q: a tile's
    output then takes the place of its queries. workspace: from `room_for_forward`, made here unless given."""
    _run(shape, False, jobs, {1: q, 2: k, 3: v, 4: out, 5: lse}, workspace)


def room_for_forward(shape: Shape) -> tuple[Tensor, Any]:
    """A workspace for `forward`, which has an address even where no bytes are needed, and the graph that owns the
    kernels, for who records their launches and so needs them to stay."""
    graph, size = _graph(shape, False, False)  # type: ignore[misc]
    return _workspace(max(1, size), shape.device), graph


def backward(shape: Shape, jobs: Jobs, tensors: tuple[Tensor, ...], grads: tuple[Tensor, Tensor, Tensor]) -> None:
    """Gradients of q, k, v into `grads`, for jobs that share no keys. tensors: q, k, v, out, lse, grad; out and lse may
    be those of a merge."""
    _run(shape, True, jobs, dict(enumerate((*tensors, *grads), start=1)))


def _run(
    shape: Shape, is_backward: bool, jobs: Jobs, tensors: dict[int, Tensor], workspace: Tensor | None = None
) -> None:
    """tensors by the value of their _Uid: enums are slow, and this is run for every layer."""
    deterministic = is_backward and torch.are_deterministic_algorithms_enabled()
    graph, workspace_bytes = _graph(shape, is_backward, deterministic)  # type: ignore[misc]
    handle = _handle(shape.device)
    stream = torch._C._cuda_getCurrentRawStream(shape.device.index)  # as Triton asks: a tenth of the public way's time
    offsets, row = jobs.offsets.data_ptr(), jobs.offsets.stride(0) * 8
    pointers = {uid: tensor.data_ptr() for uid, tensor in tensors.items()}
    pointers[20], pointers[21] = jobs.query_lengths.data_ptr(), jobs.key_lengths.data_ptr()
    pointers[22], pointers[23], pointers[24] = offsets, offsets + row, offsets + 2 * row
    if workspace is None:
        workspace = jobs.offsets if not workspace_bytes else _workspace(workspace_bytes, shape.device)
    with _one_at_a_time:
        if _streams.get(shape.device) != stream:
            import cudnn

            cudnn.set_stream(handle=handle, stream=stream)
            _streams[shape.device] = stream
        graph.execute(pointers, workspace.data_ptr(), handle)


def _workspace(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


_one_at_a_time = threading.Lock()  # threads share a device's handle, which has one stream at a time
_streams: dict[torch.device, int] = {}  # where each device's handle works: telling it takes longer than remembering


@functools.cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.lru_cache(maxsize=256)
def _graph(shape: Shape, is_backward: bool, deterministic: bool) -> tuple[Any, int] | None:
    """(graph, bytes of workspace), or None where cuDNN refuses, which is said once."""
    import cudnn

    try:
        with torch.cuda.device(shape.device):
            graph = _build(cudnn, shape, is_backward, deterministic)
        return graph, graph.get_workspace_size()
    except Exception as error:  # the package has several kinds of its own and raises plain ones too
        warnings.warn(f"cuDNN does not serve {shape}, so Triton does all: {error}", UserWarning, stacklevel=2)
        return None


def _build(cudnn: Any, shape: Shape, is_backward: bool, deterministic: bool) -> Any:
    jobs, heads, kv_heads, longest_queries, longest_keys, total, causal, width, dtype, scale, device = shape
    kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
    fp32, int32, int64 = cudnn.data_type.FLOAT, cudnn.data_type.INT32, cudnn.data_type.INT64
    graph = cudnn.pygraph(
        io_data_type=kind, intermediate_data_type=fp32, compute_data_type=fp32, handle=_handle(device)
    )

    def numbers(uid: _Uid, count: int, data_type: Any) -> Any:
        return graph.tensor(
            name=uid.name, uid=uid.value, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type
        )

    query_lengths, key_lengths = (numbers(uid, jobs, int32) for uid in (_Uid.QUERY_LENGTHS, _Uid.KEY_LENGTHS))
    query_offsets, key_offsets, lse_offsets = (
        numbers(uid, jobs + 1, int64) for uid in (_Uid.QUERY_OFFSETS, _Uid.KEY_OFFSETS, _Uid.LSE_OFFSETS)
    )

    def layout(uid: _Uid) -> tuple[list[int], list[int], Any, Any]:
        """Size, strides, offsets and dtype: [job, head, token, width] over memory that runs token by token."""
        count, longest, columns, offsets, data_type = heads, longest_queries, width, query_offsets, kind
        if uid in (_Uid.K, _Uid.V, _Uid.GRAD_K, _Uid.GRAD_V):
            count, longest, offsets = kv_heads, longest_keys, key_offsets
        if uid is _Uid.LSE:
            columns, offsets, data_type = 1, lse_offsets, fp32
        strides = [longest * count * columns, columns, count * columns, 1]
        return [jobs, count, longest, columns], strides, offsets, data_type

    def given(uid: _Uid) -> Any:
        size, strides, offsets, data_type = layout(uid)
        return graph.tensor(
            name=uid.name, uid=uid.value, dim=size, stride=strides, data_type=data_type, ragged_offset=offsets
        )

    def wanted(uid: _Uid, tensor: Any) -> None:
        size, strides, offsets, data_type = layout(uid)
        tensor.set_output(True).set_uid(uid.value).set_dim(size).set_stride(strides)
        tensor.set_ragged_offset(offsets).set_data_type(data_type)

    common = {
        "q": given(_Uid.Q),
        "k": given(_Uid.K),
        "v": given(_Uid.V),
        "attn_scale": scale,
        "use_causal_mask": causal,
        "use_padding_mask": True,
        "seq_len_q": query_lengths,
        "seq_len_kv": key_lengths,
    }
    if is_backward:
        results = graph.sdpa_backward(
            name="focus_backward",
            o=given(_Uid.OUT),
            dO=given(_Uid.GRAD),
            stats=given(_Uid.LSE),
            max_total_seq_len_q=total,
            max_total_seq_len_kv=total,
            use_deterministic_algorithm=deterministic,
            **common,
        )
        uids: tuple[_Uid, ...] = (_Uid.GRAD_Q, _Uid.GRAD_K, _Uid.GRAD_V)
    else:
        results = graph.sdpa(name="focus_forward", generate_stats=True, **common)
        uids = (_Uid.OUT, _Uid.LSE)
    for uid, result in zip(uids, results, strict=True):
        wanted(uid, result)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph
