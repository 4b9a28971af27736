"""Launching Triton kernels again and again without asking each time which of their variants is meant.

Triton looks at every argument of every launch (its type, alignment and value) to find the compiled variant: some 40
µs, more than a short kernel takes. All that can change a variant here is in a call's signature, so a variant is
looked up by that signature once, and launched as it is from then on.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focus_attn.attention.call import AttentionCall


class Tile(NamedTuple):
    """How one kernel is launched: rows and keys a tile, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


MOST_SIGNATURES = 1024
FARTHEST = 1 << 24  # elements from a token to the next: the rows of a tile are told apart in 32 bits
_setups: OrderedDict[tuple[Any, ...], Setup] = OrderedDict()


class Setup:
    """What the kernels of all calls with one signature share.

    entries: for kernels that get the addresses of some tensors from a table (`recorded.py`), by the id() of such a
    tensor its entry there.
    """

    def __init__(self, call: AttentionCall, entries: dict[int, Tensor] | None = None) -> None:
        width, value_width = call.q.shape[-1], call.v.shape[-1]
        self.heads_a_key = call.q.shape[1] // call.k.shape[1]
        self.sizes = {
            "SOFTCAP": call.softcap is not None,
            "PRECISION": "ieee" if call.q.element_size() == 4 else "tf32",
            "G": self.heads_a_key,
            "D": width,
            "DV": value_width,
            "BLOCK_D": max(16, power_of_2(width)),
            "BLOCK_DV": max(16, power_of_2(value_width)),
        }
        self.calls: Counter[Any] = Counter()  # made without a recording, by the way they went
        self._entries = entries
        self._answers: dict[Any, Any] = {}
        self._variants: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def once(self, question: Any, answer: Callable[[], Any]) -> Any:
        """An answer that is the same for all calls with this signature."""
        found = self._answers.get(question)
        if found is None:
            found = self._answers[question] = answer()
        return found

    def launch(
        self, tag: Any, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...],
        make_constants: Callable[[], dict[str, Any]], *, warps: int = 4, stages: int = 2,
    ) -> None:  # fmt: skip
        """tag: which variant of which kernel this is, among the calls of one signature. Constants come last, and are
        made for the first launch alone."""
        if self._entries is not None:
            arguments = tuple(self._entries.get(id(argument), argument) for argument in arguments)

        def constants() -> dict[str, Any]:
            by_table = {"BY_TABLE": self._entries is not None} if "BY_TABLE" in kernel.arg_names else {}
            return {**make_constants(), **by_table}

        launch_variant(self._variants, tag, kernel, grid, arguments, constants, warps, stages)


def launch_variant(
    variants: dict[Any, tuple[Any, tuple[Any, ...]]], tag: Any, kernel: Any, grid: tuple[int, int, int],
    arguments: tuple[Any, ...], make_constants: Callable[[], dict[str, Any]], warps: int, stages: int,
) -> None:  # fmt: skip
    """variants: what launches with earlier tags compiled; all that can change a variant must be in its tag."""
    known = variants.get(tag)
    if known is not None:
        compiled, values = known
        compiled[grid](*arguments, *values)
        return
    constants = make_constants()
    compiled = kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)
    if compiled is not None:  # Triton's interpreter compiles nothing
        variants[tag] = compiled, tuple(constants[name] for name in kernel.arg_names if name in constants)


def setup_for(call: AttentionCall, *more: Tensor) -> Setup:
    """more: tensors beside those of the call whose layout matters."""
    setup: Setup | None = None if more else call.known.get("setup")
    if setup is not None:
        return setup
    signature = _signature(call, more)
    setup = _setups.get(signature)
    if setup is None:
        setup = _setups[signature] = Setup(call)
        if len(_setups) > MOST_SIGNATURES:
            _setups.popitem(last=False)
    if not more:
        call.known["setup"] = setup
    return setup


def _signature(call: AttentionCall, more: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Says nothing twice: q, k and v have one dtype, and ids are int64."""
    q, tokens, query, key = call.q, call.tokens, call.query_groups, call.key_groups
    layouts = [(x.shape, x.stride(), x.data_ptr() % 16 == 0) for x in (q, call.k, call.v, *more)]
    ids: tuple[Any, ...] = (query.shape, query.data_ptr() % 16 == 0)
    if key is not query:
        ids += key.shape, key.data_ptr() % 16 == 0
    given = tokens.key_segments is None, call.query_gate is None, call.sink_logits is None
    kind = tokens.plain, *given, call.scale, call.softcap
    return *layouts, ids, call.pattern, kind, q.dtype, q.device, *[x.dtype for x in more]


def with_ids_in_a_row(call: AttentionCall) -> AttentionCall:
    """The call with ids that lie one after the other, as every kernel reads them; ids that were shared stay so."""
    query, key = call.query_groups, call.key_groups
    if query.is_contiguous() and key.is_contiguous():
        return call
    rows = query.contiguous()
    return replace(call, query_groups=rows, key_groups=rows if key is query else key.contiguous())


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a block may have. Triton's interpreter has no limit: there it is an H200's."""
    if device.type != "cuda":
        return 232448
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))  # AMD's


def fitting(tile: Tile, needed: Callable[[Tile], int], room: int, fewest_rows: int = 16) -> Tile:
    """Fewer stages, then fewer keys, then fewer rows, on devices with less shared memory than an H200: an A100 has 163
    KiB a block, most others 99. needed: bytes of a tile."""
    while needed(tile) > room:
        if tile.stages > 1:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.keys > 16:
            tile = tile._replace(keys=tile.keys // 2)
        elif tile.rows > fewest_rows:
            tile = tile._replace(rows=tile.rows // 2)
        else:
            break
    return tile


def lies_in_rows(x: Tensor) -> bool:
    """Whether kernels can read [B, heads, T, D] as it is: a vector in one piece, and the next one not too far away."""
    return x.stride(-1) == 1 and x.stride(2) < FARTHEST


def in_step(*tensors: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 elements, the first of 16 bytes, and are as long.

    Where they do not, loads are narrow. Of the kernels with warpgroup products that come of it ptxas 12.8 (Triton 3.6)
    gets some wrong: the register that holds the address of V in shared memory is given away too early, and the product
    reads what is elsewhere (compute-sanitizer found it at widths 40 and 24). Tiles of 32 have no such products.
    """
    return not any(number % 16 for x in tensors for number in (x.data_ptr(), x.shape[-1], *x.stride()[:-1]))


def brought_into_step(x: Tensor) -> Tensor:
    """x, or a copy of it where that is in step, with rows that run on in memory: no copy mends an odd width."""
    if x.stride(-1) == 1 and (in_step(x) or x.shape[-1] % 16):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def power_of_2(number: int) -> int:
    """The next power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)
