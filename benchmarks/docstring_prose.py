"""The prose of installed packages' docstrings, one file a package: English that is no novel, to train routers on too.

python benchmarks/docstring_prose.py docs --packages numpy scipy sympy pandas networkx matplotlib
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 400  # characters
MOST = 800_000  # characters of one package
LETTERS = 0.8  # share of letters and spaces: less is a table or code


def docstrings(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package!r} is not an installed package")
    seen = set()
    for file in sorted(Path(next(iter(spec.submodule_search_locations))).rglob("*.py")):
        if any(part.startswith("test") for part in file.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            text = ast.get_docstring(node) or ""
            text = "\n".join(line for line in text.split("\n") if not re.match(r"\s*(>>>|\.\.\. )", line))
            letters = sum(character.isalpha() or character == " " for character in text)
            if len(text) >= SHORTEST and letters / len(text) > LETTERS and text[:200] not in seen:
                seen.add(text[:200])  # classes repeat what their parents say
                yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packages", nargs="+", required=True)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for package in options.packages:
        text = "\n\n".join(docstrings(package))[:MOST]
        (options.folder / f"{package}.txt").write_text(text, encoding="utf-8")
        print(f"{package}: {len(text):,} characters")


if __name__ == "__main__":
    main()
