"""What the forwards inside `use_baseline` cost, summed up as `FocusModel.record_stats` does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from focus_attn.baselines.call import Cost, Shape


class LayerLedger(NamedTuple):
    """One attention layer over all forwards."""

    layer_idx: int
    multiply_adds: float
    dense_multiply_adds: float  # the model's own attention in this layer
    pairs_kept: float  # visible over causal pairs


@dataclass
class Ledger:
    """Filled while `use_baseline` is open."""

    _layers: dict[int, list[float]] = field(default_factory=dict)

    @property
    def per_layer(self) -> list[LayerLedger]:
        return [
            LayerLedger(index, spent, dense, kept / causal)
            for index, (spent, dense, kept, causal) in sorted(self._layers.items())
        ]

    @property
    def multiply_adds(self) -> float:
        return sum(layer.multiply_adds for layer in self.per_layer)

    @property
    def dense_multiply_adds(self) -> float:
        """What the model's own attention would have cost."""
        return sum(layer.dense_multiply_adds for layer in self.per_layer)

    @property
    def share(self) -> float:
        """Multiply-adds over those of the model's own attention: what `budget` asks for."""
        if not self._layers:
            raise ValueError("nothing was counted: run a forward inside `with use_baseline(...) as ledger:`")
        return self.multiply_adds / self.dense_multiply_adds

    @property
    def pairs_kept(self) -> float:
        """Visible over causal pairs, averaged over batch rows, heads and all attention layers, dense ones included.

        Several forwards are weighted by their causal pairs.
        """
        layers = self.per_layer
        if not layers:
            raise ValueError("nothing was counted: run a forward inside `with use_baseline(...) as ledger:`")
        return sum(layer.pairs_kept for layer in layers) / len(layers)

    def add(self, layer_idx: int, cost: Cost, rows: int, shape: Shape, dense_multiply_adds: float) -> None:
        """One call on `rows` sequences of one shape."""
        causal = rows * shape.causal_pairs
        tally = self._layers.setdefault(layer_idx, [0.0, 0.0, 0.0, 0.0])
        for index, amount in enumerate((cost.multiply_adds, dense_multiply_adds, cost.pairs_kept * causal, causal)):
            tally[index] += amount
