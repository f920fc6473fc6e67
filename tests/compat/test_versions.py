"""Unsupported package versions are rejected before anything starts."""

import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from raytrec.common.errors import RunError
from raytrec.compat import versions

ROOT = Path(__file__).parents[2]
CPU, NEXT = versions.PAIRS


@pytest.fixture
def set_installed_versions(monkeypatch):
    """Return a function that fakes installed versions, e.g. torch="2.14.0"; None means not installed."""

    def install(cuda="13.0", **found):
        pinned = versions.PAIRS[CPU] | {name: pins[0] for name, pins in versions.SUPPORTED_VERSIONS.items()}
        pinned |= {"fbgemm-gpu": None} | {name.replace("_", "-"): version for name, version in found.items()}
        monkeypatch.setattr(versions, "get_installed_version", pinned.get)
        monkeypatch.setattr(versions, "get_torch_cuda_version", lambda: cuda)

    return install


def test_installed_versions_match_the_pins():
    versions.require_versions()


def test_all_version_mismatches_are_in_one_error(set_installed_versions):
    set_installed_versions(torch="2.14.0+cpu", ray="2.60.1", mlflow="3.17.9")
    with pytest.raises(RunError) as error:
        versions.require_versions()
    assert error.value.what.endswith("ray 2.60.1, torch 2.14.0+cpu with torchrec 1.8.0 with fbgemm-gpu-cpu 1.8.0")
    assert error.value.expected == "ray 2.60.0, torch 2.13.0 with torchrec 1.8.0 with fbgemm-gpu-cpu 1.8.0"
    assert "requirements/cpu.txt" in error.value.do


@pytest.mark.parametrize(
    "torch, torchrec, fbgemm, nearest",
    [
        ("2.13.0+cpu", "1.8.0", "1.8.0", None),
        ("2.14.0+cpu", "1.9.0", "1.9.0", None),
        ("2.14.1+cu130", "1.9.2", "1.9.0", None),
        ("2.14.1", "1.8.0", "1.8.0", CPU),
        ("2.13.0", "1.9.2", "1.8.0", CPU),
        ("2.13.1", "1.8.0", "1.8.0", CPU),
        ("2.12.0", "1.7.0", "1.7.0", CPU),
        ("2.14.1", "1.9.2", "1.8.0", NEXT),
        ("2.14.1", "1.9.2", "1.9.1", NEXT),
        ("2.15.0", "1.10.0", "1.10.0", NEXT),
        ("3.0.0", "1.11.0rc1", "2026.10.1", NEXT),
    ],
)
def test_error_suggests_the_nearest_supported_pair(set_installed_versions, torch, torchrec, fbgemm, nearest):
    set_installed_versions(torch=torch, torchrec=torchrec, fbgemm_gpu_cpu=None, fbgemm_gpu=fbgemm)
    if not nearest:
        return versions.require_versions()
    with pytest.raises(RunError) as error:
        versions.require_versions()
    assert f"torch {torch} with torchrec {torchrec} with fbgemm-gpu {fbgemm}" in error.value.what
    pair = versions.PAIRS[nearest]
    expected = f"torch {pair['torch']} with torchrec {pair['torchrec']} with fbgemm-gpu {pair['fbgemm-gpu']}"
    assert error.value.expected == expected and f"requirements/{nearest}" in error.value.do


@pytest.mark.parametrize("found", ["25.0.1", "25.9", "26.0.0", "27.0.0", "2.5.0", "250.1"])
def test_only_versions_of_supported_series_are_accepted(set_installed_versions, found):
    set_installed_versions(pyarrow=found)
    with nullcontext() if found.startswith(("25.", "26.")) else pytest.raises(RunError, match="pyarrow"):
        versions.require_versions()


def test_driver_does_not_need_torch(set_installed_versions):
    set_installed_versions(torch=None, torchrec=None, fbgemm_gpu_cpu=None, fbgemm_gpu=None)
    versions.require_versions()


