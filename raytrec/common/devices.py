"""GPUs of this machine over NVML, which needs no context on them. Names are as in CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from typing import Any


def visible_gpus() -> list[str]:
    """Numbers or UUIDs of CUDA_VISIBLE_DEVICES; empty: all GPUs of the machine, by number."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [name.strip() for name in names if name.strip()]


def usable_gpus() -> list[str]:
    """Numbers or UUIDs of the GPUs that this process may use; none where CUDA_VISIBLE_DEVICES is empty."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, or no driver
        return []
    try:
        return visible_gpus() or list(map(str, range(pynvml.nvmlDeviceGetCount())))
    finally:
        pynvml.nvmlShutdown()


def gpu_handle(name: str) -> Any:
    """NVML's handle of the GPU with this number or UUID; NVML has to be initialized."""
    import pynvml

    by_number, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    return by_number(int(name)) if name.isdigit() else by_uuid(name)


def cuda_handle(device: str) -> Any:
    """NVML's handle of a device of torch's: cuda:I is the I-th of the visible GPUs."""
    index, visible = int(device.partition(":")[2] or 0), visible_gpus()
    return gpu_handle(visible[index] if visible else str(index))


def smallest_gpu_memory() -> int | None:
    """Bytes of this machine's smallest GPU that programs can use; None where there is none.

    The driver's reserve is not counted, as in torch's total_memory. Of a GPU that is cut into MIG instances
    only these are used, and which ones is not known here: None.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, or no driver
        return None
    try:
        return min(map(_usable_memory, visible_gpus() or map(str, range(pynvml.nvmlDeviceGetCount()))))
    except (pynvml.NVMLError, ValueError):
        return None
    finally:
        pynvml.nvmlShutdown()


def _usable_memory(name: str) -> int:
    """Of one GPU.

    Raises:
        ValueError: it is cut into instances, or is one.
    """
    import pynvml

    if name.startswith("MIG"):
        raise ValueError(name)
    handle = gpu_handle(name)
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0]:
            raise ValueError(name)
    except pynvml.NVMLError:  # a GPU without MIG
        pass
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.total - memory.reserved
