"""Small file systems that a test can fill."""

import subprocess
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def small_disk(place, size, busy=False):
    """Mount a tmpfs at a folder; skip the test if this process may not mount.

    Args:
        place: mount point; created if missing.
        size: size of the file system in the syntax of mount, e.g. 1m.
        busy: unmount lazily, because a process may still use the file system.
    """
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system requires root")
    try:
        yield place
    finally:
        subprocess.run(["umount", *(["-l"] if busy else []), str(place)], check=True)


def fill_disk(place):
    """Fill the file system."""
    with suppress(OSError), open(place / "ballast", "ab", buffering=0) as file:
        while True:
            file.write(bytes(1000))
