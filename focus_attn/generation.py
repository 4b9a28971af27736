"""Text from a prompt, streamed: what `focus generate` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from focus_attn.model import FocusModel
from focus_attn.zoo import find_adapter, load_default_model, naming, quiet_transformers


def stream(
    prompt: str,
    adapter: str | None,
    model_name: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    chat: bool,
) -> None:
    """Print the continuation of `prompt` to stdout as it is made."""
    from transformers import TextStreamer

    model, tokenizer = load(model_name, adapter)
    inputs = encode(tokenizer, prompt, chat).to(next(model.parameters()).device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
        torch.manual_seed(seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with torch.no_grad(), quiet_transformers():
        model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)


def load(model_name: str | None, adapter: str | Path | None, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """The model, with the adapter on it if there is one, and its tokenizer.

    dtype: of the weights, by default that of the model. To cast a loaded model would round its buffers too, and rotary
    frequencies in half precision lose far positions.
    """
    if model_name is None:
        return load_default_model(adapter=adapter, dtype=dtype or torch.float32)
    folder = None if adapter is None else find_adapter(adapter)  # before the model, which takes longer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local = Path(model_name).is_dir()
    with quiet_transformers(), naming(model_name):
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype or "auto", local_files_only=local)
        tokenizer = AutoTokenizer.from_pretrained(model_name, local_files_only=local)
    return (model if folder is None else FocusModel.from_pretrained(model, str(folder))), tokenizer


def encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    """Token ids of the prompt, as a user's turn where the tokenizer knows how a chat looks."""
    if chat and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return tokenizer(prompt, return_tensors="pt")
