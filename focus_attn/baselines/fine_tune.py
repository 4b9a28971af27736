"""The trained peers that keep every pair: LoRA (Hu et al. 2021, arXiv 2106.09685), DoRA (Liu et al. 2024, arXiv
2402.09353), both through peft, and full fine-tuning.

One plain loop: AdamW, warm-up and cosine decay, bf16 autocast on CUDA, next-token loss on blocks of tokens. The cost of
their attention is that of full attention. Inside `use_baseline(...)` the same loop adapts a model to a sparse method.
"""

from __future__ import annotations

import hashlib
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from focus_attn.model import FocusModel
from focus_attn.progress import Count
from focus_attn.training.token_losses import Head, next_token_loss
from focus_attn.zoo import cast_parameters

Tuning = Literal["lora", "dora", "full"]


class DivergedError(ValueError):
    """A loss that is no number: the learning rate was too high for this model and method."""


@dataclass(frozen=True)
class FineTuned:
    """A trained model (a PeftModel for LoRA and DoRA) and how it got there."""

    model: nn.Module
    parameters: int  # trained
    losses: list[float]  # of every step


def fine_tune(
    model: nn.Module,
    blocks: Tensor,
    *,
    method: Tuning,
    steps: int = 200,
    lr: float = 1e-4,
    rank: int = 16,
    length: int | None = None,
    sequences: int = 8,
    micro_batch: int | None = None,
    warmup: float = 0.05,
    target_modules: list[str] | str | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 500,
    progress: Count | None = None,
) -> FineTuned:
    """Train `model`, a transformers causal LM, on `blocks` [N, T] of tokens. It is changed in place.

    Args:
        length: cut the blocks to sequences of this many tokens; by default they are taken whole.
        sequences: in a step.
        micro_batch: of them, at most, in one forward; the gradient is that of the whole step. By default all at once.
        warmup: share of the steps over which the learning rate rises to `lr`; then it falls to 0 along a cosine.
        target_modules: what LoRA and DoRA adapt; by default what peft names for the architecture.
        checkpoint: a file to go on from when it is there, written every `save_every` steps and at the end.
    """
    if isinstance(model, FocusModel):
        raise ValueError(
            "`fine_tune` trains a base model: give it `model.unload()`; routers are trained by `focus train`"
        )
    together = sequences if micro_batch is None else micro_batch
    if min(steps, sequences, rank, together) < 1:
        raise ValueError(
            "`steps`, `sequences`, `rank` and `micro_batch` must be at least 1, got "
            f"{steps}, {sequences}, {rank} and {together}"
        )
    data = _sequences(blocks, length)
    dtype = next(model.parameters()).dtype
    torch.manual_seed(seed)  # of the adapters' start
    trained, lm = _prepare(model, method, rank, target_modules)
    parameters = [p for p in trained.parameters() if p.requires_grad]
    device = parameters[0].device
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda" or None
    )
    losses: list[float] = []
    path = None if checkpoint is None else Path(checkpoint)
    settings: dict[str, Any] = {}  # what a checkpoint is known by
    if path is not None:
        settings = {"method": method, "steps": steps, "lr": lr, "sequences": sequences, "warmup": warmup, "seed": seed}
        settings["rank"] = None if method == "full" else rank
        settings["data"] = hashlib.sha256(data.cpu().numpy().tobytes()).hexdigest()
        if path.exists():
            losses = _restore(path, parameters, optimizer, settings)
    trained.eval()  # no dropout, which attention functions of our own do not have; routers are trained so too
    for step in range(len(losses), steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * _schedule(step, steps, warmup)
        ids = data[_batch(len(data), step, sequences, seed)].to(device)
        loss = sum(_backward(lm, some, len(some) / sequences) for some in ids.split(together))
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
        if not math.isfinite(losses[-1]):
            raise DivergedError(f"the loss of {method} became {losses[-1]} at step {step + 1}: lower `lr` ({lr})")
        last = step + 1 == steps
        if last and not all(bool(p.isfinite().all()) for p in parameters):  # no later loss would say so
            raise DivergedError(f"the last step of {method} left weights that are no numbers: lower `lr` ({lr})")
        due = last or (step + 1) % save_every == 0
        try:
            if progress:
                progress(step + 1, steps)
        except BaseException:  # the time is up: what was done so far is not to be done again
            due = True
            raise
        finally:
            if path is not None and due:
                _save(path, parameters, optimizer, losses, settings)
    if method == "full":
        cast_parameters(trained.parameters(), dtype)
    return FineTuned(trained, sum(p.numel() for p in parameters), losses)


def _prepare(
    model: nn.Module, method: Tuning, rank: int, target_modules: list[str] | str | None
) -> tuple[nn.Module, nn.Module]:
    """(what is trained, the language model in it)."""
    if method == "full":
        # In fp32, where small steps are not rounded away.
        return model.float().requires_grad_(True), model
    if method not in ("lora", "dora"):
        raise ValueError(f'`method` must be "lora", "dora" or "full", got {method!r}')
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError(f"{method} comes from peft: `pip install peft`") from error
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, use_dora=method == "dora", target_modules=target_modules, task_type="CAUSAL_LM"
    )
    peft_model = get_peft_model(model, config)  # type: ignore[arg-type]
    return peft_model, peft_model.get_base_model()


