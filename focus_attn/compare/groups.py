"""What the groups of a row hold: sizes, confidence, and the tokens that stand out in each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from focus_attn.evaluation.groups import observe_routing, top_tokens
from focus_attn.model import FocusModel
from focus_attn.router import Routing

TOKENS = 8  # shown of each group


@torch.no_grad()
def describe_groups(model: FocusModel, blocks: Tensor, tokenizer: Any) -> dict[str, Any]:
    """Of the first router of the middle routed layer, and the confidence of all routers.

    Confidence is the softmax of a token's scores at its own group, mean over tokens, routers and layers.
    """
    surest: list[Tensor] = []

    def look(layer_idx: int, routing: Routing) -> Routing:
        temperature = model.focus_config.temperature
        surest.append((routing.key_scores / temperature).softmax(-1).amax(-1).mean())
        return routing

    device = next(model.parameters()).device
    with model.override_routing(look):
        model.base_model.get_decoder()(input_ids=blocks[:1].to(device), use_cache=False)  # type: ignore[operator]
    routing = observe_routing(model, blocks)
    layer = sorted(routing)[len(routing) // 2]
    seen = top_tokens(routing[layer], blocks, tokenizer, model.focus_config.num_groups, layer, router=0, count=TOKENS)
    return {
        "layer": layer,
        "router": 0,
        "confidence": torch.stack(surest).mean().item(),
        "groups": [group._asdict() for group in seen.groups],
    }
