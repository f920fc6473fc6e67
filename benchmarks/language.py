"""Words and turns of phrase that raytrec's text does without, with what to write in their place.

    python benchmarks/language.py [PATH …]

Reads strings, docstrings and comments of Python files, and Markdown but for its code. `make lint` runs it.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
PLACES = ("raytrec", "datasets", "jobs", "tests", "docs", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
INSTEAD = {
    r"nobody|no one|anybody|somebody|whoever|whosoever": "name who: a user, a rank, the driver, no process",
    r"anew": "again, new",
    r"beside": "in addition to, next to, besides",
    r"of (its|their) own": "its own X, separate, a dedicated X",
    r"what (there is|there are|is there|waits|is left)": "name the thing: existing files, queued messages",
    r"says?|said|tells|told": "has, states, is set to, reports, prints, is given",
    r"(?<!there )(is|are|was|were|be) no(?= (?!longer|more|less|fewer|such|other)\w)": "is not a, are not",
}
WORDS = {re.compile(rf"(?i)(?<![\w-])({pattern})(?![\w-])"): instead for pattern, instead in INSTEAD.items()}
CODE = re.compile(r"(?s)```.*?```|`[^`]*`|<!--.*?-->")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what a reader reads in a file."""
    if path.suffix == ".md":
        page = CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), path.read_text(encoding="utf-8"))
        yield from enumerate(page.splitlines(), 1)
        return
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in kinds:
            yield from enumerate(token.string.splitlines(), token.start[0])


def files(places: list[Path]) -> list[Path]:
    """The Python and Markdown files in these places."""
    found = [place.rglob("*") if place.is_dir() else [place] for place in places]
    return sorted(path for paths in found for path in paths if path.suffix in (".py", ".md"))


def main(arguments: list[str]) -> int:
    count = 0
    for path in files([Path(argument) for argument in arguments] or [REPO / place for place in PLACES]):
        for number, text in texts(path):
            for pattern, instead in WORDS.items():
                for found in pattern.finditer(text):
                    count += 1
                    print(f"{path}:{number}: {found[0]!r}: {instead}\n    {text.strip()[:140]}")
    print(f"{count} words to replace" if count else "the language is as agreed")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
