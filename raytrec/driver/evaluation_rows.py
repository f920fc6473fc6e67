"""The rows of evaluations, read while training runs: what would end an evaluation is known long before it.

A thread of the driver, which takes what nobody else wants of one core, and never more than a quarter of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

from raytrec.common.errors import DataError
from raytrec.config.run_config import RunConfig
from raytrec.data.fragments import Dataset
from raytrec.data.rows import check_rows

BEGIN_S = 10.0  # after the workers have been asked for; shorter runs come to their evaluation as soon
REST = 3.0  # seconds for each second of reading


@contextmanager
def reading_ahead(
    config: RunConfig, datasets: dict[str, Dataset], warn: Callable[[str], None]
) -> Iterator[None]:
    """A block in which the data of evaluations are read in the background, unless bad rows are to be skipped.

    Args:
        warn: told of the first row of each dataset that an evaluation would stop at.
    """
    if config.data.on_error == "skip":
        yield
        return
    over = threading.Event()
    arguments = (_of_evaluations(config, datasets), warn, over)
    thread = threading.Thread(target=_read, args=arguments, name="reading ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _of_evaluations(config: RunConfig, datasets: dict[str, Dataset]) -> dict[str, tuple[Dataset, str]]:
    """Name → (dataset, what comes of a bad row), of those that the run will evaluate."""
    last = "test" if "test" in datasets else "valid"
    between = "valid" if "valid" in datasets else "test"
    found = {}
    if last in datasets:
        found[last] = "the evaluation at the end will stop there, when the model is saved"
    if config.train.eval_every_steps and between in datasets:
        found[between] = "the run will stop there at its next evaluation; Ctrl-C saves and ends it before"
    return {name: (datasets[name], then) for name, then in found.items()}


def _read(
    datasets: dict[str, tuple[Dataset, str]], warn: Callable[[str], None], over: threading.Event
) -> None:
    if over.wait(BEGIN_S):
        return
    _be_nice()
    for name, (dataset, then) in datasets.items():
        try:
            if not _read_slowly(dataset, over):
                return
        except DataError as error:
            place = f"{error.what} ({error.where})"
            warn(f"data.{name}: {place}. Training continues; {then}. Correct the data until then.")
        except Exception as error:  # of code that a transform names: it is no more than a look
            warn(f"data.{name} could not be read ahead: {type(error).__name__}: {error}")


def _read_slowly(dataset: Dataset, over: threading.Event) -> bool:
    """Reads all rows; False when it was told to end before."""
    for group in dataset.groups:
        began = perf_counter()
        for _ in check_rows(group.path, group.index, dataset.form):
            if over.wait(REST * (perf_counter() - began)):
                return False
            began = perf_counter()
    return True


def _be_nice() -> None:
    """This thread alone, which Linux lets have a priority of its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
