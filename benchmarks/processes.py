"""CPU time and memory of a command and of all processes that the command starts, read from outside.

The processes are identified by an environment variable, which processes inherit even if they leave the
process tree, as Ray's do.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from time import monotonic, time

MARK = "RAYTREC_BENCHMARK"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Marked:
    """All current and future processes with a mark in their environment.

    Args:
        mark: Mark, an environment variable with its value, NAME=VALUE.
    """

    def __init__(self, mark: str):
        self._mark, self._known = mark.encode(), {}
        self._cpu_s: dict[tuple[int, str], float] = {}

    def pids(self) -> list[int]:
        """Return the ids of live processes that have the mark; each process's environment is read once."""
        alive = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in alive - self._known.keys():
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if environment != [b""]:  # an empty environment: the process has not started its program yet
                    self._known[pid] = self._mark in environment
        self._known = {pid: marked for pid, marked in self._known.items() if pid in alive}
        return sorted(pid for pid, marked in self._known.items() if marked)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes that have or had the mark, as last read before they ended."""
        for pid in self.pids():
            with suppress(OSError, IndexError):
                fields = _read(pid, "stat").rpartition(")")[2].split()
                process = pid, fields[19]  # with the start time, because process ids are reused
                self._cpu_s[process] = (int(fields[11]) + int(fields[12])) * TICK_S
        return sum(self._cpu_s.values())

    def memory_mib(self) -> float:
        """Return the memory of live processes with the mark in MiB; shared pages are counted once (PSS)."""
        total = 0
        for pid in self.pids():
            with suppress(OSError, AttributeError):
                total += int(re.search(r"(?m)^Pss:\s+(\d+)", _read(pid, "smaps_rollup"))[1])
        return total / 1024


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")


class Command:
    """Command that runs in the background, with samples of its processes' CPU time.

    Args:
        command: Program and arguments.
        folder: Folder for the command's output, which is written to log.txt.

    Attributes:
        samples: Samples (seconds since 1970, CPU seconds).
        peak_mib: Largest memory in MiB that `look` has measured.
        began: Time of the start, in seconds since 1970.
    """

    def __init__(self, command: list[str], folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.txt"
        self.samples: list[tuple[float, float]] = []
        self.peak_mib = 0.0
        self._marked, self._looked = Marked(f"{MARK}={folder}"), 0.0
        self.began = time()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {MARK: str(folder)}, start_new_session=True
            )

    @property
    def running(self) -> bool:
        """Return True if the command has not ended."""
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """Return the end of the command's output."""
        return self._log.read_text(errors="replace")[-3000:]

    def look(self, memory_every_s: float | None) -> None:
        """Sample CPU time and, at most every `memory_every_s` seconds because it is slower, memory."""
        self.samples.append((time(), self._marked.cpu_s()))
        if memory_every_s is not None and monotonic() - self._looked >= memory_every_s:
            self.peak_mib = max(self.peak_mib, self._marked.memory_mib())
            self._looked = monotonic()

    def cpu_s(self, moment: float) -> float:
        """Return the CPU seconds at a time since 1970, interpolated between the nearest samples."""
        before = max((s for s in self.samples if s[0] <= moment), default=self.samples[0])
        after = min((s for s in self.samples if s[0] >= moment), default=self.samples[-1])
        share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        return before[1] + share * (after[1] - before[1])

    def end(self) -> int:
        """Kill the command's remaining processes, and return the command's exit code."""
        for pid in self._marked.pids():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return self._process.wait()
