"""Most of the far pass by cuDNN: what many queries of a group see alike needs no mask.

The sorted queries of a group are cut into jobs of a few hundred. All queries of a job see at least the keys that its
first one sees; that prefix is an attention without a mask, which cuDNN does. The far kernel goes on from there with
the few keys that only the later queries see. This is for long texts: a job's prefix must be long beside the job.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_attn.attention import cudnn, sorted_rows, triton_plan
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.device_plan import FarPlan
from focus_attn.attention.launch import Setup, ceil_div, power_of_2
from focus_attn.attention.sorted_rows import Copy, room_for, sort_rows
from focus_attn.attention.tiles import tile_of_group

SHORTEST = 1 << 16  # keys; below this the far kernel alone is faster, and up to twice this for narrow heads
JOB = 1024  # queries
LEAST_KEYS = 256  # of a job: fewer are left to the far kernel


class Bulk(NamedTuple):
    """What a round of visits has seen so far, by sorted query: [B, lines, Tq, heads a line, Dv] and [..., 1] fp32."""

    out: Tensor
    lse: Tensor


def job_rows(rows: int) -> int:
    """Queries a job: whole tiles of the far kernel, which has so many rows."""
    return max(1, JOB // rows) * rows


def serves(call: AttentionCall, setup: Setup) -> bool:
    return setup.once("bulk", lambda: _serves(call))


def _serves(call: AttentionCall) -> bool:
    return (
        call.k.shape[2] >= SHORTEST * (1 if call.q.shape[-1] > 64 else 2)
        and call.q.shape[2] >= JOB
        and min(call.query_groups.shape[-1], call.key_groups.shape[-1]) == 1
        and call.softcap is None
        and call.q.shape[-1] == call.v.shape[-1]
        and triton_plan.serves(call)
        and cudnn.can_serve(_shape(call, sorted_rows.heads_at_once(call, copies=3), JOB))
    )


@triton.jit(do_not_specialize=["num_queries", "num_entries", "first_line", "routers", "visit"])
def _jobs_kernel(
    STARTS, RANGES, QUERY_LENGTHS, KEY_LENGTHS, OFFSETS,
    num_queries, num_entries, first_line, routers, visit, query_unit, key_unit, lse_unit,
    VISITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, JOB_ROWS: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Program (job, line, row)."""
    job, line, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    round = (batch * routers + first_line + line) * VISITS + visit
    _, begin, end = tile_of_group(STARTS + round * (GROUPS + 1), job, JOB_ROWS, GROUPS, BLOCK_GROUPS)
    here = begin < end
    first, last = (
        tl.load(RANGES + round * 2 * num_queries + begin, mask=here, other=0),
        tl.load(RANGES + round * 2 * num_queries + num_queries + begin, mask=here, other=0),
    )
    is_job = here & (last - first >= LEAST)
    line = batch * tl.num_programs(1) + line
    at, jobs = line * tl.num_programs(0) + job, tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    tl.store(QUERY_LENGTHS + at, tl.where(is_job, tl.minimum(end - begin, JOB_ROWS), 0))
    tl.store(KEY_LENGTHS + at, tl.where(is_job, last - first, 0))
    query = tl.where(is_job, line * num_queries + begin, 0).to(tl.int64)
    key = tl.where(is_job, line * num_entries + first, 0).to(tl.int64)
    tl.store(OFFSETS + at, query * query_unit)
    tl.store(OFFSETS + jobs + 1 + at, key * key_unit)
    tl.store(OFFSETS + 2 * (jobs + 1) + at, query * lse_unit)
    if at == 0:  # one past the last job: nothing begins there
        for row in tl.static_range(3):
            tl.store(OFFSETS + row * (jobs + 1) + jobs, tl.zeros([], tl.int64))


def bulk_forward(
    call: AttentionCall, setup: Setup, plan: FarPlan, k: Tensor, v: Tensor, first_head: int, visit: int, rows: int
) -> Bulk:
    """k, v: sorted copies of some KV heads from `first_head` on. rows: queries a tile of the far kernel."""
    batch, routers, num_queries, query_k = call.query_groups.shape
    lines, entries, a_line = k.shape[1:4]
    kv_heads, groups, device = lines * a_line, call.pattern.num_groups, call.q.device
    first_line = 0 if routers == 1 else first_head
    shape = _shape(call, kv_heads, job_rows(rows))
    per_line = shape.jobs // (batch * lines)
    query_lengths, key_lengths = torch.empty(2, shape.jobs, dtype=torch.int32, device=device).unbind(0)
    offsets = torch.empty(3, shape.jobs + 1, dtype=torch.int64, device=device)
    jobs = cudnn.Jobs(query_lengths, key_lengths, offsets)
    width = shape.width
    setup.launch(
        "jobs", _jobs_kernel, (per_line, lines, batch),
        (
            plan.group_starts, plan.ranges, *jobs, num_queries, entries, first_line, routers, visit,
            shape.heads * width, shape.kv_heads * width, shape.heads,
        ),
        lambda: {
            "VISITS": query_k, "GROUPS": groups, "BLOCK_GROUPS": power_of_2(groups),
            "JOB_ROWS": job_rows(rows), "LEAST": LEAST_KEYS,
        },
        warps=1,
    )  # fmt: skip
    (q,) = room_for(call, kv_heads, "q")
    lse = torch.empty(*q.shape[:-1], 1, dtype=torch.float32, device=device)
    slots = plan.query_slots[:, first_line : first_line + lines, visit]
    sort_rows(setup, "q", Copy(call.q, q, first_head * setup.heads_a_key, slots))
    cudnn.forward(shape, jobs, q, k, v, q, lse)
    return Bulk(q, lse)


def _shape(call: AttentionCall, kv_heads: int, rows: int) -> cudnn.Shape:
    batch, heads, num_queries, width = call.q.shape
    lines, a_line = (1, kv_heads) if call.query_groups.shape[1] == 1 else (kv_heads, 1)
    jobs = batch * lines * (ceil_div(cudnn.bound(num_queries), rows) + call.pattern.num_groups)
    longest = cudnn.bound(call.k.shape[2])
    return cudnn.Shape(
        jobs=jobs,
        heads=a_line * heads // call.k.shape[1],
        kv_heads=a_line,
        longest_queries=rows,
        longest_keys=longest,
        total=batch * lines * longest,
        causal=False,
        width=width,
        dtype=call.q.dtype,
        scale=call.scale,
        device=call.q.device,
    )
