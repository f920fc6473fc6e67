"""A run of `raytrec train` in a separate process, observed from outside."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from nodes import HERE, Nodes
from recorder import PACE, Attempt, Record, records_of

from raytrec.checkpoint.files import get_step_folder, steps
from raytrec.checkpoint.index import INDEX

T = TypeVar("T")
MOST = 2  # largest number of workers
LONGEST_S, FINISH_S = 240.0, 900.0  # limits of a single wait, and of the rest of the run
SETTLED_STEPS = 30  # number of consecutive steps that, with a checkpoint, show that the run has recovered


class Problem(Exception):
    """Error raised if the run does not behave as required."""


class Run:
    """`raytrec train` in a separate process, observed from outside.

    Methods that wait raise a Problem if a time limit is exceeded or the driver ends unexpectedly.

    Args:
        folder: Folder of the run.
        checkpoints: Folder of the run's checkpoints.
        config: File of the run's configuration.
        nodes: Cluster on which the run trains.
        until: Monotonic time by which the benchmark must end.
    """

    def __init__(self, folder: Path, checkpoints: Path, config: Path, nodes: Nodes, until: float):
        self.folder, self.checkpoints, self.nodes = folder, str(checkpoints), nodes
        self.record, self.log = Record(folder), records_of(folder).with_suffix(".log")
        self._config, self._until, self._began = config, until, time.monotonic()
        self._process: subprocess.Popen | None = None

    def start(self, *arguments: str) -> None:
        """Start the command `raytrec train` with these arguments."""
        command = [sys.executable, str(HERE / "recorder.py"), "train", *arguments]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the run
                env=os.environ | {"RAY_ADDRESS": self.nodes.address},
            )

    def resume(self) -> None:
        """Start the command again with --resume."""
        self.start("--resume", str(self.folder))

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Run the command, and kill the driver at the end of the block."""
        command = [str(self._config), f"run.dir={self.folder}", f"checkpoint.dir={self.checkpoints}"]
        self.start(*command)
        try:
            yield
        finally:
            self.kill()

    def finish(self) -> None:
        """Wait until the run has finished.

        Raises:
            Problem: The run failed.
        """
        self.wait("the end of the run", lambda: self.ended() is not None, FINISH_S, alive=False)
        if self.ended() or not (self.folder / "result.json").exists():
            raise Problem(f"the run exited with code {self.ended()}\n{self.tail()}")
        self.say("the run has finished")

    def result(self) -> dict[str, Any]:
        """Return the content of result.json."""
        return json.loads((self.folder / "result.json").read_text())

    def signal(self, number: int, group: bool = False) -> int:
        """Send a signal to the driver or its process group, and return the exit code when the driver ends."""
        if group:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)
        return self.end()

    def end(self, seconds: float = 90) -> int:
        """Wait until the driver ends, and return the exit code.

        Raises:
            Problem: The driver did not end in time.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Problem(f"the driver did not exit within {seconds:.0f} s\n{self.tail()}") from None

    def output(self, since: int = 0) -> str:
        """Return the run's output, starting at a character index."""
        return self.log.read_text(errors="replace")[since:]

    def kill(self) -> None:
        """Kill the driver if it is running."""
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)

    def ended(self) -> int | None:
        """Return the exit code of the driver, or None if the driver is running."""
        return self._process.poll()

    def say(self, text: str) -> None:
        """Print a text, preceded by the time and the newest step."""
        attempts = self.record.look()
        step = attempts[-1].last if attempts else 0
        print(f"{time.monotonic() - self._began:6.1f} s  step {step:5}  {text}", flush=True)

    def wait(self, what: str, ready: Callable[[], T], seconds: float = LONGEST_S, alive: bool = True) -> T:
        """Wait until `ready` returns a true value, and return that value.

        Raises:
            Problem: The time limit is exceeded, or the driver ended although `alive` is True.
        """
        end = min(time.monotonic() + seconds, self._until)
        while not (value := ready()):
            if alive and self.ended() is not None:
                raise Problem(f"{what}: the driver exited with code {self.ended()}\n{self.tail()}")
            if time.monotonic() > end:
                raise Problem(f"{what}: timed out after at most {seconds:.0f} s\n{self.tail()}")
            time.sleep(0.02)
        return value

    def tail(self) -> str:
        """Return the last 25 lines of the output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def events(self, since: float = 0) -> list[dict[str, Any]]:
        """Return the run's recorded events since a time, in seconds since 1970."""
        out = []
        with suppress(FileNotFoundError):
            for line in (self.folder / "events.jsonl").read_text().splitlines():
                with suppress(json.JSONDecodeError):  # the driver was killed while it wrote
                    out.append(json.loads(line))
        return [event for event in out if event["unix_s"] >= since]

    def attempt(self) -> Attempt:
        """Return the newest attempt."""
        return self.record.look()[-1]

    def since(self, unix_s: float) -> list[Attempt]:
        """Return the attempts that began after a time, in seconds since 1970."""
        return [attempt for attempt in self.record.look() if attempt.began > unix_s]

    def settled(self) -> bool:
        """Return True if the run has recovered.

        The maximum number of workers must have trained SETTLED_STEPS steps and saved a checkpoint.
        """
        attempts = self.record.look()
        if not attempts or attempts[-1].world != min(MOST, len(self.nodes.all)):
            return False
        newest = attempts[-1]
        return newest.last - newest.first >= SETTLED_STEPS and any(
            event["event"] == "saved" and not event["error"] and event["step"] > newest.first
            for event in self.events(newest.began)
        )

    def pace(self, seconds: float) -> None:
        """Set the number of seconds that are added to each further step."""
        partial = records_of(self.folder) / (PACE + ".partial")
        partial.write_text(str(seconds))
        partial.replace(partial.with_name(PACE))

    def worker(self, rng: random.Random) -> tuple[int, int]:
        """Return (rank, process id) of a random worker."""
        return rng.choice(sorted(self.attempt().ranks.items()))

    def node(self, rng: random.Random) -> Any:
        """Return the node of a random worker."""
        return self.wait(
            "a worker's node", lambda: self.nodes.of(rng.choice(sorted(self.attempt().raylets.items()))[1])
        )

    def saved(self) -> list[int]:
        """Return the steps of complete checkpoints, the newest first."""
        return [s for s in steps(self.checkpoints) if os.path.exists(f"{get_step_folder(self.checkpoints, s)}/{INDEX}")]

    def half_saved(self) -> str | None:
        """Return the folder of the newest checkpoint if it is still being written, else None."""
        folders = [get_step_folder(self.checkpoints, step) for step in steps(self.checkpoints)[:1]]
        return next((folder for folder in folders if not os.path.exists(f"{folder}/{INDEX}")), None)

    def new_checkpoint(self) -> int:
        """Wait for the next checkpoint, and return its step."""
        before = self.saved()[:1]
        return self.wait("a new checkpoint", lambda: self.saved()[:1] != before and self.saved())[0]
