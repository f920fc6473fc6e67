"""Other versions than those that raytrec is made for are refused before anything starts."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from raytrec.common.errors import RunError
from raytrec.compat import versions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def other(monkeypatch):
    """Lets packages seem to be of another version: torch="2.14.0"; None: not installed."""

    def install(**found):
        known = versions.installed
        by_name = {name.replace("_", "-"): version for name, version in found.items()}
        monkeypatch.setattr(
            versions, "installed", lambda name: by_name[name] if name in by_name else known(name)
        )

    return install


def test_what_is_installed_is_what_is_pinned():
    versions.require_versions()


def test_all_that_is_wrong_is_one_message(other):
    other(torch="2.14.0+cpu", ray="2.60.1", mlflow="3.17.9")
    with pytest.raises(RunError) as error:
        versions.require_versions()
    assert "ray 2.60.1, torch 2.14.0+cpu" in error.value.what and "mlflow" not in error.value.what
    assert error.value.expected == "ray 2.60.0, torch 2.13.0" and "requirements/" in error.value.do


@pytest.mark.parametrize(
    "found, good",
    [("25.0.1", True), ("25.9", True), ("26.0.0", False), ("2.5.0", False), ("250.1", False)],
)
def test_a_series_is_any_of_its_versions(other, found, good):
    other(pyarrow=found)
    if good:
        return versions.require_versions()
    with pytest.raises(RunError, match="pyarrow"):
        versions.require_versions()


def test_a_driver_does_without_torch(other):
    other(torch=None, torchrec=None, fbgemm_gpu_cpu=None, fbgemm_gpu=None)
    versions.require_versions()


def test_a_session_begins_with_it(other, monkeypatch):
    from raytrec.cluster import session

    other(ray="2.61.0")
    monkeypatch.setattr(session, "use_token", lambda **_: pytest.fail("something was started before"))
    monkeypatch.setattr("ray.is_initialized", lambda: pytest.fail("Ray was asked before"))
    with pytest.raises(RunError, match=r"ray 2\.61\.0"), session.ray_session():
        pass


def test_each_rank_begins_with_it(other):
    from raytrec.worker.context import WorkerContext

    other(torchrec="1.9.0")
    with pytest.raises(RunError, match=r"torchrec 1\.9\.0"):
        WorkerContext.enter(SimpleNamespace())


def test_it_imports_none_of_them():
    code = "import sys; from raytrec.compat.versions import *; require_versions(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"ray", "torch", "torchrec", "fbgemm_gpu", "mlflow", "pyarrow"} & {*done.stdout.split()}


def test_one_list_of_versions():
    """Those of the package and of requirements/ are the ones that are compared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [
        line for extra in project["optional-dependencies"].values() for line in extra
    ]
    for file in (ROOT / "requirements").glob("*.in"):
        lines += file.read_text().splitlines()
    pins = [re.match(r"([a-z-]+)(?:\[.*\])?==([\d.]+?)(?:\.\*)?$", line) for line in lines]
    found = {(pin[1], pin[2]) for pin in pins if pin}
    assert found == set(versions.PINNED.items())


def test_a_name_that_has_moved_is_said_with_its_version():
    with pytest.raises(RunError, match=r"torchrec 1\.8\.0 has no SimpleNamespace\._lookups") as error:
        versions.private(SimpleNamespace(), "_lookups", "torchrec")
    assert "torchrec 1.8.0" in error.value.expected
