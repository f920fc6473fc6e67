"""Size of the tree: code, files, configuration keys, prose and tests.

    python benchmarks/weight.py [--against COMMIT]

Docstrings, comments and blank lines do not count as lines of code. Configuration keys include those of a
schema's managed ids, but not those of individual models and transforms. A word of documentation contains a
letter or digit, so that the pipes and rules of tables do not count.

With `--against`, the exit code is 1 if raytrec/ has grown by more code lines than CHANGELOG.md allows. A
change that needs more lines states a budget in its entry in CHANGELOG.md: "(budget: +120 code lines)".
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

REPO = Path(__file__).parents[1]
CODE_LINES = "code lines of raytrec/"
BUDGET = re.compile(r"\(budget: \+([\d,]+) code lines\)")
GENERATED = re.compile(r"(?s)<!-- map -->.*?<!-- end of the map -->")
TOP_PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")
LONG_FILE_LINES = 300
LARGE_PACKAGE_FILES = 20
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
KEYS = """
import typing
from pydantic import BaseModel
from raytrec.config.schema import ManagedIds
from raytrec.config.run_config import RunConfig

def sections(kind):
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in typing.get_args(kind):
        yield from sections(part)

def keys(section, prefix):
    for name, field in section.model_fields.items():
        inner = [] if prefix + name in ("model", "data.transforms") else list(sections(field.annotation))
        if not inner:
            yield prefix + name
        for part in inner:
            yield from keys(part, prefix + name + ".")

print(len({*keys(RunConfig, ""), *keys(ManagedIds, "ids.")}))
"""


def lines_of_code(text: str) -> int:
    """Return the number of lines with code in the text of a Python file."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
            statement.append(token)
        elif token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if any(part.type != tokenize.STRING for part in statement):  # not only strings, as docstrings are
                for part in statement:
                    lines.update(range(part.start[0], part.end[0] + 1))
            statement = []
    return len(lines)


def words(text: str) -> int:
    """Return the number of tokens between spaces that contain a letter or digit."""
    return sum(any(character.isalnum() for character in token) for token in text.split())


def weigh(tree: Path) -> dict[str, int]:
    """Return the size of each part of a checkout of the repository."""
    texts = {path: path.read_text() for path in sorted((tree / "raytrec").rglob("*.py"))}
    code = {path: lines_of_code(text) for path, text in texts.items()}
    packages = Counter(path.parent for path in texts)
    pages = [*(tree / name for name in TOP_PAGES), *(tree / "docs").glob("*.md")]
    architecture = GENERATED.sub("", (tree / "ARCHITECTURE.md").read_text())
    keys = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KEYS],
        capture_output=True, text=True, check=True, cwd=tree, env={"PYTHONPATH": str(tree)},
    )  # fmt: skip
    by_package: Counter[str] = Counter()
    for path, count in code.items():
        parts = path.relative_to(tree / "raytrec").parts
        by_package[parts[0] + "/" if len(parts) > 1 else "(top)"] += count
    return {
        CODE_LINES: sum(code.values()),
        **{f"  {package}": count for package, count in by_package.most_common()},
        "files of raytrec/": len(texts),
        f"files over {LONG_FILE_LINES} lines": sum(text.count("\n") > LONG_FILE_LINES for text in texts.values()),
        f"packages over {LARGE_PACKAGE_FILES} files": sum(count > LARGE_PACKAGE_FILES for count in packages.values()),
        "configuration keys": int(keys.stdout),
        "words of documentation, without the map": sum(words(GENERATED.sub("", page.read_text())) for page in pages),
        "  of ARCHITECTURE": words(architecture),
        "lines of tests": sum(path.read_text().count("\n") for path in (tree / "tests").rglob("*.py")),
        **{
            f"lines of {folder}": sum(path.read_text().count("\n") for path in (tree / folder).rglob("*.py"))
            for folder in ("benchmarks", "datasets")
        },
    }


def budgets(changelog: str) -> Counter[str]:
    """Return the number of occurrences of each entry in CHANGELOG.md that states a budget.

    Args:
        changelog: Text of CHANGELOG.md.
    """
    entries = (" ".join(entry.split()) for entry in re.split(r"(?m)^[-#] ?", changelog))
    return Counter(entry for entry in entries if BUDGET.search(entry))


def allowed_growth(older: str, newer: str) -> int:
    """Return the sum of the budgets in entries that were added between two versions of CHANGELOG.md.

    Args:
        older: Text of CHANGELOG.md at the older commit.
        newer: Text of CHANGELOG.md in the working tree.
    """
    added = budgets(newer) - budgets(older)
    return sum(int(lines.replace(",", "")) for entry in added.elements() for lines in BUDGET.findall(entry))


def main(against: Annotated[str, typer.Option(help="Commit to compare with.")] = "") -> None:
    """Print the size of the tree; with `--against`, exit with code 1 if raytrec/ has grown too much."""
    columns, allowed = {"now": weigh(REPO)}, 0
    if against:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", against], cwd=REPO, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            columns = {against[:12]: weigh(Path(folder)), **columns}
            allowed = allowed_growth((Path(folder) / "CHANGELOG.md").read_text(), (REPO / "CHANGELOG.md").read_text())
    table = Table(title="make weight")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for figure in dict.fromkeys(figure for column in columns.values() for figure in column):
        table.add_row(figure, *(f"{column.get(figure, 0):,}" for column in columns.values()))
    Console(width=100).print(table)
    growth = columns["now"][CODE_LINES] - next(iter(columns.values()))[CODE_LINES]
    if growth > allowed:
        raise SystemExit(
            f"raytrec/ has grown by {growth:,} code lines; the new entries of CHANGELOG.md allow {allowed:,}"
        )


if __name__ == "__main__":
    typer.run(main)
