"""Checks of a host that do not import torch, for `raytrec doctor` and for `raytrec train` before Ray starts."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

from raytrec.cluster.access import AUTH_MODE_VARIABLE, TOKEN, token_file
from raytrec.cluster.local_ray import RAY_TMPDIR_VARIABLE, find_base_folder, listens
from raytrec.common.errors import RaytrecError, get_first_line
from raytrec.common.formatting import format_percent
from raytrec.common.machine import (
    REINSTALL_ADVICE,
    get_build_device,
    get_driver_versions,
    get_installed_versions,
    get_torch_cuda_version,
    list_gpu_kinds,
)
from raytrec.compat.ray_core import measure_available_memory, measure_system_memory
from raytrec.compat.ray_start import CURRENT_CLUSTER_FILE, get_logs_folder
from raytrec.compat.versions import find_wrong_versions

OK, WARNING, FAILURE = "ok", "warning", "failure"
MIB, GIB = 1 << 20, 1 << 30
SHARED_MEMORY_FOLDER, NVIDIA_GPUS_FOLDER = Path("/dev/shm"), Path("/proc/driver/nvidia/gpus")
# Bytes of shared memory; the default of Docker is 64 MiB.
MIN_SHARED_MEMORY_BYTES, RECOMMENDED_SHARED_MEMORY_BYTES = 64 * MIB, GIB
MIN_OPEN_FILES, RECOMMENDED_OPEN_FILES = 1024, 8192  # open files of a process
# Each Ray process maps MIN_VIRTUAL_MEMORY_BYTES and the object store, which takes OBJECT_STORE_SHARE of main memory.
# On a host with 24 GiB, a run failed with `ulimit -v` of 12 GiB, but not of 20 GiB.
MIN_VIRTUAL_MEMORY_BYTES, OBJECT_STORE_SHARE = 12 * GIB, 0.3
MIN_MEMORY_BYTES = GIB  # a worker needs about this much before it holds any table
MIN_DISK_BYTES, RAY_MAX_DISK_SHARE = 200 * MIB, 0.95  # Ray 2.60: local_fs_capacity_threshold
DEFAULT_CHECK_LIMIT_S = 15.0


@dataclass(frozen=True)
class Diagnosis:
    """Finding of a check on one or several hosts.

    Attributes:
        result: ok, warning or failure.
        finding: Description of the state that the check found.
        do: Instructions for a repair; empty if the result is ok.
        check: Name of the check.
        hosts: Names of the hosts with this finding; empty: all hosts, or the hosts named in `finding`.
    """

    result: str
    finding: str
    do: str = ""
    check: str = ""
    hosts: tuple[str, ...] = ()


Diagnoses = Iterator[Diagnosis]
HostCheck = Callable[[], Diagnoses]
HOST_CHECKS: dict[str, tuple[HostCheck, float]] = {}  # name → function, limit in seconds
PRE_RUN_CHECKS = ("driver", "shared memory", "limits", "memory", "Ray's folder")


def host_check(name: str, limit_s: float = DEFAULT_CHECK_LIMIT_S) -> Callable[[HostCheck], HostCheck]:
    """Return a decorator that registers a check of the local host in HOST_CHECKS, with a time limit in seconds."""

    def register(function: HostCheck) -> HostCheck:
        HOST_CHECKS[name] = function, limit_s
        return function

    return register


def run_check(name: str, function: HostCheck, limit_s: float) -> list[Diagnosis]:
    """Run a check, and return its diagnoses; an exception or a timeout becomes a single diagnosis."""
    try:
        diagnoses = call_within(limit_s, lambda: list(function()))
    except Exception as error:
        diagnoses = [diagnose_error(error)]
    return [replace(diagnosis, check=name) for diagnosis in diagnoses]


def diagnose_error(error: Exception) -> Diagnosis:
    """Return the diagnosis of an exception; errors of unexpected classes count as failures of the check itself."""
    if isinstance(error, ModuleNotFoundError):
        return Diagnosis(FAILURE, f"{error.name} is not installed", "install it (docs/install.md)")
    if isinstance(error, TimeoutError):
        return Diagnosis(FAILURE, get_first_line(error), "find out why this host is slow; a shared mount may hang")
    if not isinstance(error, RaytrecError):
        what = f"the check itself failed: {type(error).__name__}: {get_first_line(error)}"
        return Diagnosis(FAILURE, what, "report this with `raytrec doctor --share`")
    what = " ".join(error.what.split()) + (f"; expected {error.expected}" if error.expected else "")
    return Diagnosis(FAILURE, what, error.do or f"provide {error.expected or 'a valid value'}")


def call_within(limit_s: float, function: Callable[[], Any]) -> Any:
    """Call a function in a thread, and return its result or raise its exception.

    A function that exceeds the limit (in seconds) continues to run in its thread.

    Raises:
        TimeoutError: The function has not returned in time.
    """
    answer: Future[Any] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=call, daemon=True).start()
    if wait([answer], limit_s).not_done:
        raise TimeoutError(f"no response within {limit_s:.0f} s")
    return answer.result()


def check_before_run() -> list[str]:
    """Run PRE_RUN_CHECKS, which take milliseconds, and return a text for each warning or failure."""
    diagnoses = [diagnosis for name in PRE_RUN_CHECKS for diagnosis in run_check(name, *HOST_CHECKS[name])]
    return [f"{v.check}: {v.finding}; {v.do}" for v in diagnoses if v.result != OK]


def has_gpus() -> bool:
    """Return True if this host has NVIDIA GPUs, even if no installed package can query them."""
    return (NVIDIA_GPUS_FOLDER.is_dir() and any(NVIDIA_GPUS_FOLDER.iterdir())) or bool(list_gpu_kinds())


@host_check("packages")
def check_packages() -> Diagnoses:
    """Check that the installed torch, TorchRec, FBGEMM, Ray, MLflow and pyarrow have supported versions and builds."""
    if error := find_wrong_versions():
        yield diagnose_error(error)
        return
    versions = [f"{name} {version}" for name, version in get_installed_versions().items() if name != "raytrec"]
    cuda = get_torch_cuda_version()
    versions += [f"CUDA {cuda}"] if cuda else ["built for CPUs"] if get_build_device() else []
    yield Diagnosis(OK, ", ".join(versions))


@host_check("builds")
def check_builds() -> Diagnoses:
    """Check that torch and FBGEMM are built for GPUs if this host has GPUs."""
    device, gpus = get_build_device(), has_gpus()
    if device is None:
        yield Diagnosis(WARNING, "torch is not installed", "install it on workers (docs/install.md)")
    elif device == "cpu" and gpus:
        do = f"reinstall the packages for GPUs: {REINSTALL_ADVICE.format(device='cuda')}"
        what = f"there are GPUs, but {'FBGEMM' if get_torch_cuda_version() else 'torch'} is built for CPUs"
        yield Diagnosis(WARNING, f"{what}, so runs cannot use the GPUs", do)
    else:
        yield Diagnosis(OK, f"built for {device}, and this host has {'' if gpus else 'no '}GPUs")


@host_check("driver")
def check_driver() -> Diagnoses:
    """Check that the NVIDIA driver supports the major CUDA version for which torch is built."""
    if not (cuda := get_torch_cuda_version()) or not has_gpus():
        yield Diagnosis(OK, f"not needed: {'torch for GPUs is not installed' if has_gpus() else 'there is no GPU'}")
    elif (versions := get_driver_versions()) is None:
        what = "there are GPUs, but NVML cannot be queried, so the driver or nvidia-ml-py is missing or broken"
        do = "install the driver if nvidia-smi fails, else run pip install nvidia-ml-py"
        yield Diagnosis(FAILURE, what, do)
    elif int(versions[1].partition(".")[0]) < int(cuda.partition(".")[0]):
        what = f"driver {versions[0]} supports CUDA {versions[1]}, but torch is built for CUDA {cuda}"
        yield Diagnosis(FAILURE, what, "update the NVIDIA driver, or install cuda-compat (docs/gpu.md)")
    else:
        yield Diagnosis(OK, f"driver {versions[0]} supports CUDA {versions[1]}; torch requires CUDA {cuda}")


@host_check("shared memory")
def check_shared_memory() -> Diagnoses:
    """Check that /dev/shm, which Ray uses for objects and NCCL for exchanges within a host, has enough free space."""
    disk = shutil.disk_usage(SHARED_MEMORY_FOLDER)
    what = f"{SHARED_MEMORY_FOLDER} has {disk.free / GIB:,.2f} GiB free of {disk.total / GIB:,.2f} GiB"
    do = f"remove unused files in this folder, or enlarge it: mount -o remount,size=8G {SHARED_MEMORY_FOLDER}; "
    do += "docker run --shm-size=8g; in Kubernetes, an emptyDir with medium Memory"
    if disk.free >= RECOMMENDED_SHARED_MEMORY_BYTES:
        yield Diagnosis(OK, what)
    elif disk.free >= MIN_SHARED_MEMORY_BYTES or not has_gpus():
        yield Diagnosis(WARNING, f"{what}: Ray may store its objects on disk instead", do)
    else:
        yield Diagnosis(FAILURE, f"{what}: NCCL cannot start", do)


@host_check("limits")
def check_limits() -> Diagnoses:
    """Check the limits on open files, on virtual memory and, with InfiniBand, on locked memory."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    virtual, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = ["unlimited" if n == resource.RLIM_INFINITY else f"{n:,}" for n in (files, locked, virtual)]
    what = f"{limited[0]} open files, {limited[1]} bytes of locked and {limited[2]} bytes of virtual memory"
    least = MIN_VIRTUAL_MEMORY_BYTES + OBJECT_STORE_SHARE * measure_system_memory()
    if has_little_virtual := virtual != resource.RLIM_INFINITY and virtual < least:
        do = "remove the limit: ulimit -v unlimited, LimitAS=infinity (systemd); limit memory by cgroup"
        yield Diagnosis(FAILURE, f"{what}: Ray processes map more virtual memory, and exit at startup", do)
    do = "raise the limit: ulimit -n 65536, LimitNOFILE=65536 (systemd), docker run --ulimit nofile=65536"
    if files != resource.RLIM_INFINITY and files < RECOMMENDED_OPEN_FILES:
        yield Diagnosis(FAILURE if files < MIN_OPEN_FILES else WARNING, f"{what}: Ray needs more open files", do)
    elif locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        do = "set ulimit -l unlimited, LimitMEMLOCK=infinity (systemd) or docker run --ulimit memlock=-1"
        yield Diagnosis(WARNING, f"{what}: InfiniBand needs unlimited locked memory", do)
    elif not has_little_virtual:
        yield Diagnosis(OK, what)