@pytest.mark.parametrize(
    "found,what,do",
    [
        (
            {"fbgemm_gpu": "1.8.0"},
            "fbgemm-gpu-cpu 1.8.0 and fbgemm-gpu 1.8.0 are both installed and share one folder",
            "pip uninstall --yes fbgemm-gpu fbgemm-gpu-cpu, then pip install --no-deps fbgemm-gpu-cpu==1.8.0",
        ),
        (
            {"fbgemm_gpu": "1.8.0+cu126", "fbgemm_gpu_cpu": None},
            "fbgemm-gpu 1.8.0+cu126 is built for CUDA 12.6, but torch 2.13.0 is built for CUDA 13.0",
            "pip install --no-deps --force-reinstall fbgemm-gpu==1.8.0",
        ),
        (
            {"cuda": None, "fbgemm_gpu": "1.8.0", "fbgemm_gpu_cpu": None},
            "fbgemm-gpu 1.8.0 is built for CUDA, but torch 2.13.0 is built for CPUs",
            "pip install --no-deps fbgemm-gpu-cpu==1.8.0",
        ),
        ({"fbgemm_gpu": "1.8.0+cu130", "fbgemm_gpu_cpu": None}, None, None),
    ],
)
def test_mismatched_fbgemm_builds_are_rejected(set_installed_versions, found, what, do):
    set_installed_versions(**found)
    if not what:
        return versions.require_versions()
    with pytest.raises(RunError) as error:
        versions.require_versions()
    assert error.value.what == what and do in error.value.do


def test_session_checks_versions_first(set_installed_versions, monkeypatch):
    from raytrec.cluster import session

    set_installed_versions(ray="2.61.0")
    monkeypatch.setattr(session, "use_token", lambda **_: pytest.fail("started before the check"))
    monkeypatch.setattr("ray.is_initialized", lambda: pytest.fail("Ray used before the check"))
    with pytest.raises(RunError, match=r"ray 2\.61\.0"), session.ray_session():
        pass


def test_each_rank_checks_versions_first(set_installed_versions):
    from raytrec.worker.context import WorkerContext

    set_installed_versions(torchrec="1.7.0")
    with pytest.raises(RunError, match=r"torchrec 1\.7\.0"):
        WorkerContext.enter(SimpleNamespace())


def test_version_check_imports_no_upstream_package():
    code = "import sys; from raytrec.compat.versions import *; require_versions(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"ray", "torch", "torchrec", "fbgemm_gpu", "mlflow", "pyarrow"} & {*done.stdout.split()}


def test_requirements_match_the_version_list():
    """The versions in pyproject.toml and requirements/ match the versions that raytrec checks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    for file in ("base.in", "cpu.in", "cuda.in", "notebook.in"):
        lines += (ROOT / "requirements" / file).read_text().splitlines()
    asked = {}
    for line in lines:
        if not line.startswith(("#", "-")):
            requirement = Requirement(line)
            asked.setdefault(requirement.name, set()).add(str(requirement.specifier))
    for name, pin in versions.PAIRS[CPU].items():
        assert asked[name] == {f"=={pin}"}
    assert asked["ray"] == {f"=={pin}" for pin in versions.SUPPORTED_VERSIONS["ray"]}
    for name in ("mlflow", "pyarrow"):
        first, last = versions.SUPPORTED_VERSIONS[name]
        *series, number = last.split(".")
        after = ".".join([*series, str(int(number) + 1)])
        assert asked[name] == {f"=={first}.*", f"<{after},>={first}"}
    pinned = dict(re.findall(r"^([a-z-]+)==(.+)$", (ROOT / "requirements/next.txt").read_text(), re.MULTILINE))
    pair = {name: (pin,) for name, pin in versions.PAIRS[NEXT].items() if name != "fbgemm-gpu"}
    for name, pins in (pair | versions.SUPPORTED_VERSIONS).items():
        assert versions._matches(pinned[name], pins[-1]), f"{name} {pinned[name]} in next.txt"


def test_missing_private_name_is_reported_with_the_version():
    with pytest.raises(RunError, match=r"torchrec 1\.[89]\.\d has no SimpleNamespace\._lookups") as error:
        versions.private(SimpleNamespace(), "_lookups", "torchrec")
    assert error.value.expected == "torchrec 1.8.0 or 1.9, which has SimpleNamespace._lookups"
