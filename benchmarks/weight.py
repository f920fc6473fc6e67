"""What the tree weighs: code, files, configuration keys, prose and tests.

    python benchmarks/weight.py [--against COMMIT]

Lines of code are those with code on them: docstrings, comments and blank lines do not count. Keys are those
of the configuration and of a schema's managed ids; the keys of single models and transforms are left out.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
import tokenize
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

REPO = Path(__file__).parents[1]
LONG_FILE_LINES = 300
LARGE_ROOM_FILES = 20
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
KEYS = """
import typing
from pydantic import BaseModel
from raytrec.config.managed import ManagedIds
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
    """Lines of a Python file with code on them."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
            statement.append(token)
        elif token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if any(part.type != tokenize.STRING for part in statement):  # a docstring is strings alone
                for part in statement:
                    lines.update(range(part.start[0], part.end[0] + 1))
            statement = []
    return len(lines)


def weigh(tree: Path) -> dict[str, int]:
    """Figure → its value, for a checkout of raytrec."""
    texts = {path: path.read_text() for path in sorted((tree / "raytrec").rglob("*.py"))}
    code = {path: lines_of_code(text) for path, text in texts.items()}
    rooms = Counter(path.parent for path in texts)
    pages = [tree / "README.md", tree / "ARCHITECTURE.md", *(tree / "docs").glob("*.md")]
    map_of_modules = re.compile(r"(?s)<!-- map -->.*?<!-- end of the map -->")
    architecture = map_of_modules.sub("", (tree / "ARCHITECTURE.md").read_text())
    keys = subprocess.run(
        [REPO / ".venv/bin/python", "-W", "ignore", "-c", KEYS],
        capture_output=True, text=True, check=True, cwd=tree, env={"PYTHONPATH": str(tree)},
    )  # fmt: skip
    by_room: Counter[str] = Counter()
    for path, count in code.items():
        parts = path.relative_to(tree / "raytrec").parts
        by_room[parts[0] + "/" if len(parts) > 1 else "(top)"] += count
    return {
        "code lines of raytrec/": sum(code.values()),
        **{f"  {room}": count for room, count in by_room.most_common()},
        "files of raytrec/": len(texts),
        f"files over {LONG_FILE_LINES} lines": sum(
            text.count("\n") > LONG_FILE_LINES for text in texts.values()
        ),
        f"rooms over {LARGE_ROOM_FILES} files": sum(count > LARGE_ROOM_FILES for count in rooms.values()),
        "configuration keys": int(keys.stdout),
        "words of README, ARCHITECTURE and docs": sum(len(page.read_text().split()) for page in pages),
        "  of ARCHITECTURE, without its map": len(architecture.split()),
        "lines of tests": sum(path.read_text().count("\n") for path in (tree / "tests").rglob("*.py")),
        "lines of benchmarks and datasets": sum(
            path.read_text().count("\n")
            for folder in ("benchmarks", "datasets")
            for path in (tree / folder).rglob("*.py")
        ),
    }


def main(
    against: Annotated[str, typer.Option(help="A commit to compare with.")] = "",
) -> None:
    columns = {"now": weigh(REPO)}
    if against:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", against], cwd=REPO, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            columns = {against: weigh(Path(folder)), **columns}
    table = Table(title="make weight")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for figure in dict.fromkeys(figure for column in columns.values() for figure in column):
        table.add_row(figure, *(f"{column.get(figure, 0):,}" for column in columns.values()))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