def _backward(lm: Any, ids: Tensor, weight: float) -> Tensor:
    """Add the gradient of the mean loss times `weight`, the sequences' part of the step. -> that product."""
    with torch.autocast("cuda", torch.bfloat16) if ids.is_cuda else nullcontext():
        loss = weight * _loss(lm, ids)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _loss(lm: Any, ids: Tensor) -> Tensor:
    answer = lm.get_decoder()(input_ids=ids, use_cache=False)
    hidden = answer.last_hidden_state[:, :-1].flatten(0, 1)
    return next_token_loss(Head(lm, answer), hidden, ids[:, 1:].flatten())


def _sequences(blocks: Tensor, length: int | None) -> Tensor:
    if blocks.dim() != 2 or blocks.dtype != torch.int64 or not len(blocks):
        raise ValueError(f"`blocks` must be int64 tokens [N, T], got {list(blocks.shape)} of {blocks.dtype}")
    length = length or blocks.shape[1]
    if not 2 <= length <= blocks.shape[1]:
        raise ValueError(f"`length` must be from 2 to the blocks' {blocks.shape[1]} tokens, got {length}")
    whole = blocks.shape[1] // length * length
    return blocks[:, :whole].reshape(-1, length)


def _batch(number: int, step: int, sequences: int, seed: int) -> Tensor:
    """Which sequences a step takes: epochs of shuffled data, a function of the step alone."""
    places = torch.arange(step * sequences, (step + 1) * sequences)
    orders = {
        int(epoch): torch.randperm(number, generator=torch.Generator().manual_seed(seed * 100_003 + int(epoch)))
        for epoch in (places // number).unique()
    }
    return torch.stack([orders[int(place // number)][place % number] for place in places])


def _schedule(step: int, steps: int, warmup: float) -> float:
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def _save(
    path: Path,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    settings: dict[str, Any],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    state = {"parameters": parameters, "optimizer": optimizer.state_dict(), "losses": losses, "settings": settings}
    torch.save(state, partial)
    partial.replace(path)


@torch.no_grad()
def _restore(
    path: Path, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> list[float]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    shapes = [[p.shape for p in some] for some in (state["parameters"], parameters)]
    if shapes[0] != shapes[1] or state.get("settings", settings) != settings:  # older ones say nothing
        raise ValueError(f"{path} holds a run with other settings: delete it, or give another `checkpoint`")
    for parameter, saved in zip(parameters, state["parameters"], strict=True):
        parameter.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    return list(state["losses"])
