"""Tests of requirements/install.py and the Makefile's DEVICE, with small wheels in local indexes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

REPOSITORY = Path(__file__).parents[1]
UNREACHABLE_INDEX = "http://127.0.0.1:9/simple"  # refuses connections
TORCH_VERSION = "2.13.0"

# PyPI's torch raises this error on import without the CUDA libraries (torch 2.13.0, torch/__init__.py:312).
CUDA_TORCH_SOURCE = "raise ValueError('libcublasLt.so.*[0-9] not found in the system path')\n"
CPU_TORCH_SOURCE = "__version__ = '2.13.0+cpu'\n"


def make_wheel(folder: Path, name: str, version: str, module: str, text: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{version}"
    info = f"{stem}.dist-info"
    files = {
        f"{module}/__init__.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, content in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(path, content)


def make_index(wheels: Path) -> str:
    """Write a simple package index next to a folder of wheels and return its file:// URL."""
    root = wheels.parent / f"{wheels.name}-simple"
    for wheel in wheels.glob("*.whl"):
        project = root / wheel.name.partition("-")[0].replace("_", "-")
        project.mkdir(parents=True, exist_ok=True)
        page = project / "index.html"
        before = page.read_text() if page.exists() else ""
        page.write_text(f'{before}<a href="{wheel.as_uri()}">{wheel.name}</a>\n')
    return root.as_uri()


class InstallEnvironment:
    """A virtual environment, a shortened requirements/ folder, and local package indexes.

    Attributes:
        pypi: URL of an index like PyPI, with the CUDA build of torch and both builds of FBGEMM.
        pytorch: URL of an index like PyTorch's CPU index.
        wheels: folder with the CPU build of torch.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        make_wheel(folder / "pypi", "torch", TORCH_VERSION, "torch", CUDA_TORCH_SOURCE)
        make_wheel(folder / "pypi", "fbgemm_gpu", "1.8.0", "fbgemm_gpu")
        make_wheel(folder / "pypi", "fbgemm_gpu_cpu", "1.8.0", "fbgemm_gpu")
        self.wheels = folder / "pytorch"
        make_wheel(self.wheels, "torch", f"{TORCH_VERSION}+cpu", "torch", CPU_TORCH_SOURCE)
        self.pypi, self.pytorch = make_index(folder / "pypi"), make_index(self.wheels)
        requirements = folder / "requirements"
        requirements.mkdir()
        shutil.copy(REPOSITORY / "requirements/install.py", requirements)
        (requirements / "cpu.txt").write_text(f"fbgemm-gpu-cpu==1.8.0\ntorch=={TORCH_VERSION}\n    # via torchrec\n")
        (requirements / "cuda.txt").write_text(f"fbgemm-gpu==1.8.0\ntorch=={TORCH_VERSION}\n")
        venv.create(folder / "env")  # without pip, as in deploy/Dockerfile; the outer pip installs into it

    def install(self, *arguments: str, index: str = UNREACHABLE_INDEX, **pip: str) -> subprocess.CompletedProcess:
        """Run the install script with `index` as --torch-index."""
        script = self.folder / "requirements/install.py"
        return self.run(script, *arguments, "--torch-index", index, **pip)

    def run(self, *command: str | Path, check: bool = False, **pip: str) -> subprocess.CompletedProcess:
        """Run Python with pip configured only by the `pip` settings (INDEX_URL=…)."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_PYTHON": str(self.folder / "env/bin/python")}
        env |= {"PIP_INDEX_URL": self.pypi} | {f"PIP_{name}": value for name, value in pip.items()}
        options = {"env": env, "capture_output": True, "text": True, "timeout": 120, "check": check}
        return subprocess.run([sys.executable, *command], **options)

    def version(self) -> str:
        """Return the version of the installed torch, or the last line of its import error."""
        code = "import torch; print(torch.__version__)"
        done = subprocess.run([self.folder / "env/bin/python", "-c", code], capture_output=True, text=True, timeout=60)
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.fixture
def install_environment(tmp_path):
    return InstallEnvironment(tmp_path)


@pytest.mark.survive
def test_install_script_replaces_cuda_torch_on_cpu(install_environment):
    """pip and the pinned file alone install the CUDA build; the script replaces it with the CPU build."""
    file = install_environment.folder / "requirements/cpu.txt"
    install_environment.run("-m", "pip", "install", "--no-deps", "-r", file, check=True)
    assert "libcublasLt" in install_environment.version()
    done = install_environment.install("cpu", index=install_environment.pytorch)
    assert done.returncode == 0, done.stderr
    assert install_environment.version() == f"{TORCH_VERSION}+cpu"


