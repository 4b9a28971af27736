"""What Focus is compared with, each as a routing that takes the router's place: `model.override_routing(...)`."""

from focus_attn.baselines.random_groups import RandomGroups
from focus_attn.baselines.window_sinks import window_and_sinks

__all__ = ["RandomGroups", "window_and_sinks"]
