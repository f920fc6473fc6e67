"""Tests that the wheel is complete and that raytrec works from it in a separate environment."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, PathDistribution, distribution
from pathlib import Path

import numpy as np
import pytest
from exports import train_for_export, train_tracked_run
from heads import find_free_ports
from packaging.requirements import Requirement
from test_models import ModelCase

import raytrec

REPOSITORY = Path(__file__).parents[1]
SETUPTOOLS_CONFIG = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
JOB_YAML = """\
data: {train: data/train, test: data/test, global_batch_size: 64}
scaling: {num_workers: 1, device: cpu}
model: {bottom_mlp: [8], top_mlp: [8]}
tracking: {enabled: false, every_steps: 5, report: false}
"""


def wheel_paths_by_source():
    """Yield (source file, path in the wheel)."""
    for package, folder in SETUPTOOLS_CONFIG["package-dir"].items():
        for path in (REPOSITORY / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, Path(package) / path.relative_to(REPOSITORY / folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, because the build writes next to the sources."""
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


@pytest.mark.slow
def test_wheel_contains_every_source_file(wheel):
    inside = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {place for _, place in wheel_paths_by_source()} == {
        path for path in inside if ".dist-info" not in path.parts[0]
    }


@pytest.fixture(scope="module")
def run_from_wheel(wheel, tmp_path_factory):
    """Return a function that runs a command in an environment with raytrec installed from the wheel.

    The environment sees all packages of the test environment except raytrec, because Python reads *.pth
    files (here: of the editable install) only in the environment's own site-packages.
    """
    place, work = make_wheel_environment(wheel, tmp_path_factory), tmp_path_factory.mktemp("elsewhere")
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(command, *arguments):
        done = run_in(place, work, command, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, work, site

    return run


def make_wheel_environment(wheel, tmp_path_factory):
    """Create a virtual environment that contains only raytrec from the wheel."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    options = ["--no-deps", "--no-index", "--quiet", "--ignore-installed"]
    pip = [sys.executable, "-m", "pip", "--python", place / "bin/python", "install", *options, wheel]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place


def run_in(place, work, command, *arguments):
    """Run a command of an environment in the folder `work`."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [place / "bin" / command, *map(str, arguments)]
    return subprocess.run(words, cwd=work, env=env, capture_output=True, text=True)


def required_distributions(requirements):
    """Return the locally installed distributions that `pip install` would install for the requirements."""
    found, waiting = {}, list(requirements)
    while waiting:
        requirement = waiting.pop()
        for extra in requirement.extras or {""}:
            name = requirement.name, extra
            if name not in found:
                try:
                    found[name] = distribution(requirement.name)
                except PackageNotFoundError:  # e.g. the CUDA libraries of torch's CUDA build
                    continue
                theirs = map(Requirement, found[name].requires or [])
                waiting += [r for r in theirs if not r.marker or r.marker.evaluate({"extra": extra})]
    return found.values()


@pytest.fixture(scope="module")
def make_minimal_environment(wheel, tmp_path_factory):
    """Return a function that creates an environment with exactly the packages of
    `pip install raytrec[EXTRA] MORE...` and returns a function to run commands in it.
    """

    def make(extra, *more):
        place = make_wheel_environment(wheel, tmp_path_factory)
        (site,) = place.glob("lib/python*/site-packages")
        (about,) = site.glob("raytrec-*.dist-info")
        mine = [Requirement(each) for each in PathDistribution(about).requires]
        wanted = [each for each in mine if not each.marker or each.marker.evaluate({"extra": extra})]
        for each in required_distributions([*wanted, *map(Requirement, more)]):
            for name in {file.parts[0] for file in each.files} - {"..", "__pycache__"}:
                if not (site / name).exists():
                    (site / name).symlink_to(each.locate_file(name))
        return lambda *words: run_in(place, tmp_path_factory.mktemp("elsewhere"), *words)

    return make


SCORE_SOURCE = """
import sys, raytrec
model = raytrec.load(sys.argv[1])
print(model.check() <= 1e-6, model.predict(model.golden).num_rows)
print([name for name in sys.modules if name in ("ray", "torchrec", "fbgemm_gpu", "mlflow")])
"""


@pytest.mark.survive
def test_score_extra_suffices_for_scoring(make_minimal_environment, tmp_path):
    folder, _, _, _ = train_for_export(ModelCase("din", (1, 1)), tmp_path)
    export = raytrec.export(folder, str(tmp_path / "export"))
    run = make_minimal_environment("score")
    done = run("python", "-c", SCORE_SOURCE, export.path)
    assert done.stdout.split("\n")[:2] == ["True 12", "[]"], done.stderr
    assert run("python", "-c", "import ray").returncode == 1, "the extra installs Ray"


SERVE_SOURCE = """
import json, os, signal, subprocess, sys, time
import mlflow
from urllib.request import Request, urlopen
model, rows = sys.argv[1], json.load(open(sys.argv[2]))
uvicorn = os.path.abspath("uvicorn")  # pip would create this script
with open(uvicorn, "w") as file:
    file.write(f'#!/bin/sh\\nexec {sys.executable} -m uvicorn "$@"\\n')
os.chmod(uvicorn, 0o755)
os.environ["PATH"] = os.getcwd() + os.pathsep + os.environ["PATH"]
with open("server.log", "w") as log:
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", model, "--env-manager", "local"]
    server = subprocess.Popen([*command, "-p", sys.argv[3]], stdout=log, stderr=log, start_new_session=True)
try:
    address, until = f"http://127.0.0.1:{sys.argv[3]}", time.monotonic() + 200
    while True:
        try:
            urlopen(f"{address}/ping", timeout=5)
            break
        except OSError:
            assert server.poll() is None and time.monotonic() < until, open("server.log").read()
            time.sleep(0.3)
    body = json.dumps({"dataframe_split": rows}).encode()
    request = Request(f"{address}/invocations", body, {"Content-Type": "application/json"})
    served = json.load(urlopen(request, timeout=60))["predictions"]
finally:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
    server.wait(60)
import pandas
loaded = mlflow.pyfunc.load_model(model)
import raytrec
assert raytrec.__file__.startswith(model), raytrec.__file__
there = [name for name in sys.modules if name in ("ray", "torchrec", "fbgemm_gpu")]
direct = loaded.predict(pandas.DataFrame(rows["data"], columns=rows["columns"])).to_dict("records")
print(json.dumps([served, direct, there]))
"""


@pytest.mark.survive
@pytest.mark.parametrize("embed", [False, True])
def test_mlflow_model_is_served_without_trainer_packages(make_minimal_environment, tmp_path, monkeypatch, embed):
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    table, predictions = train_tracked_run("din", tmp_path / "run")
    export = raytrec.export(tmp_path / "run", str(tmp_path / "export"), mlflow=True, embed=embed)
    name = export.metrics["mlflow_model"].removeprefix("models:/")
    (model,) = tmp_path.glob(f"**/{name}/artifacts")
    rows = table.drop_columns(["y", "z"]).to_pydict()
    values = {"columns": list(rows), "data": list(map(list, zip(*rows.values(), strict=True)))}
    (tmp_path / "rows.json").write_text(json.dumps(values))
    run = make_minimal_environment("score", "mlflow")
    done = run("python", "-c", SERVE_SOURCE, model, tmp_path / "rows.json", *find_free_ports(1))
    assert done.returncode == 0, done.stderr
    served, direct, there = json.loads(done.stdout.splitlines()[-1])
    assert there == []
    for found in (served, direct):
        for task, expected in predictions.items():
            got = [row[f"score_{task}"] for row in found]
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.survive
def test_base_install_names_missing_extra(make_minimal_environment, tmp_path):
    run = make_minimal_environment("")
    assert "export" in run("raytrec", "--help").stdout
    done = run("raytrec", "export", tmp_path, "--out", tmp_path / "export")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "is not installed" in done.stderr and "raytrec[cpu]" in done.stderr


@pytest.mark.survive
def test_installed_wheel_is_imported(run_from_wheel):
    code = "import raytrec, raytrec_datasets; print(raytrec.__file__, raytrec_datasets.__file__)"
    printed, _, site = run_from_wheel("python", "-c", code)
    assert [Path(file) for file in printed.split()] == [
        site / "raytrec/__init__.py", site / "raytrec_datasets/__init__.py"
    ]  # fmt: skip


@pytest.mark.survive
def test_wheel_runs_prepare_train_and_report(run_from_wheel):
    assert "synthetic" in run_from_wheel("raytrec", "prepare", "--help")[0]
    small = ["--rows", 640, "--dense", 2, "--sparse", 3, "--multi-hot", 1, "--table-rows", 100, "--dim", 4]
    _, work, _ = run_from_wheel("raytrec", "prepare", "synthetic", "--out", "data", *small)
    (work / "job.yaml").write_text(JOB_YAML)
    result = json.loads(run_from_wheel("raytrec", "train", "job.yaml", "run.name=first", "--json")[0])
    assert result["train.rows"] == 640 and result["train.steps"] == 10 and result["world_size"] == 1
    assert json.loads((work / "runs/first/result.json").read_text()) == result
    printed, _, _ = run_from_wheel("raytrec", "report", "runs/first")
    assert "runs/first/report.html" in printed
    page = (work / "runs/first/report.html").read_text()
    assert "<svg" in page and "first" in page
    assert list((work / "runs/first").rglob("*.png")) or list((work / "runs/first").rglob("*.svg"))
