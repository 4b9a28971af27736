"""The cost of Focus itself, counted as the baselines' is: routers included."""

from __future__ import annotations

from focus_attn.baselines.budget import attention_shape, own_share
from focus_attn.baselines.call import Cost
from focus_attn.baselines.ledger import Ledger
from focus_attn.model import FocusModel
from focus_attn.stats import Stats


def focus_ledger(model: FocusModel, stats: Stats, length: int) -> Ledger:
    """What one sequence of `length` tokens costs under the active adapter, from the pairs that `stats` has counted.

    A router's cost is what it computes: centroids through the projection once, then a score of every token with every
    group, on the query and on the key side.
    """
    ledger, shape = Ledger(), attention_shape(model, length)
    pair = shape.heads * shape.causal_pairs * shape.pair_cost
    by_layer = {layer.layer_idx: layer.pairs_kept for layer in stats.per_layer}
    for layer in model.focus_layers():
        share, router = by_layer[layer.spec.layer_idx], layer.router
        routing = 0
        if router is not None:
            scores = router.num_sides * router.num_routers * router.config.num_groups * router.hidden_size
            routing = scores * (length + router.config.router_dim)
        dense = own_share(layer.spec, length) * shape.dense_multiply_adds
        ledger.add(layer.spec.layer_idx, Cost(routing + share * pair, share), 1, shape, dense)
    return ledger
