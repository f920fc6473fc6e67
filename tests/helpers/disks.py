"""Small file systems, to fill."""

import subprocess
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def small_disk(place, size, busy=False):
    """A new file system of `size`, as mount takes it (1m), at a folder; skips without the right to mount.

    Args:
        busy: a process may still use it at the end.
    """
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system takes root")
    try:
        yield place
    finally:
        subprocess.run(["umount", *(["-l"] if busy else []), str(place)], check=True)


def fill(place):
    """Takes all the room that is left."""
    with suppress(OSError), open(place / "ballast", "ab", buffering=0) as file:
        while True:
            file.write(bytes(1000))
