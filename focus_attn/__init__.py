"""Focus: sparse attention for pretrained causal LMs, by learning which token pairs matter."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from focus_attn.version import __version__

if TYPE_CHECKING:
    from focus_attn.attention import focus_attention
    from focus_attn.config import FocusConfig
    from focus_attn.model import FocusModel, get_focus_model
    from focus_attn.router import Router, Routing
    from focus_attn.zoo import load_default_model
else:
    _HOMES = {
        "FocusConfig": "config",
        "FocusModel": "model",
        "Router": "router",
        "Routing": "router",
        "focus_attention": "attention",
        "get_focus_model": "model",
        "load_default_model": "zoo",
    }

    def __getattr__(name: str) -> Any:
        """When it is first asked for: torch and transformers take seconds, and `focus --help` needs neither."""
        if name in _HOMES:
            found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        elif "." not in name and find_spec(f"{__name__}.{name}") is not None:
            found = import_module(f"{__name__}.{name}")  # `focus_attn.training` after `import focus_attn` alone
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

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
