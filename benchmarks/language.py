"""Check raytrec's text for words and phrases to avoid, and suggest replacements.

    python benchmarks/language.py [PATH …]

Reads strings, docstrings and comments in Python files, and Markdown except its code. `make lint` runs this script.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
PLACES = (
    "raytrec",
    "datasets",
    "jobs",
    "tests",
    "benchmarks",
    "docs",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
INSTEAD = {
    r"nobody|no one|anybody|somebody|whoever|whosoever": "name who: a user, a rank, the driver, no process",
    r"anew": "again, new",
    r"beside": "in addition to, next to, besides",
    r"of (its|their) own": "its own X, separate, a dedicated X",
    r"what (there is|there are|is there|waits|is left)": "name the thing: existing files, queued messages",
    r"what (it|they) (is|was|are|were|has|have|had)": "name the thing: its content, their type",
    r"those of before|the ones? (that|which)|the one of": "repeat the noun",
    r"as far as|but for": "if, up to, except",
    r"says?|said|tells|told": "has, states, is set to, reports, prints, is given",
    r"(?<!there )(is|are|was|were|be) no(?= (?!longer|more|less|fewer|such|other)\w)": "is not a, are not",
}
WORDS = {re.compile(rf"(?i)(?<![\w-])({pattern})(?![\w-])"): instead for pattern, instead in INSTEAD.items()}
CODE = re.compile(r"(?s)```.*?```|`[^`]*`|<!--.*?-->")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) for each string and block of comments in a Python file, or for a Markdown page.

    Adjacent string literals form one text, as do the constant parts of an f-string.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), content)
        return
    tree = ast.parse(content)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (node.lineno, "".join(str(getattr(part, "value", "")) for part in map(_constant, node.values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value
    yield from _comments(content)


def _constant(part: ast.expr) -> ast.expr:
    return part if isinstance(part, ast.Constant) else ast.Constant("…")


def _comments(content: str) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) for each run of comments on consecutive lines."""
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != first + len(lines):
                yield first, "\n".join(lines)
                lines = []
            first = first if lines else token.start[0]
            lines.append(token.string.lstrip("# "))
    if lines:
        yield first, "\n".join(lines)


def files(places: list[Path]) -> list[Path]:
    """Return the Python and Markdown files in files and folders, except this script."""
    found = [place.rglob("*") if place.is_dir() else [place] for place in places]
    kinds, this = (".py", ".md"), Path(__file__).resolve()  # this file contains the words
    return sorted(path for paths in found for path in paths if path.suffix in kinds and path.resolve() != this)


def main(arguments: list[str]) -> int:
    """Print the words to replace in the given files and folders; return 1 if there are any, else 0."""
    count = 0
    for path in files([Path(argument) for argument in arguments] or [REPO / place for place in PLACES]):
        for first, text in texts(path):
            for pattern, instead in WORDS.items():
                for found in pattern.finditer(text.replace("\n", " ")):
                    count += 1
                    number = first + text.count("\n", 0, found.start())
                    line = text[: found.end()].rsplit("\n", 1)[-1] + text[found.end() :].split("\n", 1)[0]
                    print(f"{path}:{number}: {found[0]!r}: {instead}\n    {line.strip()[:140]}")
    print(f"{count} words to replace" if count else "no words to replace")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
