"""0: packages match the pins, the driver and the GPU; no other process uses the GPU."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from here import ROOT, BlockCannotRun, BlockContext

# CUDA version of torch 2.13 and 2.14; oldest driver that supports CUDA 13.
CUDA_VERSION, MIN_DRIVER_VERSION = "13.0", 580
PACKAGES = ("torch", "torchrec", "ray", "nvidia-nccl-cu13", "fbgemm-gpu", "fbgemm-gpu-cpu")


def run(here: BlockContext) -> None:
    import fbgemm_gpu  # noqa: F401
    import torch

    from raytrec.compat.versions import require_versions

    if here.stand_in:
        raise BlockCannotRun("a stand-in has neither a driver nor kernels")
    others = _others() if here.kind == "cuda" else []  # before this process is one of them
    fbgemm = "fbgemm-gpu" if here.kind == "cuda" else "fbgemm-gpu-cpu"
    require_versions()
    file = "next" if (installed_version("torchrec") or "").startswith("1.9.") else here.kind
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{file}.txt").read_text(), re.M))
    wrong = [
        f"{name} {installed_version(name)} is installed, but {pins[name]} is pinned"
        for name in PACKAGES
        if name in pins and (installed_version(name) or "").partition("+")[0] != pins[name].partition("+")[0]
    ]
    assert not wrong, "; ".join(wrong)
    both = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if installed_version(name)]
    assert both == [fbgemm], (
        f"{' and '.join(both)} installed; install only {fbgemm}, because both write to the same folder"
    )
    key = here.kind.upper()
    assert torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::bounds_check_indices", key), (
        f"FBGEMM has no kernels for {key}"
    )
    if here.kind == "cuda":
        _check_gpu(here)
        assert not others, f"processes {others} also use this GPU, so timings are not reliable"


def _check_gpu(here: BlockContext) -> None:
    import torch

    from raytrec.common.machine import FBGEMM_CAPABILITIES

    assert (torch.version.cuda or "").startswith(CUDA_VERSION), f"torch is built for CUDA {torch.version.cuda}"
    driver = driver_version()
    assert int(driver.split(".")[0]) >= MIN_DRIVER_VERSION, (
        f"driver {driver}; CUDA {CUDA_VERSION} needs {MIN_DRIVER_VERSION} or newer"
    )
    assert torch.cuda.is_available(), "torch finds no usable GPU"
    served = FBGEMM_CAPABILITIES[installed_version("fbgemm-gpu")]
    for gpu in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(gpu)
        assert capability in served, f"GPU {gpu}: capability {capability}; FBGEMM supports {sorted(served)}"
    # Run one kernel of each library.
    ones = torch.ones(8, device=here.device)
    sums = torch.ops.fbgemm.asynchronous_complete_cumsum(ones.int())
    assert sums.tolist() == list(range(9)), f"asynchronous_complete_cumsum returns {sums.tolist()}"
    here.found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    here.found["gpus"] = torch.cuda.device_count()


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str:
    """Return the version of the NVIDIA driver, e.g. 580.65.06."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlSystemGetDriverVersion()


def gpu_name() -> str:
    """Return the name of the GPU, e.g. NVIDIA H100 80GB HBM3."""
    import pynvml

    return pynvml.nvmlDeviceGetName(nvml_handle())


def nvml_handle() -> Any:
    """Return the NVML handle of the GPU that the blocks use."""
    import pynvml

    from raytrec.common.machine import get_cuda_handle

    pynvml.nvmlInit()
    return get_cuda_handle("cuda:0")


def _others() -> list[int]:
    """Return the ids of processes that use the GPU. In a container these are the process ids of the host."""
    import pynvml

    return [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(nvml_handle())]
