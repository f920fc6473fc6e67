"""0: the packages are the pinned ones, and go together with driver and GPU; nothing else computes there."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from here import ROOT, CannotRun, Here

CUDA, DRIVER = "13.0", 580  # of torch 2.13 and 2.14; the oldest driver that CUDA 13 runs on
PACKAGES = ("torch", "torchrec", "ray", "nvidia-nccl-cu13", "fbgemm-gpu", "fbgemm-gpu-cpu")


def run(here: Here) -> None:
    import fbgemm_gpu  # noqa: F401
    import torch

    from raytrec.compat.versions import require_versions

    if here.stand_in:
        raise CannotRun("a stand-in has neither a driver nor kernels")
    others = _others() if here.kind == "cuda" else []  # before this process is one of them
    fbgemm = "fbgemm-gpu" if here.kind == "cuda" else "fbgemm-gpu-cpu"
    require_versions()
    file = "next" if (version("torchrec") or "").startswith("1.9.") else here.kind
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{file}.txt").read_text(), re.M))
    wrong = [
        f"{name} is {version(name)}, pinned is {pins[name]}"
        for name in PACKAGES
        if name in pins and (version(name) or "").partition("+")[0] != pins[name].partition("+")[0]
    ]
    assert not wrong, "; ".join(wrong)
    both = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if version(name)]
    assert both == [fbgemm], (
        f"{' and '.join(both)} installed; {fbgemm} alone belongs here: they share a folder"
    )
    key = here.kind.upper()
    assert torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::bounds_check_indices", key), (
        f"FBGEMM has no kernels for {key}"
    )
    if here.kind == "cuda":
        _check_gpu(here)
        assert not others, f"processes {others} compute on this GPU, too: times would mean nothing"


def _check_gpu(here: Here) -> None:
    import torch

    from raytrec.common.machine import FBGEMM_CAPABILITIES

    assert (torch.version.cuda or "").startswith(CUDA), f"torch is built for CUDA {torch.version.cuda}"
    driver = driver_version()
    assert int(driver.split(".")[0]) >= DRIVER, f"driver {driver}; CUDA {CUDA} needs {DRIVER} or newer"
    assert torch.cuda.is_available(), "torch finds no GPU that it can use"
    served = FBGEMM_CAPABILITIES[version("fbgemm-gpu")]
    for gpu in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(gpu)
        assert capability in served, f"GPU {gpu}: capability {capability}; FBGEMM has {sorted(served)}"
    # The first kernels of both libraries that run.
    ones = torch.ones(8, device=here.device)
    sums = torch.ops.fbgemm.asynchronous_complete_cumsum(ones.int())
    assert sums.tolist() == list(range(9)), f"a first kernel of FBGEMM's gives {sums.tolist()}"
    here.found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    here.found["gpus"] = torch.cuda.device_count()


def version(name: str) -> str | None:
    """Of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str:
    """Of NVIDIA's driver, such as 580.65.06."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlSystemGetDriverVersion()


def gpu_name() -> str:
    """Of the GPU, such as NVIDIA H100 80GB HBM3."""
    import pynvml

    return pynvml.nvmlDeviceGetName(handle())


def handle() -> Any:
    """NVML's handle of the GPU that the blocks use."""
    import pynvml

    from raytrec.common.machine import get_cuda_handle

    pynvml.nvmlInit()
    return get_cuda_handle("cuda:0")


def _others() -> list[int]:
    """Processes that compute on the GPU. (Their numbers are the host's, which in a container are others.)"""
    import pynvml

    return [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle())]
