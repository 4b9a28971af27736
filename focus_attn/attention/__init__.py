"""focus_attention(): validate, choose a backend, run."""

from focus_attn.attention.api import BACKENDS, choose_backend, focus_attention

__all__ = ["BACKENDS", "choose_backend", "focus_attention"]
