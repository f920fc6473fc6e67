"""The wheel has everything, and raytrec works from it: another environment, another folder, no checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
JOB = """\
data: {train: data/train, test: data/test, global_batch_size: 64}
scaling: {num_workers: 1, device: cpu}
model: {bottom_mlp: [8], top_mlp: [8]}
tracking: {enabled: false, every_steps: 5, report: false}
"""


def sources():
    """File of the tree → its place in the wheel."""
    for package, folder in PROJECT["package-dir"].items():
        for path in (REPOSITORY / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, Path(package) / path.relative_to(REPOSITORY / folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built of a copy, as building writes next to the sources."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("raytrec", "datasets"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", copy / "out", copy]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = (copy / "out").glob("raytrec-*.whl")
    return built


def test_every_file_of_the_tree_is_in_the_wheel(wheel):
    inside = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {place for _, place in sources()} == {path for path in inside if ".dist-info" not in path.parts[0]}


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Runs a command of an environment that has raytrec from the wheel, in a separate folder.

    Of the environment that runs the tests it sees all packages but raytrec: files *.pth, by which that one
    finds the checkout, count only in an environment's own site-packages.
    """
    place, work = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    venv.create(place, symlinks=True)
    python = place / "bin/python"
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run([*pip, "--ignore-installed", wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(command, *arguments):
        done = subprocess.run(
            [place / "bin" / command, *map(str, arguments)], cwd=work, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, work, site

    return run


@pytest.mark.survive
def test_it_is_the_wheels_code_that_runs(run):
    code = "import raytrec, raytrec_datasets; print(raytrec.__file__, raytrec_datasets.__file__)"
    printed, _, site = run("python", "-c", code)
    assert [Path(file) for file in printed.split()] == [
        site / "raytrec/__init__.py", site / "raytrec_datasets/__init__.py"
    ]  # fmt: skip


@pytest.mark.survive
def test_prepare_train_and_report_run_from_the_wheel(run):
    assert "synthetic" in run("raytrec", "prepare", "--help")[0]
    small = ["--rows", 640, "--dense", 2, "--sparse", 3, "--multi-hot", 1, "--table-rows", 100, "--dim", 4]
    _, work, _ = run("raytrec", "prepare", "synthetic", "--out", "data", *small)
    (work / "job.yaml").write_text(JOB)
    result = json.loads(run("raytrec", "train", "job.yaml", "run.name=first", "--json")[0])
    assert result["train.rows"] == 640 and result["train.steps"] == 10 and result["world_size"] == 1
    assert json.loads((work / "runs/first/result.json").read_text()) == result
    printed, _, _ = run("raytrec", "report", "runs/first")
    assert "runs/first/report.html" in printed
    page = (work / "runs/first/report.html").read_text()
    assert "<svg" in page and "first" in page
    assert list((work / "runs/first").rglob("*.png")) or list((work / "runs/first").rglob("*.svg"))
