"""Cause faults in the real processes, nodes, disks and files of a run.

Each function causes a fault, takes the action required of a user, if any, and returns the time of the fault in seconds
since 1970. It raises a Problem if the run does not react to the fault as required.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from threading import Event, Thread

from watched import Problem, Run

from raytrec.checkpoint.files import get_step_folder
from raytrec.checkpoint.index import INDEX, read_index

NOTICE_S = 15.0  # seconds from the notice to the termination of a drained node
OVER_S = 60.0  # limit for a run that cannot continue to report an error and end; 20 on an idle machine
ENDED = 143  # exit code after SIGTERM
FULL, ROOM = "cannot write to the run folder", "the run folder is writable again"


def signal_worker(run: Run, rng: random.Random, number: signal.Signals = signal.SIGKILL) -> float:
    """Send a signal to a random worker."""
    rank, pid = run.worker(rng)
    run.say(f"sending {number.name} to rank {rank} (pid {pid})")
    return _send(pid, number)


def kill_in_commit(run: Run, rng: random.Random) -> float:
    """Kill a worker while a checkpoint is being written; retry if the checkpoint was completed first."""
    for _ in range(5):
        rank, pid = run.worker(rng)
        run.wait("a checkpoint that is being written", lambda: not run.half_saved())
        folder = run.wait("a checkpoint that is being written", run.half_saved)
        done = _send(pid, signal.SIGKILL)
        time.sleep(0.5)
        whole = os.path.exists(f"{folder}/{INDEX}")
        state = "already complete" if whole else "incomplete"
        run.say(f"sent SIGKILL to rank {rank} (pid {pid}); {Path(folder).name} is {state}")
        if not whole:
            return done
        run.wait("training again", lambda done=done: run.since(done) and run.settled())
    raise Problem("checkpoints are written too fast to be interrupted")


def corrupt_data(run: Run, rng: random.Random) -> float:
    """Flip a bit in the largest chunk of a tensor in the next checkpoint, and kill a worker.

    A bit between tensors would have no effect.
    """
    step = run.new_checkpoint()
    folder = Path(get_step_folder(run.checkpoints, step))
    chunks = [chunk for tensor in read_index(str(folder))["tensors"].values() for chunk in tensor["chunks"]]
    chunk = max(chunks, key=lambda chunk: prod(chunk["sizes"]))
    return _corrupt(run, rng, step, folder / chunk["file"], chunk["start"] + rng.randrange(prod(chunk["sizes"])))


def corrupt_index(run: Run, rng: random.Random) -> float:
    """Flip a bit in the index of the next checkpoint, and kill a worker."""
    step = run.new_checkpoint()
    path = Path(get_step_folder(run.checkpoints, step)) / INDEX
    return _corrupt(run, rng, step, path, rng.randrange(path.stat().st_size))


def _corrupt(run: Run, rng: random.Random, step: int, path: Path, at: int) -> float:
    """Flip a bit in a checkpoint and kill a worker; check that an earlier checkpoint is restored."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    run.say(f"flipped a bit of byte {at:,} of {path.parent.name}/{path.name}")
    done = signal_worker(run, rng)
    restored = run.wait("training again", lambda: run.since(done))[0].first - 1
    if restored >= step:
        raise Problem(f"step {restored} was restored although {path} is corrupt")
    return done


def kill_node(run: Run, rng: random.Random) -> float:
    """Kill a node; if it was the last, add another node after 3 seconds."""
    node = run.node(rng)
    run.say(f"killing a node without notice; {len(run.nodes.all) - 1} nodes remain")
    done = time.time()
    run.nodes.kill(node)
    if not run.nodes.all:
        time.sleep(3)
        run.nodes.add()
        run.say("added another node")
    return done


def add_node(run: Run, rng: random.Random) -> float:
    """Add a node to the cluster."""
    run.nodes.add()
    run.say(f"the cluster has {len(run.nodes.all)} nodes")
    return time.time()


def drain_node(run: Run, rng: random.Random) -> float:
    """Give notice that a random node will end, and kill the node NOTICE_S later."""
    node = run.node(rng)
    run.say(f"a node will be terminated in {NOTICE_S:.0f} s")
    done = time.time()
    run.nodes.drain(node, NOTICE_S)
    time.sleep(NOTICE_S)
    run.nodes.kill(node)
    run.say("the node was terminated")
    return done


def kill_driver(run: Run, rng: random.Random) -> float:
    """Kill the driver and resume the run."""
    run.say("sending SIGKILL to the driver, then --resume")
    done = time.time()
    run.signal(signal.SIGKILL)
    run.resume()
    return done


def interrupt_driver(run: Run, rng: random.Random) -> float:
    """Send Ctrl-C (SIGINT) to the driver, and resume the run."""
    run.say("sending Ctrl-C to the driver")
    done = time.time()
    code = run.signal(signal.SIGINT)
    run.say(f"the driver exited with code {code}; restarting with --resume")
    run.resume()
    return done


