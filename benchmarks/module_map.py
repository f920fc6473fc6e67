"""Write docs/map.md, a list of all modules of raytrec/ with the first sentence of each docstring.

    python benchmarks/module_map.py

Packages are listed in import order, which the contract in pyproject.toml defines. tests/test_map.py fails if the
page is out of date.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGE = REPO / "docs" / "map.md"
PLACE = re.compile(r"(?s)(<!-- map -->\n).*?(<!-- end of the map -->)")
WIDTH = 116


def packages() -> list[str]:
    """Return the packages and files at the top of raytrec/, in the order of imports."""
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())
    return settings["tool"]["importlinter"]["contracts"][0]["layers"]


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, or "" if there is no docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.)\s(?=[A-Z`])", text)[0]


def module_map() -> str:
    """Return the map as Markdown: a list for each package."""
    parts = []
    for package in packages():
        place = REPO / "raytrec" / package
        if not place.is_dir():
            parts.append(_entry(f"{package}.py", first_sentence(place.with_suffix(".py"))))
            continue
        parts.append(f"\n### {package}/\n\n{textwrap.fill(first_sentence(place / '__init__.py'), WIDTH)}\n")
        parts += _entries(place, place)
    return "\n".join(parts).replace("\n\n\n", "\n\n").strip()


def _entries(folder: Path, package: Path) -> list[str]:
    entries = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        name = path.relative_to(package).as_posix()
        if path.suffix == ".py" and path.name != "__init__.py":
            entries.append(_entry(name, first_sentence(path)))
        elif path.is_dir() and list(path.glob("*.py")):
            entries += [_entry(f"{name}/", first_sentence(path / "__init__.py")), *_entries(path, package)]
    return entries


def _entry(name: str, sentence: str) -> str:
    return textwrap.fill(f"- `{name}`: {sentence}", WIDTH, subsequent_indent="  ")


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(PLACE.sub(lambda found: f"{found[1]}\n{module_map()}\n\n{found[2]}", page))
