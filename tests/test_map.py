"""Tests that docs/map.md is up to date with `make map` and that every module has a docstring."""

from pathlib import Path

import module_map
import pytest

REPO = Path(__file__).parents[1]


def test_map_page_matches_module_map():
    found = module_map.module_map()
    assert found in (REPO / "docs" / "map.md").read_text(), "run `make map`"


@pytest.mark.slow
def test_every_module_has_a_docstring():
    files = (REPO / "raytrec").rglob("*.py")
    assert [str(path) for path in files if path.name != "__main__.py" and not module_map.first_sentence(path)] == []


@pytest.mark.slow
def test_module_map_lists_every_module():
    files = [path for path in (REPO / "raytrec").rglob("*.py") if path.name != "__init__.py"]
    assert module_map.module_map().count(".py`:") == len(files)
