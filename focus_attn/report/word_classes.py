"""Word classes of tokens, by textblob's English tagger: a lexicon and rules that come inside its wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence

# The first letters of a Penn Treebank tag that decide, longest first.
PENN = {
    "NNP": "name",
    "NN": "noun",
    "PRP": "pronoun",
    "WP": "pronoun",
    "VB": "verb",
    "MD": "verb",
    "JJ": "adjective",
    "RB": "adverb",
    "WRB": "adverb",
    "DT": "determiner",
    "PDT": "determiner",
    "WDT": "determiner",
    "IN": "preposition",
    "TO": "preposition",
    "CC": "conjunction",
    "CD": "number",
}
PUNCTUATION, SPACE, OTHER = "punctuation", "space", "other"
CLASSES = (*dict.fromkeys(PENN.values()), PUNCTUATION, SPACE, OTHER)

# As the Penn Treebank splits them: n't and 's are words of their own.
_WORD = re.compile(
    r"(?P<word>[^\W\d_]+?(?=n't\b)|n't\b|'(?:s|ll|re|ve|d|m)\b|[^\W\d_]+)|(?P<number>\d+(?:[.,]\d+)*)"
    r"|(?P<paragraph>\n\s*\n)|(?P<mark>[^\w\s]|_)"
)


def tagger() -> str | None:
    """The tagger's name and version, None where it is not installed."""
    if importlib.util.find_spec("textblob") is None:
        return None
    return f"textblob {importlib.metadata.version('textblob')}, PatternTagger (English)"


def word_classes(pieces: Sequence[str]) -> list[str]:
    """The class of the word that each token begins, or goes on with. Tokens without a letter, digit or mark: space."""
    text = "".join(pieces).replace("\u2019", "'")
    words = list(_WORD.finditer(text))
    owner = [-1] * len(text)
    for number, word in enumerate(words):
        if word.lastgroup != "paragraph":
            owner[word.start() : word.end()] = [number] * (word.end() - word.start())
    classes = _tag(words)
    found, at = [], 0
    for piece in pieces:
        owners = [number for number in owner[at : at + len(piece)] if number >= 0]
        found.append(classes[owners[0]] if owners else SPACE)
        at += len(piece)
    return found


def _tag(words: list[re.Match[str]]) -> list[str]:
    from textblob.en import tag

    # Marks and numbers have a class that their look decides; the tagger reads them for what is around them.
    paragraphs: list[list[int]] = [[]]
    for number, word in enumerate(words):
        if word.lastgroup == "paragraph":
            paragraphs.append([])
        else:
            paragraphs[-1].append(number)
    classes = [SPACE] * len(words)
    for paragraph in paragraphs:
        line = " ".join(words[number].group() for number in paragraph)
        for number, (_, penn) in zip(paragraph, tag(line, tokenize=False) if line else [], strict=True):
            kind = words[number].lastgroup
            classes[number] = {"mark": PUNCTUATION, "number": "number"}.get(str(kind), _class_of(penn))
    return classes


def _class_of(penn: str) -> str:
    return next((PENN[penn[:size]] for size in (3, 2) if penn[:size] in PENN), OTHER)
