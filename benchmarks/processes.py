"""A command and all processes that it starts, seen from outside: their CPU time, their memory, their roles.

They are known by a variable in their environment, which processes inherit even when they leave the tree, as
Ray's do.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from time import monotonic, time

MARK = "RAYTREC_BENCHMARK"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
ROLES = (  # the first that is found in a process's name and command line
    (r"raylet/raylet ", "raylet"),  # which names what it starts, too
    (r"gcs/gcs_server ", "gcs_server"),
    (r"^pt_data_worker", "reader"),  # of a DataLoader, forked from its rank
    (r" ray::RayTrainWorker", "rank"),
    (r" ray::Coordinator", "coordinator"),
    (r" ray::(IDLE|MapBatches|ReadParquet|Split)|(default_worker|forking)\.py", "reader"),
    (r" ray::(\w+)", r"\1"),
    (r"raytrec track .*--follow", "follower"),
    (r"raytrec train |step_sides\.py ray_recipe", "driver"),
    (r"step_sides\.py \w+ \S+ \d+", "rank"),
    (r"step_sides\.py", "driver"),
    (r"dashboard/agent\.py", "dashboard agent"),
    (r"runtime_env/agent/main\.py", "runtime_env agent"),
    (r"/(\w+)\.py", r"\1"),
)


def role(command: str) -> str:
    """What a process is, by its name and its command line."""
    found = ((re.search(pattern, command), name) for pattern, name in ROLES)
    match, name = next(((m, n) for m, n in found if m), (None, "other"))
    return match.expand(name) if match else name


def command_of(pid: int) -> str:
    """A process's name and command line."""
    return f"{read(pid, 'comm').strip()} {read(pid, 'cmdline')}".replace("\0", " ")


def read(pid: int, name: str) -> str:
    """A file that the kernel has about a process."""
    return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")


class Marked:
    """All processes, of now and later, with a mark in their environment.

    Args:
        mark: NAME=VALUE.
    """

    def __init__(self, mark: str):
        self._mark, self._known = mark.encode(), {}
        self._cpu_s: dict[tuple[int, str], float] = {}
        self._roles: dict[tuple[int, str], str] = {}

    def pids(self) -> list[int]:
        """Of those alive. Each is read once: the environment at its start does not change."""
        alive = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in alive - self._known.keys():
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if environment != [b""]:  # it has not begun
                    self._known[pid] = self._mark in environment
        self._known = {pid: marked for pid, marked in self._known.items() if pid in alive}
        return sorted(pid for pid, marked in self._known.items() if marked)

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU by role; those that have ended count with what was last seen of them."""
        for pid in self.pids():
            with suppress(OSError, IndexError):
                fields = read(pid, "stat").rpartition(")")[2].split()
                process = pid, fields[19]  # its start: numbers are given out again
                self._cpu_s[process] = (int(fields[11]) + int(fields[12])) * TICK_S
                named = role(command_of(pid))
                if named != "reader" or process not in self._roles:  # idle workers of Ray look like readers
                    self._roles[process] = named
        total: dict[str, float] = defaultdict(float)
        for process, seconds in self._cpu_s.items():
            total[self._roles.get(process, "other")] += seconds
        return dict(total)

    def memory_mib(self) -> float:
        """Memory of those alive; what several share counts once (PSS)."""
        total = 0
        for pid in self.pids():
            with suppress(OSError, AttributeError):
                total += int(re.search(r"(?m)^Pss:\s+(\d+)", read(pid, "smaps_rollup"))[1])
        return total / 1024


class Command:
    """A command in the background, with samples of its processes' CPU time.

    Args:
        command: program and arguments.
        folder: its own; `log.txt` in it has what the command says.

    Attributes:
        samples: (seconds since 1970, role → seconds of CPU).
        peak_mib: the most memory that `look` has seen.
        began: seconds since 1970.
    """

    def __init__(self, command: list[str], folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.txt"
        self.samples: list[tuple[float, dict[str, float]]] = []
        self.peak_mib = 0.0
        self._marked, self._looked = Marked(f"{MARK}={folder}"), 0.0
        self.began = time()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {MARK: str(folder)}, start_new_session=True
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def said(self) -> str:
        """The end of what it has said."""
        return self._log.read_text(errors="replace")[-3000:]

    def look(self, memory_every_s: float | None) -> None:
        """Takes a sample of CPU time; of memory, which takes the kernel longer, not more often than that."""
        self.samples.append((time(), self._marked.cpu_s()))
        if memory_every_s is not None and monotonic() - self._looked >= memory_every_s:
            self.peak_mib = max(self.peak_mib, self._marked.memory_mib())
            self._looked = monotonic()

    def cpu_s(self, moment: float) -> dict[str, float]:
        """CPU time by role at a moment, between the samples around it."""
        before = max((s for s in self.samples if s[0] <= moment), default=self.samples[0])
        after = min((s for s in self.samples if s[0] >= moment), default=self.samples[-1])
        share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        roles = {*before[1], *after[1]}
        ends = [{name: side[1].get(name, 0.0) for name in roles} for side in (before, after)]
        return {name: ends[0][name] + share * (ends[1][name] - ends[0][name]) for name in roles}

    def end(self) -> int:
        """Kills what is left of it. Its exit code."""
        for pid in self._marked.pids():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return self._process.wait()
