"""Which tokens act as sinks, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from focus_attn.evaluation.attention_view import SINK_SHARE, AttentionView


class ActingSinks:
    """A watcher of `coverage_by_layer`: counts the keys that act as sinks, once for each head and block."""

    def __init__(self, pieces: Sequence[Sequence[str]]) -> None:
        """pieces: the text of every token of every block."""
        self.pieces = pieces
        self.found: dict[int, Counter[str]] = {}
        self.heads: dict[int, int] = {}

    def __call__(self, view: AttentionView) -> None:
        if not view.last:
            return
        keys = view.acts_as_sink.nonzero()[:, 1].tolist()
        self.found.setdefault(view.layer_idx, Counter()).update(self.pieces[view.block][key] for key in keys)
        self.heads[view.layer_idx] = self.heads.get(view.layer_idx, 0) + len(view.acts_as_sink)

    def to_dict(self, most: int = 6) -> dict[str, Any]:
        """`keys`: how many a head has in a block, on average; `tokens`: the most common ones and how many there are."""
        return {
            "share": SINK_SHARE,
            "layers": [
                {
                    "layer_idx": layer_idx,
                    "keys": sum(found.values()) / self.heads[layer_idx],
                    "tokens": [list(token) for token in found.most_common(most)],
                }
                for layer_idx, found in sorted(self.found.items())
            ],
        }
