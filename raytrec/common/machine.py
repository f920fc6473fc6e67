"""Query this machine's GPUs (through NVML), installed packages and compilers.

NVML creates no context on GPUs. GPUs are named as in CUDA_VISIBLE_DEVICES. Only check_gpu imports torch, which takes
seconds; the driver does not call it.
"""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, TypeVar

from raytrec.common.errors import ConfigError, GpuFailedError

T = TypeVar("T")


def list_visible_gpus() -> list[str]:
    """Return the GPU numbers or UUIDs in CUDA_VISIBLE_DEVICES; [] if it is not set (all GPUs) or empty (no GPU)."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [name.strip() for name in names if name.strip()]


def list_usable_gpus() -> list[str]:
    """Return the numbers or UUIDs of the visible GPUs, or [] if NVML cannot be queried."""
    return _query_gpus(lambda nvml, name: name)


def get_gpu_handle(name: str) -> Any:
    """Return NVML's handle for the GPU with this number or UUID; NVML must be initialized.

    Raises:
        pynvml.NVMLError: There is no such GPU, or it cannot be accessed.
    """
    import pynvml

    by_number, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    return by_number(int(name)) if name.isdigit() else by_uuid(name)


def get_cuda_handle(device: str) -> Any:
    """Return NVML's handle for a torch device, where cuda:0 is the first visible GPU; NVML must be initialized.

    Raises:
        IndexError: CUDA_VISIBLE_DEVICES has fewer entries.
        pynvml.NVMLError: As for `get_gpu_handle`.
    """
    index, visible = int(device.partition(":")[2] or 0), list_visible_gpus()
    return get_gpu_handle(visible[index] if visible else str(index))


def get_smallest_gpu_memory() -> int | None:
    """Return the usable memory in bytes of the visible GPU with the least memory.

    As in torch's total_memory, memory reserved by the driver is excluded. The result is None without GPUs, if NVML
    cannot read a GPU, or if a GPU is a MIG instance or is divided into MIG instances.
    """
    return min(_query_gpus(_read_usable_memory), default=None)


def list_gpu_kinds() -> list[tuple[str, tuple[int, int]]]:
    """Return (name, (major, minor compute capability)) of each visible GPU, or [] if NVML cannot read all of them."""
    return _query_gpus(_read_gpu_kind)


def _query_gpus(read: Callable[[Any, str], T]) -> list[T]:
    """Return `read(nvml, number or UUID)` for each visible GPU, or [] if any GPU cannot be read."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []

    def read_all(nvml: Any) -> list[T]:
        return [read(nvml, name) for name in list_visible_gpus() or map(str, range(nvml.nvmlDeviceGetCount()))]

    return _query_nvml(read_all) or []


