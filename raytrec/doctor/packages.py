"""Checks of a host's torch, FBGEMM and GPUs, made in child processes."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from raytrec.cluster.host_checks import FAILURE, OK, Diagnosis, Found, has_gpus, host_check
from raytrec.common.machine import OTHER_DEVICE, built_for, gpu_kinds, not_served, usable_gpus
from raytrec.compat.versions import PAIRS, wrong_versions
from raytrec.doctor.child import ChildError, load_fbgemm, run_child, use_gpu

LOAD_S, GPU_S = 120.0, 120.0  # a first import from a network's file system takes long
PINNED, *_ = PAIRS
CUDA_LIBRARY = re.compile(r"lib(cud|cublas|cufft|curand|cusparse|cusolver|nccl|nv)\w*\.so")
OLD_SYSTEM = re.compile(r"version `?(GLIBC|GLIBCXX|CXXABI)_")


@host_check("operators", LOAD_S + 5)
def operators() -> Found:
    """FBGEMM's libraries load: the loader's first error, which `No such operator fbgemm::…` hides."""
    if built_for() is None:
        yield Diagnosis(OK, "not looked at: torch is not installed")
        return
    try:
        files = run_child(load_fbgemm, limit_s=LOAD_S)
    except ChildError as error:
        yield Diagnosis(FAILURE, str(error), _repair(str(error)))
    else:
        yield Diagnosis(OK, f"loaded from {files['fbgemm_gpu']}, with {files['torch']}")


def _repair(error: str) -> str:
    """What to do about an error of the loader."""
    if wrong := wrong_versions():
        return wrong.do
    again = f"pip install --no-deps --force-reinstall -r requirements/{PINNED}"
    if "undefined symbol" in error:
        return f"torch and FBGEMM are not of one release, whatever their metadata: {again}"
    if CUDA_LIBRARY.search(error):
        return (
            "the packages are built for CUDA, whose libraries are missing: install requirements/cuda.txt; "
            f"without a GPU: {OTHER_DEVICE.format(device='cpu')}"
        )
    if OLD_SYSTEM.search(error):
        return (
            "this system's C libraries are too old for the wheels: take a newer one, or an image of deploy/"
        )
    return f"{again} (docs/install.md)"


@host_check("gpus", GPU_S + 5)
def gpus() -> Found:
    """Each GPU runs an operator of FBGEMM's, and waits for no reset."""
    kinds, names = gpu_kinds(), usable_gpus()
    if built_for() != "cuda" or not has_gpus():
        yield Diagnosis(OK, "not needed: no GPU, or packages for CPUs")
        return
    if not kinds:
        what, do = "NVML names no GPU that this process may use", "nvidia-smi; look at CUDA_VISIBLE_DEVICES"
        yield Diagnosis(FAILURE, what, do)
    with ThreadPoolExecutor(len(kinds) or 1) as pool:
        yield from pool.map(_try_gpu, names or map(str, range(len(kinds))), kinds)


def _try_gpu(name: str, kind: tuple[str, tuple[int, int]]) -> Diagnosis:
    """
    Args:
        name: its number or UUID, as in CUDA_VISIBLE_DEVICES. kind: as of gpu_kinds.
    """
    about = f"GPU {name}, {kind[0]} ({'.'.join(map(str, kind[1]))})"
    if error := not_served(kind, "this host"):
        return Diagnosis(FAILURE, f"{about}: {error.what}; expected {error.expected}", error.do)
    try:
        run_child(use_gpu, limit_s=GPU_S, CUDA_VISIBLE_DEVICES=name)
        return Diagnosis(OK, f"{about} runs FBGEMM's operators")
    except (ChildError, TimeoutError) as failed:
        do = "use GPUs that the wheel has code for (docs/gpu.md)" if "kernel image" in str(failed) else ""
        do = do or "nvidia-smi -q: look at this GPU; see `operators` and `driver`"
        return Diagnosis(FAILURE, f"{about}: {failed}", do)