@pytest.mark.survive
def test_install_uses_find_links_without_index(install_environment):
    links = f"{install_environment.wheels} {install_environment.folder / 'pypi'}"
    done = install_environment.install("cpu", INDEX_URL=UNREACHABLE_INDEX, FIND_LINKS=links, RETRIES="0")
    assert done.returncode == 0, done.stderr
    assert install_environment.version() == f"{TORCH_VERSION}+cpu"


@pytest.mark.survive
def test_install_takes_cpu_torch_from_pytorch_index(install_environment):
    done = install_environment.install("cpu", "--only-binary", ":all:", index=install_environment.pytorch)
    assert done.returncode == 0, done.stderr
    assert install_environment.version() == f"{TORCH_VERSION}+cpu"
    again = install_environment.install("cpu", INDEX_URL=UNREACHABLE_INDEX)  # installed packages need no index
    assert again.returncode == 0 and "Retrying" not in again.stderr, again.stderr


@pytest.mark.slow
def test_install_fails_without_cpu_build(install_environment):
    done = install_environment.install("cpu")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"error: found no CPU build of torch {TORCH_VERSION}" in done.stderr
    assert UNREACHABLE_INDEX in done.stderr and "TORCH_INDEX=URL" in done.stderr and "PIP_FIND_LINKS" in done.stderr
    assert "ModuleNotFoundError" in install_environment.version(), "a wrong build of torch is still installed"


@pytest.mark.survive
def test_install_rejects_torch_build_chosen_by_pip_option(install_environment):
    # Reinstalls torch from PyPI.
    done = install_environment.install("cpu", "--force-reinstall", index=install_environment.pytorch)
    assert done.returncode == 1, done.stdout
    assert f"error: torch {TORCH_VERSION} is not the build for cpu" in done.stderr
    assert "make clean" in done.stderr


@pytest.mark.survive
def test_install_error_names_package_without_wheel(install_environment):
    """A source distribution is not compiled, because that would print pages of compiler messages."""
    folder = install_environment.folder / "pypi-simple/old-kernel"
    folder.mkdir()
    (folder / "index.html").write_text('<a href="old-kernel-1.0.tar.gz">old-kernel-1.0.tar.gz</a>')
    with (install_environment.folder / "requirements/cpu.txt").open("a") as file:
        file.write("old-kernel==1.0\n")
    done = install_environment.install("cpu", index=install_environment.pytorch)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "No matching distribution found for old-kernel==1.0" in done.stderr
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    assert f"error: pip could not install cpu.txt for {version}" in done.stderr and "PYTHON=" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "device,other,torch", [("cpu", "cuda", f"{TORCH_VERSION}+cpu"), ("cuda", "cpu", "libcublasLt")]
)
def test_environment_rejects_install_for_other_device(install_environment, device, other, torch):
    """The cuda install takes PyPI's torch even if pip finds (and would prefer) the CPU build."""
    done = install_environment.install(device, FIND_LINKS=str(install_environment.wheels))
    assert done.returncode == 0 and torch in install_environment.version(), done.stderr
    assert UNREACHABLE_INDEX not in done.stdout + done.stderr, "PyTorch's index was queried"
    done = install_environment.install(other, FIND_LINKS=str(install_environment.wheels))
    assert done.returncode == 1 and torch in install_environment.version()
    assert f"error: this environment is for {device}" in done.stderr and "make clean" in done.stderr


@pytest.fixture(scope="module")
def install_script():
    spec = importlib.util.spec_from_file_location("install", REPOSITORY / "requirements/install.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(
    "version, good", [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), True), ((3, 15), False)]
)
def test_install_rejects_python_without_wheels(install_script, version, good):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert (f"{version[0]}.{version[1]}" in SpecifierSet(project["requires-python"])) == good
    if good:
        return install_script.refuse_other_python(version)
    with pytest.raises(install_script.InstallError, match=r"Python 3\.1[05]\n.*\n  expected: Python 3\.11 to 3\.14"):
        install_script.refuse_other_python(version)


@pytest.mark.parametrize("driver,good", [("570.86.15", False), ("580.65.06", True), (None, True)])
def test_install_rejects_old_driver(install_script, tmp_path, driver, good):
    file = tmp_path / "version"
    if driver:
        file.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Mon Jan 27 2025\n")
    if good:
        return install_script.refuse_old_driver(file)
    with pytest.raises(
        install_script.InstallError, match=f"driver {driver} is(.|\n)*580 or newer(.|\n)*cuda-compat-13-0"
    ):
        install_script.refuse_old_driver(file)


