"""A pretrained model by its name: one of the two that come in wheels, a folder, or whatever is on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from focus_attn import gemma
from focus_attn.model import FocusModel
from focus_attn.zoo import MODEL_NAME, default_model_folder, find_adapter, quiet_transformers

DEFAULT, GEMMA = "default", "gemma3-270m"


@dataclass(frozen=True)
class Pretrained:
    """A model that can be loaded."""

    name: str  # an adapter notes its base by it: the cache folder of one user would mean nothing to another
    source: str  # a folder, or a name on the hub

    @property
    def in_wheel(self) -> bool:
        """Whether it was converted into the cache folder, which nobody needs to hear of."""
        return self.source != self.name

    def load(self, dtype: torch.dtype | None = None, **options: Any) -> tuple[Any, Any]:
        """The model in eval mode, and its tokenizer.

        dtype: of the weights, by default that of the files. To cast a loaded model would round its buffers too, and
            rotary frequencies in half precision lose far positions.
        """
        from transformers import AutoModelForCausalLM

        model = self._read(AutoModelForCausalLM, "model", dtype=dtype or "auto", **options).eval()
        model.config._name_or_path = model.name_or_path
        return model, self.tokenizer()

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return self._read(AutoTokenizer, "tokenizer")

    def config(self) -> Any:
        from transformers import AutoConfig

        return self._read(AutoConfig, "model")

    def with_fresh_weights(self, seed: int) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)

    def _read(self, kind: Any, what: str, **options: Any) -> Any:
        local = Path(self.source).is_dir()
        try:
            with quiet_transformers():
                read = kind.from_pretrained(self.source, local_files_only=local, **options)
        except (OSError, ValueError) as error:  # a wrong name, a missing file, a silent network, all alike
            where = "its files" if local else "it is no folder here, and from the Hugging Face Hub"
            raise ValueError(f"no {what} {self.name!r}: {where}: {' '.join(str(error).split())}") from error
        read.name_or_path = self.name
        return read


def find_pretrained(name: str | None) -> Pretrained:
    """By name: None or "default" (SmolLM2-135M-Instruct), "gemma3-270m", a folder, or a name on the hub.

    Those in wheels are converted now, if they have not been.
    """
    if name in (None, DEFAULT):
        return Pretrained(MODEL_NAME, str(default_model_folder()))
    if name == GEMMA:
        return Pretrained(gemma.MODEL_NAME, str(gemma.gemma_folder()))
    return Pretrained(name, name)


def load_with_adapter(
    name: str | None, adapter: str | Path | None, dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """The model, with the adapter on it if there is one, and its tokenizer."""
    folder = None if adapter is None else find_adapter(adapter)  # before the model, which takes longer
    model, tokenizer = find_pretrained(name).load(dtype)
    return (model if folder is None else FocusModel.from_pretrained(model, str(folder))), tokenizer
