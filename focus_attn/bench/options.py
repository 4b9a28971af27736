"""What `focus bench attention` is asked to measure, read from what a user typed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from focus_attn.attention.backends import BACKENDS
from focus_attn.bench.dtype import fastest_dtype
from focus_attn.bench.groups import Ids, drawing
from focus_attn.bench.peers import FLEX, NAMES, default_names
from focus_attn.bench.setting import Setting, Shape
from focus_attn.config import FocusConfig, RouterScope

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Passes = Literal["forward", "forward+backward", "both"]

# One layer of Llama-3-8B on a GPU, one of SmolLM2-135M, the embedded model, on a CPU.
DEFAULT_HEADS = {"cuda": (32, 8, 128), "cpu": (9, 3, 64)}
DEFAULT_LENGTHS = {"cuda": (4096, 8192, 16384, 65536, 262144), "cpu": (1024, 2048, 4096, 8192, 16384)}
DEFAULT_SECONDS = {"cuda": 300.0, "cpu": 60.0}
DEFAULT_REPEATS = {"cuda": 11, "cpu": 3}


@dataclass(frozen=True)
class AttentionOptions:
    """A sweep: every length, K, pass and backend, in one shape."""

    shape: Shape
    lengths: tuple[int, ...]
    settings: tuple[Setting, ...]  # one for each K and backend
    passes: tuple[bool, ...]  # with backward?
    peers: tuple[str, ...]
    repeats: int
    seconds: float
    skew: str
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """What every row has in common, as plain JSON values."""
        setting = self.settings[0]
        return {
            "heads": self.shape.heads,
            "kv_heads": self.shape.kv_heads,
            "width": self.shape.width,
            "batch": 1,
            "dtype": str(self.shape.dtype).removeprefix("torch."),
            "device": self.shape.device.type,
            "window": setting.window,
            "sinks": setting.num_sinks,
            "routers": setting.ids.routers,
            "shared_ids": setting.ids.shared,
            "skew": self.skew,
            "seed": self.seed,
        }


def read_options(
    lengths: str | None = None,
    groups: str = "8",
    query_k: int = 1,
    key_k: int = 1,
    heads: int | None = None,
    kv_heads: int | None = None,
    width: int | None = None,
    dtype: str = "auto",
    window: int = 128,
    sinks: int = 4,
    routers: str = "auto",
    shared: bool = False,
    skew: str = "uniform",
    passes: str = "forward",
    backend: str = "auto",
    peers: str | None = None,
    repeats: int | None = None,
    seconds: float | None = None,
    device: str | None = None,
    seed: int = 0,
) -> AttentionOptions:
    """Options as typed, checked, with the defaults of the device; a ValueError says how to mend one."""
    place = read_device(device)
    shape = _read_shape(heads, kv_heads, width, read_dtype(dtype, place), place)
    for name, value, lowest in (("window", window, 0), ("sinks", sinks, 0), ("repeats", repeats, 1)):
        if value is not None and value < lowest:
            raise ValueError(f"--{name} must be at least {lowest}, got {value}")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"--seconds must be positive, got {seconds:g}")
    scope: Any = _one_of("routers", routers, get_args(RouterScope))
    num_routers = FocusConfig(router_scope=scope).num_routers(shape.kv_heads)
    backends = _names("backend", backend, ("auto", *BACKENDS))
    settings = []
    for num_groups in read_numbers("groups", groups):
        ids = Ids(num_groups, query_k, key_k, num_routers, shared)
        settings += [Setting(shape, ids, window, sinks, drawing(skew, ids), name) for name in backends]
    chosen_passes = _one_of("pass", passes, get_args(Passes))
    chosen_peers = default_names(place) if peers is None else _names("peers", peers, NAMES)
    if set(chosen_peers) <= {FLEX}:
        raise ValueError("--peers needs a dense one beside flex: every ratio is over the fastest dense attention")
    return AttentionOptions(
        shape,
        tuple(sorted(read_numbers("lengths", lengths))) if lengths else DEFAULT_LENGTHS[place.type],
        tuple(settings),
        {"forward": (False,), "forward+backward": (True,), "both": (False, True)}[chosen_passes],
        chosen_peers,
        repeats or DEFAULT_REPEATS[place.type],
        seconds or DEFAULT_SECONDS[place.type],
        skew,
        seed,
    )


def read_device(device: str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"--device must be cpu or cuda, got {device!r}") from None
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda: those are the clocks it has, got {device!r}")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA device here; leave the option out to measure on the CPU")
    if place.type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)  # events and kernels go to the current device
    return place


def read_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else fastest_dtype(device)
    return DTYPES[_one_of("dtype", dtype, ("auto", *DTYPES))]


def read_numbers(name: str, text: str) -> tuple[int, ...]:
    """ "4096,8K,1M" -> (4096, 8192, 1048576), without repeats."""
    numbers = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)([kKmM]?)\s*", part)
        if match is None or int(match[1]) == 0:
            raise ValueError(f"--{name} takes whole numbers above 0 with commas between, as in 8,16, got {text!r}")
        numbers.append(int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()])
    return tuple(dict.fromkeys(numbers))


def _read_shape(
    heads: int | None, kv_heads: int | None, width: int | None, dtype: torch.dtype, device: torch.device
) -> Shape:
    default_heads, default_kv_heads, default_width = DEFAULT_HEADS[device.type]
    if kv_heads is None:
        kv_heads = default_kv_heads if heads is None else heads
    heads = default_heads if heads is None else heads
    width = default_width if width is None else width
    for name, value in (("heads", heads), ("kv-heads", kv_heads), ("width", width)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if heads % kv_heads:
        raise ValueError(f"--heads ({heads}) must be a multiple of --kv-heads ({kv_heads})")
    return Shape(heads, kv_heads, width, dtype, device)


def _names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_one_of(option, part.strip(), known) for part in text.split(",")))


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"--{option} must be one of {', '.join(known)}, got {value!r}")
    return value
