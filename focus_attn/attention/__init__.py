"""focus_attention(): validate, choose a backend, run."""

from focus_attn.attention.api import focus_attention
from focus_attn.attention.backends import BACKENDS, choose_backend

__all__ = ["BACKENDS", "choose_backend", "focus_attention"]
