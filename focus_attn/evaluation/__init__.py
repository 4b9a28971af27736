"""Measuring what Focus costs in quality, and looking at what its routers learned."""

from focus_attn.evaluation.bootstrap import Interval, paired_difference, perplexity_ratio
from focus_attn.evaluation.groups import Group, RouterGroups, group_shares, observe_routing, top_tokens
from focus_attn.evaluation.perplexity import Perplexity, block_perplexity, perplexity, token_blocks

__all__ = [
    "Group",
    "Interval",
    "Perplexity",
    "RouterGroups",
    "block_perplexity",
    "group_shares",
    "observe_routing",
    "paired_difference",
    "perplexity",
    "perplexity_ratio",
    "token_blocks",
    "top_tokens",
]
