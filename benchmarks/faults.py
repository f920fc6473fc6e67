"""What can happen to a run: faults, done to real processes, nodes, disks and files.

Each does it, helps the run where a person would have to, and returns when it was done.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path

from watched import Problem, Run

from raytrec.checkpoint.files import folder_of
from raytrec.checkpoint.index import INDEX, read_index

NOTICE_S = 15.0  # before a drained node is taken away


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
    """In the largest tensor, because there are bytes between tensors that mean nothing."""
    step = run.new_checkpoint()
    folder = Path(folder_of(run.checkpoints, step))
    chunks = [chunk for tensor in read_index(str(folder))["tensors"].values() for chunk in tensor["chunks"]]
    chunk = max(chunks, key=lambda chunk: prod(chunk["sizes"]))
    return _corrupt(
        run, rng, step, folder / chunk["file"], chunk["start"] + rng.randrange(prod(chunk["sizes"]))
    )


def corrupt_index(run: Run, rng: random.Random) -> float:
    step = run.new_checkpoint()
    path = Path(folder_of(run.checkpoints, step)) / INDEX
    return _corrupt(run, rng, step, path, rng.randrange(path.stat().st_size))


def _corrupt(run: Run, rng: random.Random, step: int, path: Path, at: int) -> float:
    """Flips a bit of the newest checkpoint, and kills a worker, so that one is restored: an earlier one."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    run.say(f"a bit of byte {at:,} of {path.parent.name}/{path.name} has been flipped")
    done = kill_worker(run, rng)
    restored = run.wait("training again", lambda: run.since(done))[0].first - 1
    if restored >= step:
        raise Problem(f"step {restored} has been restored, although {path} is damaged")
    return done


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
    run.nodes.drain(node, NOTICE_S)
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