def _query_nvml(ask: Callable[[Any], T]) -> T | None:
    """Return `ask(nvml)` with NVML initialized, or None if NVML is not available or the query fails."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, or no driver
        return None
    try:
        return ask(pynvml)
    except (pynvml.NVMLError, ValueError, LookupError, AttributeError):  # AttributeError: NVML is too old
        return None
    finally:
        pynvml.nvmlShutdown()


def _read_gpu_kind(nvml: Any, name: str) -> tuple[str, tuple[int, int]]:
    handle = get_gpu_handle(name)
    return nvml.nvmlDeviceGetName(handle), tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))


def _read_usable_memory(nvml: Any, name: str) -> int:
    """Return the memory in bytes that programs can use on a GPU.

    Raises:
        ValueError: The GPU is divided into MIG instances, or is a MIG instance.
    """
    if name.startswith("MIG"):
        raise ValueError(name)
    handle = get_gpu_handle(name)
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            raise ValueError(name)
    except nvml.NVMLError:  # a GPU without MIG
        pass
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return memory.total - memory.reserved


PACKAGES = ("raytrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "ray")
# Advice for an environment that was installed for another device; see requirements/install.py.
REINSTALL_ADVICE = "run `make clean`, then `make install DEVICE={device}` (without make: docs/install.md)"

# Compute capabilities for which PyPI's fbgemm-gpu has machine code; it has no PTX (cuobjdump --list-elf,
# --list-ptx): 1.8.0 for sm_80, sm_90a and sm_100a; 1.9.0 for sm_80, sm_90a and sm_100. Code with an "a" runs
# only on that capability; other code also runs on newer capabilities of the same major version.
_COMMON_CAPABILITIES = frozenset({(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0)})
FBGEMM_CAPABILITIES = {"1.8.0": _COMMON_CAPABILITIES, "1.9.0": _COMMON_CAPABILITIES | {(10, 3)}}


def check_fbgemm_support(kind: tuple[str, tuple[int, int]], host: str) -> ConfigError | None:
    """Return an error if the installed fbgemm-gpu has no machine code for a GPU, else None.

    The result is also None if fbgemm-gpu is not installed, or if its version is not in FBGEMM_CAPABILITIES.

    Args:
        kind: Name and compute capability of the GPU.
        host: Host of the GPU, for the error.
    """
    package = get_installed_version("fbgemm-gpu")
    supported = FBGEMM_CAPABILITIES.get((package or "").partition("+")[0])
    gpu, capability = kind
    if not supported or capability in supported:
        return None
    return ConfigError(
        f"fbgemm-gpu {package} has no code for {gpu} (compute capability {'.'.join(map(str, capability))})",
        where=host,
        expected="an A100, A10G, L4, L40S, H100, H200, B200 or other GPU with one of the compute capabilities "
        + ", ".join(f"{a}.{b}" for a, b in sorted(supported)),
        do="use a supported GPU (docs/gpu.md), or set scaling.device=cpu",
    )


# Recovery that NVIDIA's driver (565 or newer) requires before a GPU is used again, such as after memory errors (Xid).
_RECOVERY_ACTIONS = {
    "GPU_RESET": "a reset (nvidia-smi --gpu-reset)",
    "NODE_REBOOT": "a reboot of its host",
    "DRAIN_AND_RESET": "a reset after all processes on it have ended",
    "BUS_RESET": "a reset of its bus",
    "SYSTEM_REBOOT": "a reboot of its host",
}


def find_needed_recovery(device: str) -> str | None:
    """Return a noun phrase for the recovery that a torch device such as cuda:0 needs before its next use.

    The result is None if no recovery is needed, or if NVML cannot report it.
    """

    def ask(nvml: Any) -> str | None:
        fields = [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        (field,) = nvml.nvmlDeviceGetFieldValues(get_cuda_handle(device), fields)
        names = {getattr(nvml, f"NVML_GPU_RECOVERY_ACTION_{name}", None): name for name in _RECOVERY_ACTIONS}
        is_valid = field.nvmlReturn == nvml.NVML_SUCCESS
        return _RECOVERY_ACTIONS.get(names.get(field.value.uiVal, "")) if is_valid else None

    return _query_nvml(ask)


def bind_to_gpu_node(device: str) -> None:
    """Restrict all threads of this process to the CPUs of the NUMA node of a torch device such as cuda:0.

    Nothing changes if these CPUs are unknown, or if the process may use none of them.
    """

    def ask(nvml: Any) -> set[int]:
        words = nvml.nvmlDeviceGetCpuAffinity(get_cuda_handle(device), -(-(os.cpu_count() or 1) // 64))
        return {64 * number + bit for number, word in enumerate(words) for bit in range(64) if word >> bit & 1}

    if cpus := (_query_nvml(ask) or set()) & os.sched_getaffinity(0):
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(thread), cpus)


def get_installed_version(package: str) -> str | None:
    """Return the version of a package in this environment, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def get_installed_versions(*more: str) -> dict[str, str]:
    """Return a mapping of the installed packages among PACKAGES and `more` to their versions."""
    return {package: found for package in (*PACKAGES, *more) if (found := get_installed_version(package))}


