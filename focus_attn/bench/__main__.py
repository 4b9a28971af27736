"""`python -m focus_attn.bench` is `focus bench`."""

from focus_attn.cli import bench

bench(prog_name="python -m focus_attn.bench")
