"""A run on a cluster of several nodes on this machine, and what can happen to it.

Faults are done to real processes, nodes, disks and files; see FAULTS.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from recorder import PACE, Attempt, Record

from raytrec.checkpoint.files import folder_of, steps
from raytrec.checkpoint.index import INDEX
from raytrec.cluster import stay_on_loopback

T = TypeVar("T")
HERE = Path(__file__).parent
MOST = 2  # workers
NOTICE_S = 15.0  # before a drained node is taken away
LONGEST_S = 240.0  # that the run may take for anything
SETTLED_STEPS = 30  # in a row, and a checkpoint: then the run has got over a fault
PREEMPTION = "DRAIN_NODE_REASON_PREEMPTION"


class Problem(Exception):
    """The run did not do what it had to."""


class Nodes:
    """A Ray cluster on loopback: a head without CPUs, and nodes with room for one worker and its reader."""

    def __init__(self, temporary: Path):
        stay_on_loopback()
        paths = [os.environ.get("PYTHONPATH"), str(HERE)]  # workers import recorder
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args=self._node(0, temp_dir=str(temporary), include_dashboard=False),
        )
        self.address = self._cluster.address
        self._gcs = GcsClient(address=self.address)
        self.all: list[Any] = []

    def _node(self, cpus: int, **more: Any) -> dict[str, Any]:
        return {"num_cpus": cpus, "node_ip_address": "127.0.0.1", "object_store_memory": 200 << 20, **more}

    def add(self) -> None:
        self.all.append(self._cluster.add_node(**self._node(2)))

    def kill(self, node: Any) -> None:
        """Ends the processes of a node, without notice."""
        self.all.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any) -> None:
        """Gives notice that a node will go."""
        deadline = int((time.time() + NOTICE_S) * 1000)
        reason = autoscaler_pb2.DrainNodeReason.Value(PREEMPTION)
        accepted, why = self._gcs.drain_node(node.node_id, reason, "chaos", deadline)
        if not accepted:
            raise Problem(f"the node could not be drained: {why}")

    def of(self, pid: int) -> Any:
        """The node that a worker is on."""
        above = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return next(node for node in self.all if self._raylet(node) == above)

    def _raylet(self, node: Any) -> int:
        return node.all_processes["raylet"][0].process.pid

    def close(self) -> None:
        self._cluster.shutdown()


class Run:
    """`raytrec train` in a process of its own, watched from outside.

    Args:
        folder: of the run.
        checkpoints: where it saves.
        config: the file.
        until: the moment (monotonic) at which this all has to be over.
    """

    def __init__(self, folder: Path, checkpoints: Path, config: Path, nodes: Nodes, until: float):
        self.folder, self.checkpoints, self.nodes = folder, str(checkpoints), nodes
        self.record, self.log = Record(folder), folder.with_suffix(".log")
        self._config, self._until, self._began = config, until, time.monotonic()
        self._process: subprocess.Popen | None = None

    def start(self, *arguments: str) -> None:
        command = [sys.executable, str(HERE / "recorder.py"), "train", *arguments]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for this process here, which ends the other
                env=os.environ | {"RAY_ADDRESS": self.nodes.address},
            )

    def begin(self) -> None:
        self.start(str(self._config), f"run.dir={self.folder}", f"checkpoint.dir={self.checkpoints}")

    def resume(self) -> None:
        self.start("--resume", str(self.folder))

    def signal(self, number: int) -> int:
        """Sends the driver a signal and waits for its end; the exit code."""
        self._process.send_signal(number)
        return self._process.wait(90)

    def kill(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)

    def ended(self) -> int | None:
        return self._process.poll()

    def say(self, text: str) -> None:
        attempts = self.record.look()
        step = attempts[-1].last if attempts else 0
        print(f"{time.monotonic() - self._began:6.1f} s  step {step:5}  {text}", flush=True)

    def wait(self, what: str, found: Callable[[], T], seconds: float = LONGEST_S, alive: bool = True) -> T:
        """Waits until something is found.

        Raises:
            Problem: it takes too long, or the driver has ended although it should be alive.
        """
        end = min(time.monotonic() + seconds, self._until)
        while not (value := found()):
            if alive and self.ended() is not None:
                raise Problem(f"{what}: the driver has ended with exit code {self.ended()}\n{self.tail()}")
            if time.monotonic() > end:
                raise Problem(f"{what}: nothing for {seconds:.0f} s, or no time is left\n{self.tail()}")
            time.sleep(0.02)
        return value

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def events(self, since: float = 0) -> list[dict[str, Any]]:
        """What the run has noted about itself."""
        out = []
        with suppress(FileNotFoundError):
            for line in (self.folder / "events.jsonl").read_text().splitlines():
                with suppress(json.JSONDecodeError):  # the driver was killed while it wrote
                    out.append(json.loads(line))
        return [event for event in out if event["unix_s"] >= since]

    def attempt(self) -> Attempt:
        return self.record.look()[-1]

    def since(self, unix_s: float) -> list[Attempt]:
        """Attempts that have begun since."""
        return [attempt for attempt in self.record.look() if attempt.began > unix_s]

    def settled(self) -> bool:
        """Whether there are as many workers as can be, steps have been trained, and one of them saved."""
        attempts = self.record.look()
        if not attempts or attempts[-1].world != min(MOST, len(self.nodes.all)):
            return False
        newest = attempts[-1]
        return newest.last - newest.first >= SETTLED_STEPS and any(
            event["event"] == "saved" and not event["error"] and event["step"] > newest.first
            for event in self.events(newest.began)
        )

    def pace(self, seconds: float) -> None:
        """How much longer a step takes from now on."""
        partial = self.folder / (PACE + ".partial")
        partial.write_text(str(seconds))
        partial.replace(self.folder / PACE)

    def worker(self, rng: random.Random) -> tuple[int, int]:
        """(rank, process id) of any worker."""
        return rng.choice(sorted(self.attempt().ranks.items()))

    def saved(self) -> list[int]:
        """Steps of complete checkpoints, the newest first."""
        return [
            s for s in steps(self.checkpoints) if os.path.exists(f"{folder_of(self.checkpoints, s)}/{INDEX}")
        ]

    def half_saved(self) -> str | None:
        """A checkpoint that is being written, if there is one."""
        folders = [folder_of(self.checkpoints, step) for step in steps(self.checkpoints)[:1]]
        return next((folder for folder in folders if not os.path.exists(f"{folder}/{INDEX}")), None)

    def new_checkpoint(self) -> int:
        """Waits for the next one; its step."""
        before = self.saved()[:1]
        return self.wait("a new checkpoint", lambda: self.saved()[:1] != before and self.saved())[0]


@contextmanager
def small_disk(place: Path, mib: int) -> Iterator[None]:
    """A file system of its own in memory."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "chaos", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


