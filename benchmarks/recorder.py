"""The `raytrec` command, extended to record the rows of every step, and the reader of such records.

    python benchmarks/recorder.py train CONFIG run.dir=RUN

Every rank appends a line for each step to the file CHAOS_RECORDS/RUN/ATTEMPT-RANK-PID.jsonl, in which
CHAOS_RECORDS is an environment variable and RUN the name of the run. The line contains the number of ranks,
raylet, step, time, the rows' ids and their loss. A rank writes the line before anything else happens after
the step. The run folder is not used, because its disk may be full. The ids are read from the trained batch,
so the data needs a sparse feature `row` with the number of the row as its id.

The file `pace` in this folder, if it exists, contains the number of seconds added to each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FEATURE, PACE, RECORDS = "row", "pace", "CHAOS_RECORDS"


def records_of(run: str | Path) -> Path:
    """Return the folder that contains a run's records."""
    return Path(os.environ[RECORDS]) / Path(run).name


class Writer:
    """Writer of one rank's lines, one for each step."""

    def __init__(self, checkpoints: Any):
        context = checkpoints._run.context
        self._folder, self._world = records_of(context.task.config.run.dir), context.world
        self._attempt = context.heartbeat._attempt  # the same on all ranks; changes after a restart
        name = f"{self._attempt}-{context.index}-{os.getpid()}.jsonl"
        self._file = open(self._folder / name, "ab", buffering=0)  # noqa: SIM115 (lives as long as the process)

    def step(self, checkpoints: Any, outputs: Any) -> None:
        """Append the line for the current step, and sleep for the number of seconds in the file `pace`."""
        from torch.nn.functional import binary_cross_entropy_with_logits as entropy

        step = checkpoints._run.progress.step
        batch = checkpoints._run.batches.at(step - 1)  # `at` counts from 0
        rows = batch.sparse[FEATURE].values().tolist()
        assert len(rows) == int((batch.weights > 0).sum()), "each row must have one id"
        (task,) = outputs.tasks.values()
        loss = entropy(task.logits.double(), task.labels.double(), task.weights, reduction="sum")
        line = {"world": self._world, "raylet": int(os.environ["RAY_RAYLET_PID"]), "step": step}
        line |= {"unix_s": time.time(), "rows": rows, "loss": float(loss)}
        self._file.write(json.dumps(line).encode() + b"\n")
        with suppress(OSError, ValueError):
            time.sleep(float((self._folder / PACE).read_text()))


def recorded_train_worker(task: Any) -> None:
    """Run `train_worker` in a worker and record the worker's steps."""
    from raytrec.worker.checkpointing import CheckpointManager
    from raytrec.worker.loop import train_worker

    after_step, writers = CheckpointManager.after_step, {}

    def recorded(self: Any, outputs: Any) -> None:
        if self not in writers:
            writers[self] = Writer(self)
        writers[self].step(self, outputs)
        after_step(self, outputs)

    CheckpointManager.after_step = recorded
    train_worker(task)


@dataclass
class Attempt:
    """Steps recorded by one worker group between two restarts.

    Attributes:
        name: Name of the attempt.
        world: Number of ranks.
        ranks: Rank → process id.
        raylets: Rank → process id of its node's raylet, which is not always the rank's parent process.
        rows: Step → rank → ids of the rows.
        times: Step → time at which the first rank finished it.
        losses: Step → rank → sum of the rows' losses before the step's update.
    """

    name: str
    world: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    raylets: dict[int, int] = field(default_factory=dict)
    rows: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    losses: dict[int, dict[int, float]] = field(default_factory=dict)

    @property
    def began(self) -> float:
        """Return the time of the first recorded step."""
        return min(self.times.values())

    @property
    def first(self) -> int:
        """Return the first recorded step."""
        return min(self.times)

    @property
    def last(self) -> int:
        """Return the last recorded step."""
        return max(self.times)


class Record:
    """Records of all attempts of a run, which can be read while the run writes them.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path):
        self._folder, self._read = records_of(folder), {}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._attempts: dict[str, Attempt] = {}

    def look(self) -> list[Attempt]:
        """Read new lines, and return all attempts, the earliest first."""
        for path in self._folder.glob("*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._add(*path.stem.split("-"), **json.loads(line))
        return sorted(self._attempts.values(), key=lambda attempt: attempt.began)

    def _add(self, name: str, rank: str, pid: str, **line: Any) -> None:
        attempt = self._attempts.setdefault(name, Attempt(name))
        attempt.world, attempt.ranks[int(rank)] = line["world"], int(pid)
        attempt.raylets[int(rank)] = line["raylet"]
        step, unix_s = line["step"], line["unix_s"]
        attempt.rows.setdefault(step, {})[int(rank)] = np.array(line["rows"], np.int64)
        attempt.losses.setdefault(step, {})[int(rank)] = line["loss"]
        attempt.times[step] = min(unix_s, attempt.times.get(step, unix_s))

    def trained(self) -> dict[int, np.ndarray]:
        """Return a mapping from step to the sorted ids of the rows in the last attempt that trained the step."""
        last = {step: ranks for attempt in self.look() for step, ranks in attempt.rows.items()}
        return {step: np.sort(np.concatenate(list(ranks.values()))) for step, ranks in last.items()}

    def losses(self) -> dict[int, float]:
        """Return a mapping from step to the mean loss of the rows in the last attempt that trained the step."""
        last = {step: (ranks, a.rows[step]) for a in self.look() for step, ranks in a.losses.items()}
        return {s: sum(ls.values()) / sum(map(len, rows.values())) for s, (ls, rows) in last.items()}


def compare(trained: dict[int, np.ndarray], other: dict[int, np.ndarray], rows: int, epochs: int) -> dict:
    """Count rows not trained exactly once per epoch, and steps whose rows differ from another run's.

    Args:
        trained: Step → sorted ids of the rows, as returned by `Record.trained`.
        other: The same of the other run.
        rows: Number of rows of the data.
        epochs: Number of epochs.

    Returns:
        Mapping with rows_lost, rows_doubled and steps_with_other_rows.
    """
    each = len(other) // epochs
    lost = doubled = 0
    for epoch in range(epochs):
        seen = [trained[s] for s in range(epoch * each + 1, (epoch + 1) * each + 1) if s in trained]
        counts = np.bincount(np.concatenate([*seen, np.empty(0, np.int64)]), minlength=rows)
        lost += int((counts == 0).sum())
        doubled += int((counts[counts > 1] - 1).sum())
    different = [s for s in {*trained, *other} if not _same(trained.get(s), other.get(s))]
    return {"rows_lost": lost, "rows_doubled": doubled, "steps_with_other_rows": len(different)}


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)


def main() -> None:
    """Run the command; workers look up `recorded_train_worker` by its name in this module."""
    import recorder

    from raytrec import cli
    from raytrec.driver import run

    run.train_worker = recorder.recorded_train_worker
    cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
