"""Names of compute kernels, and the folder of tables in files. No torch here, for the driver."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from raytrec.common.storage import in_shell, relative
from raytrec.config.run_config import RunConfig

UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")
CACHING_KERNEL = UVM_KERNELS[1]
MMAP_KERNEL = "fused_mmap"
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def kernel_on(device: str, kernel: str | None) -> str | None:
    """A table's kernel as this device has it; None: the one that keeps all on the device, which on CPU, where
    there is no other memory, UVM kernels are, too.

    Args:
        device: cpu or cuda.
    """
    places = (*UVM_KERNELS, MMAP_KERNEL) if device == "cuda" else (MMAP_KERNEL,)
    return kernel if kernel in places else None


def kernels_to_choose(config: RunConfig, device: str, managed: bool) -> list[str]:
    """TorchRec's compute kernels that the planner may choose from on a device, where a table's is not set.

    Args:
        device: cpu or cuda.
        managed: of a table with managed ids, which has no cache: initial values of new ids are written to its
            rows, and a cached row would keep those of the id before.
    """
    if device == "cpu":
        return ["fused"]
    not_offered = {MMAP_KERNEL, CACHING_KERNEL} if managed else {MMAP_KERNEL}
    return [kernel for kernel in config.plan.compute_kernels if kernel not in not_offered]


def mmap_folder(config: RunConfig) -> Path:
    """Where this machine has these tables' files, which have no names: plan.mmap_dir, else the run folder.
    Where there is none of that name, the nearest folder above it, which is on the same disk."""
    folder = Path(config.plan.mmap_dir or config.run.dir or tempfile.gettempdir()).absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def free_disk(config: RunConfig) -> int:
    """Bytes that are free there."""
    return shutil.disk_usage(mmap_folder(config)).free


def make_room(config: RunConfig) -> str:
    """What to do about a disk without room for these tables; in a run that has begun, with --resume."""
    do, run = "make room, or set plan.mmap_dir to a folder on another disk", Path(config.run.dir or "")
    begun = config.run.dir and (run / "config.yaml").is_file()
    return f"{do}; then resume the run: raytrec train --resume {in_shell(relative(run))}" if begun else do


def memory_filesystem(folder: Path) -> str | None:
    """The type of the file system that a folder is on, if that keeps its files in memory; Linux only."""
    device = os.stat(folder).st_dev
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    of_device = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:  # ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS … - TYPE SOURCE OPTIONS
        if line.split()[2] == of_device and (kind := line.partition(" - ")[2].split()[0]) in IN_MEMORY:
            return kind
    return None
