"""What the frozen model's layers are seen to do: the material that routers are started from and fitted to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from focus_attn.config import FocusConfig
from focus_attn.layer import AttentionInputs
from focus_attn.progress import Progress
from focus_attn.router import Router, normalise
from focus_attn.training.objectives import FarAttention, far_attention

if TYPE_CHECKING:
    from focus_attn.model import FocusModel


@dataclass(frozen=True)
class Observation:
    """One layer and one block: what is kept of it."""

    inputs: AttentionInputs  # q: the sampled queries alone; v: its lengths alone, if not all of it was asked for
    positions: Tensor  # [n] of the sampled queries

    @property
    def hidden(self) -> Tensor:
        """[T, d] normalised, in the model's dtype: products with it then run at the model's speed."""
        assert self.inputs.hidden is not None
        hidden = self.inputs.hidden[0]
        return normalise(hidden).to(hidden.dtype)

    def attention(self, router: Router) -> FarAttention:
        config = router.config
        return far_attention(self.inputs, self.positions, router.num_routers, config.window, config.num_sinks)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.inputs.hidden, self.inputs.q, self.inputs.k, self.inputs.v) if x is not None)


def observe_layers(
    model: FocusModel,
    token_blocks: Tensor,
    queries: int,
    seed: int,
    progress: Progress | None = None,
    *,
    values: bool = False,
) -> dict[int, list[Observation]]:
    """Run the dense model over blocks [N, T] and keep, of every routed layer, its hidden states, its keys and `queries`
    of its queries past the window, drawn anew for every block. values: keep those too, not only their lengths."""
    window = model.focus_config.window
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    observations: dict[int, list[Observation]] = {}
    positions = torch.empty(0)

    def keep(inputs: AttentionInputs) -> None:
        # Of q only the sampled positions are needed, of v mostly its length alone.
        v = inputs.v if values else inputs.v.float().norm(dim=-1, keepdim=True)
        slim = dataclasses.replace(inputs, q=inputs.q[:, :, positions].clone(), v=v)
        observations.setdefault(inputs.layer_idx, []).append(Observation(slim, positions))

    decoder = model.base_model.get_decoder()  # type: ignore[operator]
    with torch.no_grad(), model.observe_attention(keep):
        for done, block in enumerate(token_blocks, start=1):
            past_window = torch.randperm(len(block) - window - 1, generator=generator)[:queries] + window + 1
            positions = past_window.sort().values.to(device)
            decoder(input_ids=block[None].to(device), use_cache=False)
            if progress:
                progress("observing the dense model", done, len(token_blocks))
    return observations


def check_blocks(token_blocks: Tensor, config: FocusConfig) -> None:
    if token_blocks.dim() != 2 or token_blocks.is_floating_point():
        raise ValueError(f"`token_blocks` must be [blocks, tokens] ids, got {list(token_blocks.shape)}")
    blocks, length = token_blocks.shape
    least = 2 * (config.window + config.num_sinks)
    if blocks == 0 or length < least:
        raise ValueError(
            f"`token_blocks` of shape {list(token_blocks.shape)} is too small to fit on: at least one block, and at "
            f"least {least} tokens (twice the window and the sinks)"
        )
