"""Where the Python of a step goes: one side of `benchmarks/step.py` with every rank under cProfile.

    python benchmarks/step.py --profile raytrec --models dlrm --workers 2

The profile covers the measured steps of the thread that trains; times are milliseconds a step of rank 0, the
calls of operators included. As a program this is the `raytrec` command with such a profile.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROFILE = "STEP_PROFILE"  # FOLDER:FIRST:LAST, in the environment of all ranks
SHOWN = 45  # functions


class Probe:
    """Profiles this thread from one step to another, if the environment says so."""

    def __init__(self, rank: int):
        folder, first, last = os.environ.get(PROFILE, "::").split(":")
        self._file = f"{folder}/rank{rank}.prof"
        self._first, self._last = (int(first), int(last)) if folder else (-1, -1)
        self._profile = cProfile.Profile() if folder else None

    def step(self, trained: int) -> None:
        """A step has been trained, this many in all."""
        if trained == self._first:
            self._profile.enable()
        elif trained == self._last:
            self._profile.disable()
            self._profile.dump_stats(self._file)


def profiled_train_worker(task: Any) -> None:
    """`train_worker` with a profile; runs in the workers."""
    from raytrec.worker.checkpointing import CheckpointManager
    from raytrec.worker.loop import train_worker

    after_step, probes = CheckpointManager.after_step, {}

    def profiled(self: Any, outputs: Any) -> None:
        after_step(self, outputs)
        if self not in probes:
            probes[self] = Probe(self._context.index)
        probes[self].step(self._progress.step)

    CheckpointManager.after_step = profiled
    train_worker(task)


def profile_side(
    side: str, cases: dict[str, tuple[str, int]], settings_of: Callable, run: Callable, steps: int
) -> None:
    """Runs a side once for each case and prints what took longest, by own time and with what was called."""
    from step_sides import WARM_UP

    for case, of in cases.items():
        with tempfile.TemporaryDirectory(prefix="profile-", ignore_cleanup_errors=True) as place:
            os.environ[PROFILE] = f"{place}:{WARM_UP}:{WARM_UP + steps}"
            folder = Path(place) / side
            measured = run(side, settings_of(*of, folder), folder, steps)
            print(f"\n{case}, {side}: {measured.cpu_us_per_row:.1f} CPU-µs a row under the profiler")
            for order in ("tottime", "cumulative"):
                show(f"{place}/rank0.prof", order, steps)


def show(path: str, order: str, steps: int) -> None:
    """A line for each function: calls a step, own ms, ms with what it calls."""
    stats = pstats.Stats(path)
    stats.sort_stats(order)
    print(f"\n{'calls':>9} {'own ms':>8} {'all ms':>8}  a step, by {order}")
    for function in stats.fcn_list[:SHOWN]:
        _, calls, own, all_in, _ = stats.stats[function]
        file, line, name = function
        place = "/".join(Path(file).parts[-3:])
        ms = f"{own / steps * 1e3:8.3f} {all_in / steps * 1e3:8.3f}"
        print(f"{calls / steps:9.1f} {ms}  {place}:{line} {name}")


def main() -> None:
    """The `raytrec` command; workers find the function by its name in this module."""
    import step_profile

    from raytrec import cli
    from raytrec.driver import run

    run.train_worker = step_profile.profiled_train_worker
    cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
