"""Full causal attention: the model itself, in the seam of the others.

Cost: every causal pair, one score and one value each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from focus_attn.baselines.call import Cost, LayerCall
from focus_attn.baselines.masked import masked_attention
from focus_attn.baselines.seam import Kind


@dataclass(frozen=True)
class Full:
    name: ClassVar[str] = "full"
    kind: ClassVar[Kind] = "dense"
    causal: ClassVar[bool] = True

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        return full_attention(call), Cost(call.q.shape[0] * call.shape.dense_multiply_adds, 1.0)


def full_attention(call: LayerCall) -> Tensor:
    """[B, H, T, Dv]."""
    if call.softcap is None and call.sink_logits is None:
        return nn.functional.scaled_dot_product_attention(
            call.q, call.keys, call.values, is_causal=True, scale=call.scale
        )
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.q.device)
    return masked_attention(call, lambda start, stop: everything)[0]
