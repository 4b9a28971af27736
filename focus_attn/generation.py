"""Text from a prompt, streamed: what `focus generate` does."""

from __future__ import annotations

from typing import Any

import torch

from focus_attn.pretrained import load_with_adapter
from focus_attn.zoo import quiet_transformers


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

    model, tokenizer = load_with_adapter(model_name, adapter)
    inputs = encode(tokenizer, prompt, chat).to(next(model.parameters()).device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
        torch.manual_seed(seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with torch.no_grad(), quiet_transformers():
        model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)


def encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    """Token ids of the prompt, as a user's turn where the tokenizer knows how a chat looks."""
    if chat and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return tokenizer(prompt, return_tensors="pt")