def get_build_device() -> str | None:
    """Return "cuda" if torch is built for CUDA and fbgemm-gpu-cpu is not installed, else "cpu"; None without torch.

    The packages fbgemm-gpu and fbgemm-gpu-cpu share a folder, so an environment with both is broken.
    """
    if not get_installed_version("torch"):
        return None
    return "cuda" if get_torch_cuda_version() and not get_installed_version("fbgemm-gpu-cpu") else "cpu"


def get_torch_cuda_version() -> str | None:
    """Return the CUDA version (X.Y) for which torch is built; None if torch is built for CPUs, missing or damaged."""
    try:
        file = distribution("torch").locate_file("torch/version.py")
        # The file contains only constants. PyPI's builds have no version suffix, such as +cu130, that names CUDA.
        return runpy.run_path(str(file)).get("cuda")
    except (PackageNotFoundError, OSError):  # OSError: a file of the package is missing
        return None


def get_driver_versions() -> tuple[str, str] | None:
    """Return the versions of NVIDIA's driver and of the newest CUDA (X.Y) that it supports.

    The result is None if there is no driver, or its versions cannot be read.
    """

    def ask(nvml: Any) -> tuple[str, str]:
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return nvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}"

    return _query_nvml(ask)


def check_gpu(host: str) -> None:
    """Check each GPU that torch sees in this process; called in workers and the doctor's child processes.

    Args:
        host: Address of this host, for the error.

    Raises:
        GpuFailedError: NVIDIA's driver requires a recovery of a GPU.
        ConfigError: torch cannot use GPUs here, or FBGEMM has no code for a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        what = f"torch {torch.__version__} cannot use the GPU of {host}"
        if built := torch.version.cuda:
            expected = f"a visible GPU, and NVIDIA's driver for CUDA {built} or newer (nvidia-smi shows its version)"
            do = (
                "run nvidia-smi on this host; install or update the driver if it fails or shows an older version, "
                "otherwise check CUDA_VISIBLE_DEVICES and the access of containers to GPUs"
            )
        else:
            what += ": this build of torch is for CPUs"
            expected = "the packages of requirements/cuda.txt on all machines with GPUs"
            do = REINSTALL_ADVICE.format(device="cuda")
        raise ConfigError(what, where=host, expected=expected, do=do)
    for index in range(torch.cuda.device_count()):
        kind = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        if error := check_fbgemm_support(kind, host):
            raise error
        if recovery := find_needed_recovery(f"cuda:{index}"):
            name = (list_visible_gpus() or {index: str(index)})[index]
            error = GpuFailedError(
                f"GPU {name} of {host} has failed: its driver requires {recovery}",
                where=host,
                expected="GPUs that need no recovery (nvidia-smi -q: GPU Recovery Action)",
                do="recover the GPU or remove the node from the cluster, and start or resume the run",
            )
            error.place = "", name
            raise error


def require_compiler(device: str) -> None:
    """Raise a ConfigError if this machine lacks a compiler, Python's headers or (for GPUs) Triton for train.compile.

    For CPUs, torch (2.13.0) compiles C++ extension modules. For GPUs, it compiles Triton kernels, whose launchers need
    a C compiler.

    Args:
        device: Device on which compiled models run: "cpu" or "cuda".
    """
    names = [os.environ.get("CXX", "g++")] if device == "cpu" else [os.environ.get("CC", "gcc"), "clang"]
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    problem = None
    if not any(shutil.which(name) for name in names):
        problem = f"there is no {'C++' if device == 'cpu' else 'C'} compiler ({' or '.join(names)})"
    elif not headers.is_file():
        problem = f"Python's headers are missing ({headers})"
    elif device == "cuda" and not get_installed_version("triton"):
        problem = "the package triton is not installed"
    if problem:
        raise ConfigError(
            f"train.compile is set, but {problem}",
            where=f"train.compile, {socket.gethostname()}",
            expected="the requirements of torch.compile on every node with workers",
            do="install the missing requirement, or set train.compile=false",
        )
