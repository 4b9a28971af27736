"""Text that facts can be hidden in, for the tests of what makes text to train on."""

import itertools
import re

from focus_attn.evaluation import retrieval

WORDS = ["river", "stone", "winter", "garden", "letter", "silver", "candle", "morning", "harbour", "window"]
PLAIN = ["".join(letters) for letters in itertools.product("abcde", "aeiou", "lmnr", "aeiou")]  # 500 words
BOOK = " ".join(f"It was {a} and {b}, and nobody spoke." for a, b in itertools.pairwise(PLAIN * 4))


def shape(fact):
    """A fact without its names and numbers."""
    words = "|".join(retrieval.WORDS)
    return re.sub(rf"\b([A-Z]{{5}}|\d{{7}}|{words})\b", "_", fact)
