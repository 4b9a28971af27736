"""From a text to what a recipe reads of it: the tokens of all stages, blocks to evaluate on, blocks to start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from focus_attn.model import FocusModel
from focus_attn.progress import Progress
from focus_attn.training.blocks import Blocks, cut_blocks
from focus_attn.training.data import check_vocabulary, open_tokens
from focus_attn.training.recipe import Recipe, Start
from focus_attn.training.repeats import repeat_passages
from focus_attn.training.token_store import TokenStore


def open_text(
    source: Any, tokenizer: Any, recipe: Recipe, model: FocusModel, progress: Progress | None
) -> tuple[TokenStore, Tensor]:
    """The tokens to train on and the blocks to evaluate on, which share nothing."""
    data, length = recipe.data, recipe.served_length
    aside = data.held_out * length if recipe.evaluate_every and data.held_out_text is None else 0
    start = 0 if recipe.start is None else recipe.start.blocks * recipe.start.length
    wanted = max((stage.tokens for stage in recipe.stages), default=0) + start + aside
    store = open_tokens(source, tokenizer, data, limit=wanted, progress=progress)
    vocabulary = model.base_model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    check_vocabulary(store, tokenizer, vocabulary)
    if not recipe.evaluate_every or not data.held_out:
        return store, _no_blocks(length)
    if data.held_out_text is None:
        store, held_out = store.split_off(length, data.held_out)
    else:
        held_out = open_tokens(data.held_out_text, tokenizer, data, limit=data.held_out * length, progress=progress)
        check_vocabulary(held_out, tokenizer, vocabulary)
    if not len(held_out.documents):
        return store, _no_blocks(length)
    return store, cut_blocks(held_out, length, packing=False, shortest=length).rows(data.held_out)


def cut(store: TokenStore, length: int, recipe: Recipe, where: str) -> Blocks:
    """where: the part of the recipe that asks for blocks of this length, for an error to name."""
    assert recipe.focus is not None
    try:
        return cut_blocks(store, length, packing=recipe.data.packing, shortest=recipe.focus.window + 2)
    except ValueError as error:
        raise ValueError(f"`{where}`: {error}") from None


def check_answers(recipe: Recipe, stages: Sequence[Blocks]) -> None:
    """ValueError where a stage counts answers and its blocks have none."""
    for index, (stage, blocks) in enumerate(zip(recipe.stages, stages, strict=True)):
        if not stage.step_options().answer_weight or blocks.answers:
            continue
        where, name = f"`stages[{index}].options.answer_weight` counts answers", blocks.store.name
        if blocks.store.answers is None:
            raise ValueError(
                f"{where}, and {name} marks none: give rows of `prompt` and `completion`, or of `input_ids` and "
                "`completion_mask`, or leave it out"
            )
        assert recipe.focus is not None
        mend = (
            f"packed blocks leave out rows of fewer than {recipe.focus.window + 2:,} tokens (`window` and two more): "
            "give longer ones"
            if recipe.data.packing
            else "what fills no block is dropped, so set `data.packing: true`, or give rows of whole blocks"
        )
        raise ValueError(
            f"{where}, and none of those that {name} marks is in a block of {blocks.length:,} tokens: {mend}"
        )


def blocks_to_start_from(store: TokenStore, recipe: Recipe, start: Start) -> Tensor:
    """[blocks, T]; none where the start looks at no text."""
    assert recipe.focus is not None
    if start.how == "random":
        return _no_blocks(start.length)
    blocks = cut(store, start.length, recipe, "start").rows(start.blocks)
    if not len(blocks):
        raise ValueError(
            f"`start`: no document reaches {start.length:,} tokens, the longest has {store.longest:,}: lower "
            "`length`, or take `how: random`"
        )
    if start.repeats:
        generator = torch.Generator().manual_seed(recipe.seed)
        how = start.repeats, recipe.focus.window + 1, generator, len(store.begin)
        blocks = torch.stack([repeat_passages(ids, None, *how) for ids in blocks])
    return blocks


def _no_blocks(length: int) -> Tensor:
    return torch.empty(0, length, dtype=torch.int64)
