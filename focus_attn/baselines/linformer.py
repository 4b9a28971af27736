"""Linformer (Wang et al. 2020, arXiv 2006.04768): keys and values projected along the sequence. Not for causal LMs.

With E and F of [r, T], out = softmax(q (E k)^T) F v. Each of the r projected keys is a mixture of *all* T tokens, so
every output depends on every later token, and no mask on the r columns takes that out: the mixing comes before. One
would need another E and F for every query, which is what the method is there to avoid. `linformer_attention` is the
method as published, for encoders and for the test that shows the leak; in a causal LM it is refused.

Cost: as an encoder, 2 r T D for the projections and r T (D + Dv) for the attention of each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from focus_attn.baselines.call import Cost, LayerCall
from focus_attn.baselines.seam import Kind


@dataclass(frozen=True)
class Linformer:
    name: ClassVar[str] = "linformer"
    kind: ClassVar[Kind] = "skips"
    causal: ClassVar[bool] = False

    def attend(self, call: LayerCall) -> tuple[Tensor, Cost]:
        raise ValueError(
            "linformer cannot serve a causal LM: it mixes the keys and values of all tokens, later ones included, "
            "before any of them is attended to, and no mask can undo that. Leave it out of comparisons of causal models"
        )


def linformer_attention(q: Tensor, k: Tensor, v: Tensor, mix_keys: Tensor, mix_values: Tensor, scale: float) -> Tensor:
    """q, k [B, H, T, D], v [B, H, T, Dv], mix_keys and mix_values [r, T] -> [B, H, T, Dv]. Looks both ways."""
    return (q @ (mix_keys @ k).transpose(-1, -2) * scale).softmax(-1) @ (mix_values @ v)
