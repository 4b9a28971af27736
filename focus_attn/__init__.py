"""Focus: sparse attention for pretrained causal LMs, by learning which token pairs matter."""

from typing import TYPE_CHECKING

from focus_attn.lazy import lazily
from focus_attn.version import __version__

if TYPE_CHECKING:
    from focus_attn.attention import focus_attention
    from focus_attn.config import FocusConfig
    from focus_attn.model import FocusModel, get_focus_model
    from focus_attn.router import Router, Routing
    from focus_attn.zoo import load_default_model
else:
    __getattr__ = lazily(
        __name__,
        {
            "FocusConfig": "config",
            "FocusModel": "model",
            "Router": "router",
            "Routing": "router",
            "focus_attention": "attention",
            "get_focus_model": "model",
            "load_default_model": "zoo",
        },
    )

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


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
