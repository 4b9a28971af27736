"""A FocusModel for lm-eval's own evaluator, for the tasks that `focus eval` does not know."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from focus_attn.model import FocusModel


def as_lm_eval_model(model: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
    """lm-eval's `HFLM` around a FocusModel (or any causal LM), for `lm_eval.simple_evaluate(model=...)`.

    Args:
        options: of HFLM, such as `batch_size` and `max_length`.
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        raise ImportError("this needs lm-eval: pip install 'lm-eval[hf]' datasets") from None
    if isinstance(model, FocusModel) and model.focus_config.leaks_future():
        raise ValueError("the routing of this adapter sees later tokens (`paper_leaky`): its scores would mean nothing")
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", **options)