@host_check("memory")
def check_main_memory() -> Diagnoses:
    """Check that main memory, within the container's limit, has MIN_MEMORY_BYTES available."""
    total, available = measure_system_memory(), measure_available_memory()
    what = f"{available / GIB:,.1f} GiB available of {total / GIB:,.1f} GiB"
    if available < MIN_MEMORY_BYTES:
        do = "end other processes, or raise the container's limit: Linux may kill workers without a message"
        yield Diagnosis(WARNING, what, do)
    else:
        yield Diagnosis(OK, what)


@host_check("Ray's folder")
def check_ray_folder() -> Diagnoses:
    """Check the free space of the disk on which Ray stores logs, and objects that do not fit in memory."""
    is_on_ray = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    folder = get_logs_folder() if is_on_ray else find_base_folder()
    disk = shutil.disk_usage(folder)
    what = f"{disk.free / GIB:,.1f} GiB free of {disk.total / GIB:,.1f} GiB at {folder}"
    do = f"remove old sessions from this folder, or set {RAY_TMPDIR_VARIABLE} to a folder on another disk "
    do += "before Ray starts"
    if disk.free < MIN_DISK_BYTES:
        yield Diagnosis(FAILURE, what, do)
    elif disk.used / disk.total > RAY_MAX_DISK_SHARE:
        what += f": Ray writes no objects to a disk that is more than {format_percent(RAY_MAX_DISK_SHARE)} full"
        yield Diagnosis(WARNING, what, do)
    else:
        yield Diagnosis(OK, what)