def end_group(run: Run, rng: random.Random) -> float:
    """Send SIGTERM to the driver's process group, as batch systems do, and resume the run."""
    run.say("sending SIGTERM to the driver's process group")
    done = time.time()
    code = run.signal(signal.SIGTERM, group=True)
    if code != ENDED:
        raise Problem(f"the exit code after SIGTERM is {code} instead of {ENDED}\n{run.tail()}")
    run.say("the run saved and exited; restarting with --resume")
    run.resume()
    return done


def kill_coordinator(run: Run, rng: random.Random) -> float:
    """Kill the coordinator; the run continues by itself, because Ray starts another coordinator."""
    pid = run.wait("a coordinator", run.nodes.coordinator)
    run.say(f"sending SIGKILL to the coordinator (pid {pid})")
    return _send(pid, signal.SIGKILL)


def kill_raylet(run: Run, rng: random.Random) -> float:
    """Kill the raylet of a node and add another node."""
    node = run.node(rng)
    run.say("sending SIGKILL to the raylet of a node")
    done = time.time()
    run.nodes.kill_raylet(node)
    run.nodes.add()
    run.say("added another node")
    return done


def kill_in_head(run: Run, rng: random.Random, process: str) -> float:
    """Kill a process of the head on which the driver's cluster depends; resume on another cluster.

    Raises:
        Problem: The run took too long to end, did not exit with code 1, did not name --resume, or printed a
            traceback.
    """
    run.say(f"sending SIGKILL to the {process} of the cluster's head")
    written, done = len(run.output()), time.time()
    run.nodes.kill_in_head(process)
    code = run.end(OVER_S)
    output, seconds = run.output(written), time.time() - done
    if "--resume" not in output or "Traceback" in output or code != 1:
        raise Problem(f"the run exited with code {code} after {seconds:.0f} s and printed:\n{output}")
    error = next((line.strip() for line in output.splitlines() if "error" in line), "")
    run.say(f"the run exited after {seconds:.1f} s: {error}; resuming on another cluster")
    run.nodes.begin_again()
    run.resume()
    return done


def fill_run_disk(run: Run, rng: random.Random) -> float:
    """Fill the disk of the run folder for a while; training continues, as checkpoints are elsewhere."""
    written = len(run.output())
    run.say("filled the disk of the run folder")
    done = time.time()
    with _full(run.folder.parent):
        run.wait("a message about the disk", lambda: FULL in run.output(written))
        step = run.attempt().last
        run.wait("further training steps", lambda: run.attempt().last > step + 5)
    run.say("freed the disk of the run folder")
    run.wait("a message about the disk", lambda: ROOM in run.output(written))
    if run.since(done):
        raise Problem(f"the workers were restarted\n{run.tail()}")
    return done


def fill_disk(run: Run, rng: random.Random) -> float:
    """Fill the disk of the checkpoints until a save has failed."""
    run.say("filled the disk of the checkpoints")
    done = time.time()
    with _full(Path(run.checkpoints).parent):
        failed = run.wait("a failed save", lambda: [e for e in run.events(done) if e.get("error")])
    run.say(f"freed the disk of the checkpoints; the run reported: {failed[0]['error'].splitlines()[0]}")
    run.new_checkpoint()
    return done


@contextmanager
def _full(disk: Path) -> Iterator[None]:
    """Keep a disk full during the block, even if the run frees space."""
    over = Event()

    def fill() -> None:
        with open(disk / "filler", "wb", buffering=0) as file:
            while not over.wait(0.05):
                with suppress(OSError):
                    while True:
                        file.write(bytes(1 << 12))

    filler = Thread(target=fill)
    filler.start()
    try:
        yield
    finally:
        over.set()
        filler.join()
        (disk / "filler").unlink()


def _send(pid: int, number: int) -> float:
    done = time.time()
    os.kill(pid, number)
    return done


# Kind → (function, names of the events by which the run shows that it has detected the fault).
FAULTS: dict[str, tuple[Callable[[Run, random.Random], float], tuple[str, ...]]] = {
    "worker killed": (signal_worker, ("failed",)),
    "worker hangs": (partial(signal_worker, number=signal.SIGSTOP), ("hang",)),
    "worker killed in a commit": (kill_in_commit, ("failed",)),
    "checkpoint damaged: data": (corrupt_data, ("failed",)),
    "checkpoint damaged: index": (corrupt_index, ("failed",)),
    "node killed": (kill_node, ("failed",)),
    "node added": (add_node, ("asked",)),
    "node drained": (drain_node, ("asked",)),
    "driver killed": (kill_driver, ()),
    "driver interrupted": (interrupt_driver, ("asked",)),
    "disk full": (fill_disk, ("saved",)),
    "run disk full": (fill_run_disk, ("full",)),
    "coordinator killed": (kill_coordinator, ("failed",)),
    "raylet killed": (kill_raylet, ("failed",)),
    "driver's raylet killed": (partial(kill_in_head, process="raylet"), ()),
    "GCS killed": (partial(kill_in_head, process="gcs_server"), ()),
    "process group ended": (end_group, ("asked",)),
}
GOES_ON = ("disk full", "run disk full")  # faults after which training continues in the same worker group
