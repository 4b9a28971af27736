"""What the groups of a row hold: sizes, confidence, and the tokens that stand out in each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from focus_attn.evaluation.groups import observe_routing, top_tokens
from focus_attn.model import FocusModel
from focus_attn.router import Routing
from focus_attn.training.balance import routed_layers

TOKENS = 8  # shown of each group


@torch.no_grad()
def describe_groups(model: FocusModel, blocks: Tensor, tokenizer: Any) -> dict[str, Any]:
    """Of the first router of the middle routed layer, and the confidence of all routers; dense heads are none.

    Confidence is the softmax of a token's scores at its own group, mean over tokens, routers and layers.
    """
    surest: list[Tensor] = []
    choosing = {layer_idx: router.choosing for layer_idx, router in routed_layers(model)}

    def look(layer_idx: int, routing: Routing) -> Routing:
        temperature = model.focus_config.temperature
        surest.append((routing.key_scores[:, choosing[layer_idx]] / temperature).softmax(-1).amax(-1).mean())
        return routing

    device = next(model.parameters()).device
    with model.override_routing(look):
        model.base_model.get_decoder()(input_ids=blocks[:1].to(device), use_cache=False)  # type: ignore[operator]
    routing = observe_routing(model, blocks)
    layer = sorted(routing)[len(routing) // 2]
    router, groups = int(choosing[layer][0]), model.focus_config.num_groups
    seen = top_tokens(routing[layer], blocks, tokenizer, groups, layer, router=router, count=TOKENS)
    return {
        "layer": layer,
        "router": router,
        "confidence": torch.stack(surest).mean().item(),
        "groups": [group._asdict() for group in seen.groups],
    }
