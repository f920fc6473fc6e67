"""Discovery of recipes by `raytrec prepare`, and conversion of their parameters to options."""

import sys
from pathlib import Path
from typing import Annotated

import pytest
import raytrec_datasets
from raytrec_datasets import app, find_recipe
from recipes import run_recipe
from typer import Option
from typer.main import get_command

from raytrec.common.errors import ConfigError

recorded_calls = []


def plain(out: Path, rows: int = 7, seed: int = 0, source: Path | None = None, force: bool = False):
    """Repeats its option."""
    recorded_calls.append((out, rows, seed, source, force))


def annotated(out: Path, share: Annotated[float, Option("--part", min=0, max=1, help="Of rows.")] = 0.5):
    """Has a separate option."""
    recorded_calls.append((out, share))


def run(function, *arguments):
    recorded_calls.clear()
    return run_recipe(f"{__name__}:{function}", *arguments)


def test_parameters_become_options():
    assert run("plain", "--out", "a", "--rows", "3", "--seed", "4", "--source", "b", "--force").exit_code == 0
    assert recorded_calls == [(Path("a"), 3, 4, Path("b"), True)]
    assert run("plain", "--out", "a").exit_code == 0 and recorded_calls == [(Path("a"), 7, 0, None, False)]
    assert run("annotated", "--out", "a", "--part", "0.25").exit_code == 0 and recorded_calls == [(Path("a"), 0.25)]


@pytest.mark.parametrize(
    "arguments", [["plain"], ["plain", "--out", "a", "--rows", "x"], ["annotated", "--out", "a", "--part", "2"]]
)
def test_invalid_recipe_options_are_rejected(arguments):
    assert run(*arguments).exit_code == 2 and not recorded_calls


def test_help_shows_docstring_and_shared_options():
    shown = " ".join(run("plain", "--help").output.split())
    assert "Repeats its option." in shown and "Folder to write Parquet" in shown
    assert "Replace a folder that a recipe has prepared." in shown and "the same seed produces the same data." in shown


def test_recipe_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "corner_recipe.py").write_text("def prepare(out, rows: int = 1):\n    'Ours.'\n    print(out, rows)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = run_recipe("corner_recipe:prepare", "--out", "x", "--rows", 2)
    assert done.exit_code == 0 and done.output == "x 2\n"


@pytest.mark.parametrize(
    "path", ["no_such_module:prepare", f"{__name__}:no_such_function", f"{__name__}:recorded_calls"]
)
def test_invalid_recipe_path_raises_config_error(path):
    with pytest.raises(ConfigError, match="recipe"):
        find_recipe(path)


def test_commands_match_the_recipe_folders():
    folders = {path.parent.name for path in Path(raytrec_datasets.__file__).parent.glob("*/__init__.py")}
    assert set(get_command(app).list_commands(None)) == folders
    assert run_recipe("writing", "--out", "x").exit_code == 2
