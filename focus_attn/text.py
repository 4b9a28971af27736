"""Text to measure and to fit on: English that every CPython carries, or the user's own files."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Modules of the standard library whose docstrings read as prose; one that is not installed is passed over.
DOCUMENTED_MODULES = """
    _pydecimal argparse ast codecs collections configparser csv datetime difflib doctest email.message enum fractions
    functools heapq http.cookiejar http.server inspect ipaddress json logging logging.handlers os pdb pydoc random re
    secrets shelve shutil smtplib ssl statistics string subprocess tarfile textwrap threading traceback typing
    unittest.case unittest.mock urllib.parse urllib.request weakref xml.etree.ElementTree zipfile
""".split()

# A paragraph this long that stands in two documents would let one part of a split know the other.
MIN_REPEATED_PARAGRAPH = 60
HELD_OUT_EVERY = 4
SUFFIXES = (".txt", ".md", ".jsonl")


@dataclass(frozen=True)
class TextSplit:
    """Two parts that share no document: one to fit on, one to measure on."""

    train: list[str]
    held_out: list[str]
    name: str

    @property
    def characters(self) -> int:
        return sum(map(len, self.train)) + sum(map(len, self.held_out))


def default_text() -> TextSplit:
    """The language reference and the docstrings that come with this Python: about 0.8 MB, the same on every call."""
    documents = [*_language_reference(), *_library_docstrings()]
    return split_documents(without_repeats(documents), name="Python's own documentation")


def read_text(path: str | Path) -> list[str]:
    """The documents of a .txt or .md file (one each), of a .jsonl file (the field "text" of every line), or of every
    such file below a folder, in the order of their names."""
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"no {', '.join(SUFFIXES)} file below the folder {str(path)!r}")
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f"no such file or folder: {str(path)!r}")
    documents = [document for file in files for document in _read_file(file)]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"{str(path)!r} holds no text")
    return documents


def split_documents(documents: list[str], name: str) -> TextSplit:
    """Every fourth document by size is held out, so that both parts have long and short ones. A single document is
    cut at three quarters of its length, at the end of a paragraph where there is one."""
    if not documents or not any(document.strip() for document in documents):
        raise ValueError("there is no text to split")
    if len(documents) == 1:
        text = documents[0]
        cut = len(text) * (HELD_OUT_EVERY - 1) // HELD_OUT_EVERY
        paragraph = text.find("\n\n", cut)
        cut = paragraph if paragraph >= 0 and paragraph < (cut + len(text)) // 2 else cut
        return TextSplit([text[:cut]], [text[cut:].lstrip("\n")], name)
    by_size = sorted(documents, key=len, reverse=True)
    held_out = by_size[1::HELD_OUT_EVERY]
    train = [document for rank, document in enumerate(by_size) if rank % HELD_OUT_EVERY != 1]
    return TextSplit(train, held_out, name)


def without_repeats(documents: list[str]) -> list[str]:
    """The documents less every long paragraph that a longer one has already: manuals quote their own chapters."""
    seen: set[str] = set()
    kept = []
    for document in sorted(documents, key=len, reverse=True):
        paragraphs = document.split("\n\n")
        fresh = []
        for paragraph in paragraphs:
            words = " ".join(paragraph.split())
            if len(words) >= MIN_REPEATED_PARAGRAPH:
                if words in seen:
                    continue
                seen.add(words)
            fresh.append(paragraph)
        # What is left of a document that was mostly quotation does not read as one.
        if sum(map(len, fresh)) > len(document) / 2:
            kept.append("\n\n".join(fresh))
    return kept


def _language_reference() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _library_docstrings() -> Iterator[str]:
    for name in DOCUMENTED_MODULES:
        spec = importlib.util.find_spec(name.partition(".")[0]) and importlib.util.find_spec(name)
        if not spec or not spec.origin or not spec.origin.endswith(".py"):
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        text = "\n\n".join(_docstrings(tree, name.lstrip("_")))
        if text:
            yield text


def _docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """The docstrings of a module, class or function and of what it holds, each under its name, in source order."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring:
            yield f"{name}\n\n{docstring}"
    for child in ast.iter_child_nodes(node):
        child_name = getattr(child, "name", None)
        inner = f"{name}.{child_name}" if isinstance(child_name, str) else name
        if isinstance(child, ast.stmt):
            yield from _docstrings(child, inner)


def _read_file(file: Path) -> list[str]:
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{str(file)!r} is not one of the kinds that can be read: {', '.join(SUFFIXES)}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise ValueError(f"{str(file)!r} holds zero bytes: it looks like a binary file, not text")
    if file.suffix != ".jsonl":
        return [text]
    documents = []
    for where, record in json_records(text.split("\n"), file):  # `splitlines` cuts at what a JSON string may hold
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(f'{where} has no string field "text"')
        documents.append(record["text"])
    return documents


def json_records(lines: Iterable[str], file: Path) -> Iterator[tuple[str, Any]]:
    """What the lines of a JSONL file hold, blank ones passed over, each behind the words for where it stands."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of {str(file)!r}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error.msg}") from None
        yield where, record
