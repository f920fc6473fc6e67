"""Memory that a step frees stays in the process, for the next step."""

from __future__ import annotations

import ctypes

# Of mallopt(3). Freed memory of up to KEPT bytes is not given back to the kernel, blocks of up to LARGEST are
# not mapped one by one, and an arena grows by whole heaps: of threads other than the main one, in which Ray
# Train trains, glibc would otherwise give an empty heap back, whatever the threshold.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT, HEAP, LARGEST = 512 << 20, 64 << 20, 256 << 20


def keep_freed_memory() -> bool:
    """Has glibc keep what a step on CPU frees; whether it does (another C library is left as it is).

    A step allocates its activations and gradients anew, and glibc gives large ones back to the kernel as
    soon as they are free: some thousand page faults a step, each of which zeroes a page.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, HEAP))
    return all([library.mallopt(name, size) for name, size in settings])
