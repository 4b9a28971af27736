"""The figures of one cell: losses by block, pairs kept, multiply-adds, how even the groups are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from focus_attn.baselines.budget import own_share
from focus_attn.baselines.focus_cost import focus_ledger
from focus_attn.baselines.ledger import Ledger
from focus_attn.baselines.seam import Baseline, use_baseline
from focus_attn.evaluation.perplexity import Perplexity, block_perplexity
from focus_attn.hf import Seam
from focus_attn.layer import LayerSpec
from focus_attn.model import FocusModel
from focus_attn.progress import Count


@dataclass(frozen=True)
class Figures:
    """Of one method on one text at one length."""

    ppl: float
    losses: tuple[float, ...]  # mean -log p of each block: what intervals are made from
    tokens: int  # predictions
    pairs_kept: float  # share of the causal pairs, mean over all attention layers
    multiply_adds: float  # share of the model's own attention, selection included
    full_layers: float  # the same of the layers that attend to everything alone: what a peer's `budget` means
    dominance: float | None = None  # share of the largest key group, mean over routers
    worst_dominance: float | None = None
    leaking: bool = False  # it looks at later tokens: no perplexity of a language model

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "losses": [round(loss, 6) for loss in self.losses]}


def measure(
    model: nn.Module, peer: Baseline | None, blocks: Tensor, window: int, progress: Count | None = None
) -> Figures:
    """Under a peer, or of the model as it is: with its own attention, or a FocusModel."""
    if peer is not None:
        with use_baseline(model, peer) as ledger:
            answer = block_perplexity(model, blocks, window=window, progress=progress)
        return _figures(answer, ledger, model, leaking=not peer.causal)
    if not isinstance(model, FocusModel):
        answer = block_perplexity(model, blocks, window=window, progress=progress)
        return Figures(answer.ppl, answer.block_losses, answer.tokens, _own_pairs(model, blocks.shape[1]), 1.0, 1.0)
    with model.record_stats() as stats:
        # The base with Focus on it: asked of the FocusModel, the counts would go to a record of each block.
        answer = block_perplexity(model.base_model, blocks, window=window, progress=progress)
    return _figures(
        answer,
        focus_ledger(model, stats, blocks.shape[1]),
        model,
        dominance=stats.dominance,
        worst_dominance=max((share for layer in stats.per_layer for share in layer.largest_groups or []), default=None),
        leaking=model.focus_config.leaks_future(),
    )


def _own_pairs(model: nn.Module, length: int) -> float:
    """Mean over the layers of the share of the causal pairs that the model's own attention has."""
    shares = [own_share(spec, length) for spec in _specs(model)]
    return sum(shares) / len(shares)


def _full_layers_share(ledger: Ledger, model: nn.Module) -> float:
    slides = {spec.layer_idx for spec in _specs(model) if spec.sliding_window is not None}
    # Where all slide, a budget can only mean all of them.
    full = [layer for layer in ledger.per_layer if layer.layer_idx not in slides] or ledger.per_layer
    return sum(layer.multiply_adds for layer in full) / sum(layer.dense_multiply_adds for layer in full)


def _specs(model: nn.Module) -> list[LayerSpec]:
    return [layer.spec for layer in model.focus_layers()] if isinstance(model, FocusModel) else Seam(model).specs


def _figures(answer: Perplexity, ledger: Ledger, model: nn.Module, **more: Any) -> Figures:
    full = _full_layers_share(ledger, model)
    return Figures(answer.ppl, answer.block_losses, answer.tokens, ledger.pairs_kept, ledger.share, full, **more)
