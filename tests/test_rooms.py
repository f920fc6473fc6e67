"""The linter holds the order of rooms (pyproject.toml): a wrong import makes `make lint` fail."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path):
    """A copy of the package and of the linter's settings."""
    shutil.copytree(ROOT / "raytrec", tmp_path / "raytrec", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder):
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_rooms_as_they_are(tree):
    code, said = lint(tree)
    assert code == 0 and "1 kept, 0 broken" in said, said


@pytest.mark.parametrize(
    "file, line, named",
    [
        ("common/errors.py", "import raytrec.config.base", "raytrec.common.errors -> raytrec.config.base"),
        ("compat/ray_core.py", "import raytrec.data.order", "raytrec.compat.ray_core -> raytrec.data.order"),
        (
            "models/dlrm.py",
            "def later():\n    from raytrec.worker import step",
            "raytrec.models.dlrm -> raytrec.worker.step",
        ),
        (
            "worker/loop.py",
            "from raytrec.driver.coordinator import Hub",
            "raytrec.worker.loop -> raytrec.driver.coordinator",
        ),
    ],
)
def test_an_import_against_the_order(tree, file, line, named):
    with open(tree / "raytrec" / file, "a") as out:
        out.write(f"\n{line}\n")
    code, said = lint(tree)
    assert code == 1 and named in said, said


def test_a_room_that_the_order_does_not_name(tree):
    (tree / "raytrec" / "attic").mkdir()
    (tree / "raytrec" / "attic" / "__init__.py").touch()
    code, said = lint(tree)
    assert code == 1 and "attic" in said, said
