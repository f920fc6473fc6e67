"""The map in ARCHITECTURE.md has every module of raytrec/, and nothing that is not there."""

import re
from pathlib import Path

REPO = Path(__file__).parents[1]
ROOMS = """client tuning driver worker retrieval report tracking checkpoint checks metrics tasks models
embeddings inspection data cluster config compat common"""


def modules() -> set[str]:
    found = (path.relative_to(REPO / "raytrec") for path in (REPO / "raytrec").rglob("*.py"))
    return {path.as_posix() for path in found if path.name != "__init__.py"}


def drawn(page: str) -> list[str]:
    """Paths of modules on the map, in its order: folders by indentation, files with commas between them."""
    block = page.partition("\n## raytrec/\n")[2].partition("\n## ")[0]
    folders: list[tuple[int, str]] = []
    found = []
    for line in (line for line in block.splitlines() if line.startswith("    ")):
        indent = len(line) - len(line.lstrip())
        folders = [(depth, name) for depth, name in folders if depth < indent]
        names = re.match(r"\s*((?:\w+\.py, )*\w+\.py|\w+/)(?=\s|$)", line)
        if names and names[1].endswith("/"):
            folders.append((indent, names[1]))
        elif names:
            found += ["".join(name for _, name in folders) + file for file in names[1].split(", ")]
    return found


def test_the_map_has_every_module_once():
    there = drawn((REPO / "ARCHITECTURE.md").read_text())
    assert sorted(there) == sorted(modules())


def test_rooms_come_in_the_order_of_imports():
    there = drawn((REPO / "ARCHITECTURE.md").read_text())
    assert list(dict.fromkeys(path.partition("/")[0] for path in there if "/" in path)) == ROOMS.split()


def test_a_map_is_read():
    lines = [
        "    a.py    what",
        "    room/   x",
        "      b.py, c.py  y.py is none",
        "      in/",
        "        d.py",
    ]
    page = "\n".join(["", "## raytrec/", "", *lines, "", "## Next", "    e.py", ""])
    assert drawn(page) == ["a.py", "room/b.py", "room/c.py", "room/in/d.py"]
