"""Focus: sparse attention for pretrained causal LMs, by learning which token pairs matter."""

from focus_attn.attention import focus_attention
from focus_attn.config import FocusConfig
from focus_attn.model import FocusModel, get_focus_model
from focus_attn.router import Router, Routing
from focus_attn.version import __version__
from focus_attn.zoo import load_default_model

__all__ = [
    "FocusConfig",
    "FocusModel",
    "Router",
    "Routing",
    "__version__",
    "focus_attention",
    "get_focus_model",
    "load_default_model",
]
