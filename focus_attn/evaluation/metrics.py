"""From scores to metrics, item by item: what each kind of task counts as right, and what guessing would give.

The definitions are lm-eval's; a test compares them with it. Nothing here needs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from focus_attn.evaluation.requests import Item
from focus_attn.evaluation.score_file import Score

Values = dict[str, float]  # by the metric's name; the first is the task's main one
LOWER_IS_BETTER = {"perplexity", "bits_per_byte"}
FROM_LOSSES = {"perplexity"}  # an item's value is its mean loss; what is shown is the exponential of the mean


def choice(item: Item, score: Score) -> Values:
    """The likeliest of several continuations; `acc_norm`: by log p for each character."""
    sums = [log_prob for log_prob, _ in score["scores"]]
    by_length = [log_prob / max(1, n) for log_prob, n in zip(sums, item.answer["characters"], strict=True)]
    right = {
        "acc": float(_argmax(sums) == item.answer["gold"]),
        "acc_norm": float(_argmax(by_length) == item.answer["gold"]),
    }
    return {name: right[name] for name in item.answer.get("metrics", ("acc", "acc_norm"))}


def probability_of_true(item: Item, score: Score) -> Values:
    """TruthfulQA MC2: the share of the probability that the true answers get."""
    sums = [log_prob for log_prob, _ in score["scores"]]
    weights = [math.exp(log_prob - max(sums)) for log_prob in sums]
    true = sum(weight for weight, label in zip(weights, item.answer["labels"], strict=True) if label)
    return {"acc": true / sum(weights)}


def last_word(item: Item, score: Score) -> Values:
    """LAMBADA: greedy decoding gives the word; and its perplexity."""
    ((log_prob, greedy),) = score["scores"]
    return {"acc": float(greedy), "perplexity": -log_prob}


def exact_continuation(item: Item, score: Score) -> Values:
    """Greedy decoding gives the expected tokens. One forward over them tells: it does so if and only if every token is
    the likeliest after the right ones before it."""
    ((_, greedy),) = score["scores"]
    return {"recall": float(greedy)}


def found_strings(item: Item, score: Score) -> Values:
    """The share of the expected strings that the generated text has."""
    wanted = item.answer["strings"]
    return {"recall": sum(string in score["text"] for string in wanted) / len(wanted)}


def final_number(item: Item, score: Score) -> Values:
    """GSM8K: the number behind "####" (strict), or the last number there is (flexible)."""
    text, gold = score["text"], _plain_number(item.answer["answer"])
    strict = re.findall(r"#### (\-?[0-9\.\,]+)", text)
    flexible = [first or second for first, second in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)]
    return {
        "strict": float(bool(strict) and _plain_number(strict[0]) == gold),
        "flexible": float(bool(flexible) and _plain_number(flexible[-1].strip()) == gold),
    }


def text_losses(item: Item, score: Score) -> Values:
    """Mean loss of the predictions from position `first` on, for perplexity, and bits for each byte that they spell."""
    loss = sum(score["losses"][item.options["edges"].index(item.answer["first"]) :])
    return {
        "perplexity": loss / weight(item, "perplexity"),
        "bits_per_byte": loss / math.log(2) / weight(item, "bits_per_byte"),
    }


MEASURES: dict[str, Callable[[Item, Score], Values]] = {
    measure.__name__: measure
    for measure in (
        choice,
        probability_of_true,
        last_word,
        exact_continuation,
        found_strings,
        final_number,
        text_losses,
    )
}


def chance(item: Item, measure: str) -> float | None:
    """What guessing gives on this item's main metric; None where that has no meaning."""
    if measure == "choice":
        return 1 / len(item.answer["characters"])
    if measure == "probability_of_true":
        return sum(item.answer["labels"]) / len(item.answer["labels"])
    return None if measure == "text_losses" else 0.0


def weight(item: Item, metric: str) -> float:
    """What an item counts in the mean over items: blocks of text count by their predictions or bytes."""
    if "bytes" not in item.answer:
        return 1.0
    if metric == "bits_per_byte":
        return float(item.answer["bytes"])
    return float(item.answer["length"] - item.answer["first"])


def _argmax(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _plain_number(text: Any) -> str:
    text = str(text)
    for pattern in (",", r"\$", "(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower()
