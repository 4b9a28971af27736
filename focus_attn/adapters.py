"""An adapter on disk: `focus_config.json` beside `focus_model.safetensors`, routers only."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from focus_attn.base_sample import is_same, sample_of, sample_of_files
from focus_attn.config import FocusConfig
from focus_attn.hf import text_config
from focus_attn.layer import LayerSpec, check_layers
from focus_attn.version import __version__

CONFIG_FILE = "focus_config.json"
WEIGHTS_FILE = "focus_model.safetensors"
BASE_FOLDER = "base_model"  # beside them, where the model's own weights were trained with the routers
FORMAT_VERSION = 1
ADAPTERS = Path(__file__).parent / "adapters"  # those that ship with the package


@dataclass(frozen=True)
class BaseModel:
    """The model an adapter was made for. The name is for people; the rest must match."""

    name: str
    model_type: str
    hidden_size: int
    num_layers: int


@dataclass(frozen=True)
class Adapter:
    config: FocusConfig
    base: BaseModel
    tensors: dict[str, Tensor]  # layers.<index>.<projection | centroids | bias>


def write_adapter(adapter: Adapter, folder: str | os.PathLike[str]) -> None:
    """Each file appears whole or not at all; the config names the weights it belongs to by their digest."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"an adapter is saved into a folder, but {str(folder)!r} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    weights = save_safetensors(tensors, metadata={"format": "pt"})
    described = {
        "format_version": FORMAT_VERSION,
        "library_version": __version__,
        "base_model": vars(adapter.base),
        "config": adapter.config.to_dict(),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    _write_atomically(folder / WEIGHTS_FILE, weights)
    _write_atomically(folder / CONFIG_FILE, (json.dumps(described, indent=2) + "\n").encode())


def _write_atomically(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp makes private files; an adapter is to be shared
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def available_adapters() -> list[str]:
    """Names of the adapters that ship with the package."""
    return sorted(folder.parent.name for folder in ADAPTERS.glob(f"*/{CONFIG_FILE}"))


def named_adapters() -> str:
    """The same, for a sentence."""
    return ", ".join(map(repr, available_adapters())) or "none in this version"


def read_adapter(source: str | os.PathLike[str], **hub_options: Any) -> Adapter:
    """From a folder, or by name: a shipped one, or one on the Hugging Face Hub. Whatever is wrong is a ValueError."""
    source = _folder_if_shipped(source)
    config_path, weights_path = (_locate(source, name, hub_options) for name in (CONFIG_FILE, WEIGHTS_FILE))
    described = _read_json(config_path)
    version = described.get("format_version")
    if not isinstance(version, int):
        raise ValueError(f"{config_path} is not a Focus config: it has no integer `format_version`")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{config_path} has format version {version}, this focus-attn {__version__} reads up to "
            f"{FORMAT_VERSION}: upgrade with `pip install -U focus-attn`"
        )
    try:
        config = FocusConfig.from_dict(described["config"])
        base = BaseModel(**described["base_model"])
        digest = described["weights_sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{config_path} is not a valid Focus config: {error}") from error
    content = weights_path.read_bytes()
    try:
        tensors = load_safetensors(content)
    except Exception as error:  # safetensors raises its own type, which is no ValueError
        raise ValueError(f"{weights_path} is not a whole safetensors file ({error}): copy it again") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{weights_path} is not the file that {config_path.name} was saved with: copy both again")
    return Adapter(config, base, tensors)


def _folder_if_shipped(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """A word may be the name of a folder that someone saved to, which then goes first; but not silently."""
    if source not in available_adapters():
        return source
    if not (Path(source) / CONFIG_FILE).is_file():
        return ADAPTERS / source
    warnings.warn(
        f"{source!r} is read from the folder of that name here, not from the adapter that ships with Focus: write "
        f"'./{source}' to say so, or `focus_attn.zoo.find_adapter({source!r})` for the shipped one",
        UserWarning,
        stacklevel=4,
    )
    return source


def is_hub_name(name: str) -> bool:
    """Whether it could be `owner/name` on the Hub: one slash, and no path by its beginning."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def find_on_hub(name: str) -> Path:
    """The folder where an adapter's files are, once both came from the Hub. What does not come is a ValueError."""
    config, _ = (_locate(name, file, {}) for file in (CONFIG_FILE, WEIGHTS_FILE))
    return config.parent


def _locate(source: str | os.PathLike[str], name: str, hub_options: dict[str, Any]) -> Path:
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"an adapter is a folder, or the name of one; got {type(source).__name__}")
    folder = Path(source)
    if folder.is_dir():
        if not (folder / name).is_file():
            raise ValueError(f"{str(folder)!r} holds no Focus adapter: {name} is missing")
        return folder / name
    if folder.exists() or not is_hub_name(str(source)):
        raise ValueError(
            f"no adapter folder at {str(source)!r}; what is read by its name is a shipped adapter "
            f"({named_adapters()}) or `owner/name` on the Hugging Face Hub"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(source), name, **hub_options))
    except Exception as error:  # one of many: offline, no such repository, no such file, no access
        raise ValueError(
            f"no adapter folder at {str(source)!r}, and {name} did not come from the Hugging Face Hub: {error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy it again") from error
    if not isinstance(described, dict):
        raise ValueError(f"{path} is not a Focus config: expected a JSON object")
    return described


