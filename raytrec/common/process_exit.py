"""The end of a process in which threads of other libraries still run."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def ends_at_once() -> Iterator[None]:
    """A block, the last of a program. Python does all that it does at exit, and nothing comes after that.

    ray.shutdown() leaves threads behind (Ray 2.60: its GCS client's, gRPC's event engine, the exporter of
    metrics), and there is no call that ends them. They run on while Python takes itself apart and C++
    destroys its global objects, and may read what has been freed: once, a process that had ended well ended
    with a segmentation fault (which thread's was not found). So threads that Python waits for and functions
    of atexit come to their end, output is flushed, and then the process is gone.
    """
    code = 1  # of an error that is not caught

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)

    atexit.register(end)  # the first to be registered is the last to be called
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
