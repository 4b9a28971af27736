"""The `triton` backend's forward: which way a call goes.

Where queries and keys share their ids, the groups are plain causal attentions: cuDNN does those (`square.py`). All else
goes the general way (`near_far.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus_attn.attention import near_far, recorded, square
from focus_attn.attention.call import AttentionCall
from focus_attn.attention.launch import setup_for, with_ids_in_a_row
from focus_attn.attention.merge import merge_sink_logits
from focus_attn.attention.recorded import Way


def triton_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out [B, H, Tq, Dv] in the dtype of v, logsumexp [B, H, Tq] fp32."""
    return _forward(call, may_record=False)


def triton_inference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The same outside of PyTorch's operators, where short calls may be recorded: inside, a compiler may be at work
    that recycles all memory that it does not know of."""
    return _forward(call, may_record=True)


def _forward(call: AttentionCall, may_record: bool) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, _ = call.q.shape
    # Laid out as the model wants it next: [B, Tq, H, Dv], seen as [B, H, Tq, Dv].
    width = call.v.shape[-1]
    # Several rounds of visits would round to half precision several times.
    out = torch.empty_strided(
        (batch, heads, num_queries, width),
        (num_queries * heads * width, width, heads * width, 1),
        dtype=call.v.dtype if call.query_groups.shape[-1] == 1 else torch.float32,
        device=call.q.device,
    )
    lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=call.q.device)
    if num_queries == 0:
        return out, lse
    call = with_ids_in_a_row(call)
    setup = setup_for(call)
    way: Way = square if square.serves(call, setup) else near_far
    if may_record:
        recorded.forward(way, call, setup, out, lse)
    else:
        way.forward(call, setup, out, lse)
    if call.sink_logits is not None:
        out, lse = merge_sink_logits(out.float(), lse, call.sink_logits)
    return out if out.dtype == call.v.dtype else out.to(call.v.dtype), lse