# Faults: each does it, helps the run where a person would have to, and returns when it was done.


def kill_worker(run: Run, rng: random.Random) -> float:
    rank, pid = run.worker(rng)
    run.say(f"SIGKILL for rank {rank} (pid {pid})")
    return _send(pid, signal.SIGKILL)


def stop_worker(run: Run, rng: random.Random) -> float:
    rank, pid = run.worker(rng)
    run.say(f"SIGSTOP for rank {rank} (pid {pid})")
    return _send(pid, signal.SIGSTOP)


def kill_in_commit(run: Run, rng: random.Random) -> float:
    """Kills a worker while a checkpoint is half written; again, where the checkpoint was quicker."""
    for _ in range(5):
        rank, pid = run.worker(rng)
        run.wait("a checkpoint being written", lambda: not run.half_saved())
        folder = run.wait("a checkpoint being written", run.half_saved)
        done = _send(pid, signal.SIGKILL)
        time.sleep(0.5)
        whole = os.path.exists(f"{folder}/{INDEX}")
        state = "too late" if whole else "not whole"
        run.say(f"SIGKILL for rank {rank} (pid {pid}) in {Path(folder).name}: {state}")
        if not whole:
            return done
        run.wait("training again", lambda done=done: run.since(done) and run.settled())
    raise Problem("checkpoints are written too fast to be interrupted")


