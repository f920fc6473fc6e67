"""Tests of the import linter's package order (pyproject.toml) and of the uniqueness of public names."""

import ast
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def package_copy(tmp_path):
    """Copy the package and the linter settings to a temporary folder."""
    shutil.copytree(ROOT / "raytrec", tmp_path / "raytrec", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run_import_linter(folder):
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_package_respects_layer_order(package_copy):
    code, said = run_import_linter(package_copy)
    assert code == 0 and "1 kept, 0 broken" in said, said


@pytest.mark.slow
def test_linter_rejects_imports_against_layer_order(package_copy):
    for file, line in (
        ("common/errors.py", "import raytrec.config.base"),
        ("compat/ray_core.py", "import raytrec.data.order"),
        ("models/interactions.py", "def later():\n    from raytrec.worker import step"),
        ("worker/loop.py", "from raytrec.driver.coordinator import Hub"),
    ):
        with open(package_copy / "raytrec" / file, "a") as out:
            out.write(f"\n{line}\n")
    code, said = run_import_linter(package_copy)
    assert code == 1, said
    for importer, imported in (
        ("common.errors", "config.base"),
        ("compat.ray_core", "data.order"),
        ("models.interactions", "worker.step"),
        ("worker.loop", "driver.coordinator"),
    ):
        assert f"raytrec.{importer} -> raytrec.{imported}" in said, said


@pytest.mark.slow
def test_linter_rejects_package_missing_from_layers(package_copy):
    (package_copy / "raytrec" / "attic").mkdir()
    (package_copy / "raytrec" / "attic" / "__init__.py").touch()
    code, said = run_import_linter(package_copy)
    assert code == 1 and "attic" in said, said


def public_names_in(module):
    """Yield the public top-level names of a module, without type variables and `main`."""
    for node in module.body:
        match node:
            case ast.Assign(value=ast.Call(func=ast.Name("TypeVar"))):
                continue
            case ast.Assign(targets=targets):
                names = [part.id for part in ast.walk(ast.Tuple(targets)) if isinstance(part, ast.Name)]
            case ast.AnnAssign(target=ast.Name(name)) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case _:
                continue
        yield from (name for name in names if name != "main" and not name.startswith("_"))


def test_public_names_occur_in_at_most_two_modules():
    """Names in cli/ are exempt: a command has the same name as the function that implements it."""
    found = defaultdict(set)
    for file in (ROOT / "raytrec").rglob("*.py"):
        for name in public_names_in(ast.parse(file.read_text())) if file.parent.name != "cli" else []:
            found[name].add(str(file.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 2} == {}