@host_check("clusters")
def check_clusters() -> Diagnoses:
    """Check that at most one Ray cluster runs on this host, and that no file still names an ended cluster."""
    import psutil

    ports = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "gcs_server":
                values = (word.partition("=")[2] for word in process.cmdline() if "gcs_server_port=" in word)
                ports.append(next(values, "?"))
    note = Path(os.environ.get(RAY_TMPDIR_VARIABLE, "/tmp")) / CURRENT_CLUSTER_FILE
    with suppress(OSError, ValueError):
        host, _, port = (address := note.read_text().strip()).rpartition(":")
        if not listens(host, int(port)):
            what = f"{note} names the cluster {address}, but no process listens there"
            yield Diagnosis(WARNING, what, f"run `ray stop`, and remove {note}, from which the address `auto` is read")
    if len(ports) > 1:
        what = f"{len(ports)} Ray clusters run on this host (GCS at ports {', '.join(sorted(ports))})"
        do = "end the clusters that are not needed (`ray stop` ends all), or use HOST:PORT instead of `auto`"
        yield Diagnosis(WARNING, what, do)
    else:
        yield Diagnosis(OK, f"{len(ports) or 'no'} Ray cluster on this host")


@host_check("token")
def check_token() -> Diagnoses:
    """Check that Ray's token file, if it exists and is used, is readable by this user and by no other user."""
    file = token_file()
    if os.environ.get(AUTH_MODE_VARIABLE, "token").lower() != "token":
        yield Diagnosis(OK, f"not used: {AUTH_MODE_VARIABLE}={os.environ[AUTH_MODE_VARIABLE]}")
    elif os.environ.get(TOKEN):
        yield Diagnosis(OK, f"set in the environment variable {TOKEN}")
    elif not file.is_file():
        yield Diagnosis(OK, f"none yet: a run that starts Ray on this host creates {file}")
    elif not os.access(file, os.R_OK):
        do = f"run `sudo chown $USER {file}`, then `chmod 600 {file}`"
        yield Diagnosis(FAILURE, f"this user cannot read {file}", do)
    elif (mode := file.stat().st_mode) & 0o077:
        do = f"run `chmod 600 {file}`; create a new token if other users may have read it, because they can run code"
        yield Diagnosis(FAILURE, f"other users can access {file} (mode {mode & 0o777:o})", do)
    else:
        yield Diagnosis(OK, f"in {file}, which only its owner can read")
