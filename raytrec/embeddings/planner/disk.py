"""The disk that tables with compute_kernel fused_mmap are on. No torch here: the driver asks, too."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from raytrec.common.storage import relative
from raytrec.config.run_config import RunConfig

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


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
    return f"{do}; then resume the run: raytrec train --resume {relative(run)}" if begun else do


def memory_filesystem(folder: Path) -> str | None:
    """The type of the file system that a folder is on, if that keeps its files in memory; Linux only."""
    device = os.stat(folder).st_dev
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    of_device = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:  # ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS … - TYPE SOURCE OPTIONS
        if line.split()[2] == of_device and (kind := line.partition(" - ")[2].split()[0]) in IN_MEMORY:
            return kind
    return None
