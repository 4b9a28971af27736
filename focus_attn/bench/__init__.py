"""Speed, measured on the machine at hand."""

from focus_attn.bench.dtype import fastest_dtype
from focus_attn.bench.layer import AttentionShape, time_attention
from focus_attn.bench.prefill import time_prefill
from focus_attn.bench.record import describe_run, write_json
from focus_attn.bench.timing import Timing, crossover, describe_crossover

__all__ = [
    "AttentionShape",
    "Timing",
    "crossover",
    "describe_crossover",
    "describe_run",
    "fastest_dtype",
    "time_attention",
    "time_prefill",
    "write_json",
]