def describe_base(model: nn.Module) -> BaseModel:
    config = text_config(model)
    name = getattr(model.config, "_name_or_path", "") or config._name_or_path  # type: ignore[union-attr]
    return BaseModel(name, config.model_type, config.hidden_size, config.num_hidden_layers)


def check_own_base(source: str | os.PathLike[str], model: nn.Module) -> None:
    """An adapter that was trained together with its model fits that one alone, which stands in a folder beside it."""
    own = Path(source) / BASE_FOLDER
    if not own.is_dir():
        return
    saved, here = sample_of_files(own), sample_of(model.named_parameters())
    comparable = saved.keys() & here.keys() or not here  # of a model that is offloaded whole nothing can be told
    if not saved or not comparable or not is_same(saved, here):
        raise ValueError(f"this adapter was trained together with its model: use the one in {str(own)!r} (--model)")


def adapter_digest(folder: Path) -> str:
    """What tells one saved adapter from another: the adapter itself, not what a run wrote beside it."""
    files = (folder / CONFIG_FILE, folder / WEIGHTS_FILE)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def digest_of_tensors(adapter: Adapter) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(adapter.tensors.items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def tensor_name(layer_idx: int, key: str) -> str:
    """The name in the file of a tensor of a layer's router."""
    return f"layers.{layer_idx}.{key}"


def check_fits(adapter: Adapter, base: BaseModel, specs: list[LayerSpec]) -> None:
    """ValueError unless the adapter was made for a model like this and holds exactly what its config makes on it."""
    for field in ("model_type", "hidden_size", "num_layers"):
        theirs, ours = getattr(adapter.base, field), getattr(base, field)
        if theirs != ours:
            raise ValueError(
                f"this adapter was made for {adapter.base.name or 'a model'} with `{field}` {theirs!r}; "
                f"this one has {ours!r}"
            )
    check_layers(adapter.config, specs, base.num_layers)
    expected = _expected_shapes(adapter.config, specs, base.num_layers)
    missing, foreign = sorted(set(expected) - set(adapter.tensors)), sorted(set(adapter.tensors) - set(expected))
    if missing or foreign:
        raise ValueError(
            f"the adapter's tensors are not those of its config: missing {missing[:3]}, unexpected {foreign[:3]}"
        )
    for name, shape in expected.items():
        tensor = adapter.tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"tensor {name!r} has shape {list(tensor.shape)}, this model needs {list(shape)}")
        if tensor.dtype != torch.float32:
            raise ValueError(f"tensor {name!r} is {tensor.dtype}; routers are float32")
    check_finite(adapter)


def served_with(
    adapter: Adapter, changes: Mapping[str, Any] | None, base: BaseModel, specs: list[LayerSpec]
) -> Adapter:
    """The same routers, checked, under a config with some of its fields changed: whatever they are enough for."""
    check_fits(adapter, base, specs)
    if not changes:
        return adapter
    if not isinstance(changes, Mapping):
        raise TypeError(f"`changes` are fields of a FocusConfig and their values, got {changes!r}")
    num_layers, before = base.num_layers, adapter.config
    config = FocusConfig.from_dict({**before.to_dict(), **changes})
    dense = {index % num_layers for index in config.dense_layers}
    if "dense_heads" not in changes:  # those of layers that are dense as a whole now need no mention
        config = replace(
            config, dense_heads=tuple(one for one in before.dense_heads if one[0] % num_layers not in dense)
        )
    check_layers(config, specs, num_layers)
    opened, now = ({(layer % num_layers, head) for layer, head in c.dense_heads} for c in (before, config))
    if closed := sorted(one for one in opened - now if one[0] not in dense):
        raise ValueError(
            f"`changes` cannot take {list(closed[0])} out of `dense_heads`: its router may be untrained. Name it too"
        )
    shapes = _expected_shapes(config, specs, num_layers)
    if missing := sorted(set(shapes) - set(adapter.tensors)):
        raise ValueError(f"`changes` would route layer {missing[0].split('.')[1]}, where this adapter has no router")
    if any(adapter.tensors[name].shape != shape for name, shape in shapes.items()):
        raise ValueError(f"`changes` ({', '.join(changes)}) ask for routers of another shape: train them with it")
    return replace(adapter, config=config, tensors={name: adapter.tensors[name] for name in shapes})


def check_finite(adapter: Adapter) -> None:
    for name, tensor in adapter.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"tensor {name!r} holds NaN or infinite values")


def _expected_shapes(config: FocusConfig, specs: list[LayerSpec], num_layers: int) -> dict[str, torch.Size]:
    shapes = {}
    for spec in specs:
        if spec.is_routed(config, num_layers):
            router = spec.new_router(config, num_layers, "meta")
            for key, tensor in router.state_dict().items():
                shapes[tensor_name(spec.layer_idx, key)] = tensor.shape
    return shapes