def corrupt_data(run: Run, rng: random.Random) -> float:
    return _corrupt(run, rng, "*.bin")


def corrupt_index(run: Run, rng: random.Random) -> float:
    return _corrupt(run, rng, INDEX)


def _corrupt(run: Run, rng: random.Random, pattern: str) -> float:
    """Flips a byte of the newest checkpoint, and kills a worker, so that it is restored."""
    step = run.new_checkpoint()
    path = max(Path(folder_of(run.checkpoints, step)).glob(pattern), key=lambda path: path.stat().st_size)
    at = rng.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    run.say(f"a bit of byte {at:,} of {path.parent.name}/{path.name} has been flipped")
    return kill_worker(run, rng)


def kill_node(run: Run, rng: random.Random) -> float:
    """Where it was the last, another one comes a little later."""
    node = run.nodes.of(run.worker(rng)[1])
    run.say(f"a node goes without notice; {len(run.nodes.all) - 1} left")
    done = time.time()
    run.nodes.kill(node)
    if not run.nodes.all:
        time.sleep(3)
        run.nodes.add()
        run.say("another node is there")
    return done


def add_node(run: Run, rng: random.Random) -> float:
    run.nodes.add()
    run.say(f"there are {len(run.nodes.all)} nodes")
    return time.time()


def drain_node(run: Run, rng: random.Random) -> float:
    node = run.nodes.of(run.worker(rng)[1])
    run.say(f"a node will go in {NOTICE_S:.0f} s")
    done = time.time()
    run.nodes.drain(node)
    time.sleep(NOTICE_S)
    run.nodes.kill(node)
    run.say("it has gone")
    return done


def kill_driver(run: Run, rng: random.Random) -> float:
    run.say("SIGKILL for the driver; --resume")
    done = time.time()
    run.signal(signal.SIGKILL)
    run.resume()
    return done


def interrupt_driver(run: Run, rng: random.Random) -> float:
    run.say("Ctrl-C for the driver")
    done = time.time()
    code = run.signal(signal.SIGINT)
    run.say(f"it has ended with exit code {code}; --resume")
    run.resume()
    return done


def fill_disk(run: Run, rng: random.Random) -> float:
    """Fills the disk of the checkpoints until a save has failed."""
    filler = Path(run.checkpoints).parent / "filler"
    run.say("the disk of the checkpoints is full")
    done = time.time()
    try:
        with suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        failed = run.wait("a save that fails", lambda: [e for e in run.events(done) if e.get("error")])
    finally:
        filler.unlink()
    run.say(f"there is room again; the run said: {failed[0]['error'].splitlines()[0]}")
    run.new_checkpoint()
    return done


def _send(pid: int, number: int) -> float:
    done = time.time()
    os.kill(pid, number)
    return done


# What happens: how, and by which of its own events the run shows that it has seen it.
FAULTS: dict[str, tuple[Callable[[Run, random.Random], float], tuple[str, ...]]] = {
    "worker killed": (kill_worker, ("failed",)),
    "worker stands still": (stop_worker, ("hang",)),
    "worker killed in a commit": (kill_in_commit, ("failed",)),
    "checkpoint damaged: data": (corrupt_data, ("failed",)),
    "checkpoint damaged: index": (corrupt_index, ("failed",)),
    "node killed": (kill_node, ("failed",)),
    "node added": (add_node, ("asked",)),
    "node drained": (drain_node, ("asked",)),
    "driver killed": (kill_driver, ()),
    "driver interrupted": (interrupt_driver, ("asked",)),
    "disk full": (fill_disk, ("saved",)),
}
GOES_ON = ("disk full",)  # without a new worker group