@pytest.mark.parametrize("local,good", [("", True), ("+cu130", True), ("+cu126", False), ("+cpu", False)])
def test_right_torch_requires_matching_cuda_version(install_script, local, good):
    assert install_script.is_right_torch("cuda", f"{TORCH_VERSION}{local}", TORCH_VERSION) == good


def test_requirements_pin_expected_torch(install_script):
    for device in install_script.FBGEMM:
        text = (REPOSITORY / f"requirements/{device}.txt").read_text()
        assert f"\n{install_script.FBGEMM[device]}==" in text and f"\ntorch=={TORCH_VERSION}\n" in text
    assert install_script.is_right_torch("cuda", "2.13.0+cu130", TORCH_VERSION) and not install_script.is_right_torch(
        "cuda", "", TORCH_VERSION
    )


def run_make(
    folder: Path, *arguments: str, stamps: tuple[str, ...] = (), path: Path | None = None
) -> subprocess.CompletedProcess:
    """Run `make -n` with a .venv installed for the devices `stamps`; `path` replaces PATH."""
    shutil.copy(REPOSITORY / "Makefile", folder)
    for name in ("requirements/cpu.txt", "requirements/cuda.txt", "requirements/dev.txt", "pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    for device in stamps:
        stamp = folder / f".venv/installed-{device}"
        stamp.parent.mkdir(exist_ok=True)
        stamp.touch()
    left_out = ("DEVICE", "MAKEFLAGS", "MAKELEVEL", "PYTHON")  # set by the make that runs the tests
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"PATH": str(path)} if path else {}
    return subprocess.run(
        [shutil.which("make"), "-n", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=30
    )


@pytest.mark.slow
def test_make_installs_for_cpu_by_default(tmp_path):
    assert "install.py cpu -r requirements/dev.txt" in run_make(tmp_path, "train").stdout
    assert "install.py cuda" in run_make(tmp_path, "install", "DEVICE=cuda").stdout
    mirror = run_make(tmp_path, "install", "TORCH_INDEX=https://mirror/whl/cpu").stdout
    assert "--torch-index https://mirror/whl/cpu" in mirror


def test_make_remembers_the_device(tmp_path):
    for goal in ("train", "test", "install"):
        done = run_make(tmp_path, goal, stamps=("cuda",))
        assert done.returncode == 0 and ".py" not in done.stdout, done.stdout
    os.utime(tmp_path / ".venv/installed-cuda", (0, 0))  # older than the pins
    assert "install.py cuda" in run_make(tmp_path, "train").stdout


@pytest.mark.parametrize("stamps", [("cuda",), ("cpu", "cuda")])
def test_make_rejects_other_device(tmp_path, stamps):
    done = run_make(tmp_path, "test", "DEVICE=cpu", stamps=stamps)
    assert done.returncode and "make clean" in done.stderr and ".venv is for" in done.stderr
    assert run_make(tmp_path, "clean", "DEVICE=cpu", stamps=stamps).returncode == 0


def make_fake_pythons(folder: Path, **commands: str) -> Path:
    """Create a folder with shell scripts, command name → script body."""
    folder.mkdir()
    for name, text in commands.items():
        file = folder / name.replace("_", ".")
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    return folder


def test_make_selects_newest_python_with_venv(tmp_path):
    shim, without_venv, good = "exit 127", 'case "$*" in *ensurepip*) exit 1; esac', "exit 0"
    path = make_fake_pythons(tmp_path / "two", python3_13=shim, python3_12=good, python3_11=good)
    assert run_make(tmp_path, "install", path=path).stdout.startswith("python3.12 -m venv .venv\n")
    path = make_fake_pythons(tmp_path / "one", python3_12=without_venv, python3_11=good)
    assert run_make(tmp_path, "install", path=path).stdout.startswith("python3.11 -m venv .venv\n")
    named = run_make(tmp_path, "install", "PYTHON=/opt/python3.14", path=path).stdout
    assert named.startswith("/opt/python3.14 -m venv .venv\n")


def test_make_error_lists_supported_pythons(tmp_path):
    path = make_fake_pythons(tmp_path / "old", python3="exit 0", python3_10="exit 0", python3_12="exit 1")
    done = run_make(tmp_path, "train", path=path)
    assert done.returncode and "found no Python 3.11 to 3.13 with venv" in done.stderr
    assert "python3.12-venv" in done.stderr and "PYTHON=/path/to/python3" in done.stderr
    done = run_make(tmp_path, "install", path=path, stamps=("cpu",))
    assert done.returncode == 0, "an installed .venv must not need a system Python"
