"""The warm process forks workers that are like new processes, and refuses what could not be."""

import json
import os
import subprocess
import sys

import pytest
from waiting import wait_for

from raytrec.cluster.warm_process import FORKED_WORKER_PROGRAM, PLACE, WarmProcess

RAYLET = 4711
WORKER = """
import json, os, sys
import numpy
from ray import ObjectRef
found = {"warm": "early" in sys.modules, "id": ObjectRef.from_random().hex()}
found |= {"pid": os.getpid(), "arguments": sys.argv[1:], "folder": os.getcwd(), "random": numpy.random.rand()}
found["refused"] = "with_gpus" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork()
found |= {"env": dict(os.environ), "job": os.environ.get("RAY_JOB_ID")}
print(json.dumps(found), flush=True)
"""
# As on WSL 2, whose GPUs have no device file: who asks for GPUs has armed torch's guard for all forks.
WITH_GPUS = """
import torch
asked = []
torch.cuda._is_compiled, torch._C._cuda_getDeviceCount = (lambda: True), (lambda: asked.append(1) or 1)
torch.cuda._is_in_bad_fork = lambda: bool(asked)
"""
COLD = "print('{\"warm\": false}')"  # what Ray's own setup_worker.py would do


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    (folder / "worker.py").write_text(WORKER)
    (folder / "setup_worker.py").write_text(COLD)
    (folder / "waits.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    for name in ("early", "late"):
        (folder / f"{name}.py").write_text("")
    (folder / "seeds.py").write_text("import ray; ray.ObjectRef.from_random()")
    (folder / "with_gpus.py").write_text(WITH_GPUS)
    (folder / "asks.py").write_text("import torch; torch.cuda.is_available()")
    (folder / "begins.py").write_text("import torch; torch.cuda.device_count()")
    (folder / "slow.py").write_text(f"open({str(folder / 'slow')!r}, 'w')")
    return folder


@pytest.fixture(scope="module")
def place(folder):
    with warm(folder, "late") as place:
        yield place


class warm:
    """A warm process that has imported modules as those of Ray's."""

    def __init__(self, folder, *modules, early=()):
        self._place = folder / f"{modules[-1]}.socket"
        sys.path.insert(0, str(folder))
        self.process = WarmProcess(["early", "numpy.random", *early], list(modules))
        sys.path.remove(str(folder))

    def __enter__(self):
        self.process.listen(self._place)
        self.process.serve(RAYLET)
        return self._place

    def __exit__(self, *_):
        self.process.close()


def start(folder, place, script="worker.py", job="01000000", **set_for_it):
    """What the raylet does for a worker."""
    context = json.dumps({"env_vars": set_for_it})
    command = [sys.executable, "-S", FORKED_WORKER_PROGRAM, str(folder / script), "--node-id=1"]
    environment = os.environ | {PLACE: str(place), "RAY_JOB_ID": job, "RAY_RAYLET_PID": str(RAYLET)}
    return subprocess.Popen(
        [*command, f"--serialized-runtime-env-context={context}", "--language=PYTHON"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    )


def outcome(*args, **options):
    with start(*args, **options) as process:
        return json.loads(process.communicate(timeout=60)[0])


def test_a_forked_worker_is_like_a_process_of_its_own(folder, place):
    one, other = (outcome(folder, place, COLOUR=colour) for colour in ("red", "blue"))
    assert one["warm"] and one["arguments"] == ["--node-id=1"] and one["folder"] == str(folder)
    assert one["env"]["COLOUR"] == "red" and other["env"]["COLOUR"] == "blue"
    assert {one["pid"], one["id"], one["random"]}.isdisjoint({other["pid"], other["id"], other["random"]})


@pytest.mark.parametrize(
    "wrong", [{"job": "02000000"}, {"MALLOC_ARENA_MAX": "3"}, {"RAY_worker_niceness": "3"}]
)
def test_what_was_read_before_the_fork_cannot_be_otherwise(folder, place, wrong):
    assert not outcome(folder, place, **wrong)["warm"]


def test_ids_that_would_come_twice_are_noticed(folder):
    with warm(folder, "seeds") as place:
        assert not outcome(folder, place)["warm"]


@pytest.mark.parametrize("module,forks", [("asks", True), ("begins", False)])
def test_who_is_forked_can_use_gpus(folder, module, forks):
    """fbgemm_gpu asks whether there are any when it is imported; whatever begins CUDA is noticed."""
    with warm(folder, "with_gpus", module) as place:
        found = outcome(folder, place)
        assert found["warm"] == forks and not found.get("refused")


def test_where_nobody_can_be_forked_workers_do_not_wait_for_imports(folder):
    with warm(folder, "slow", early=["with_gpus", "begins"]) as place:
        assert not outcome(folder, place)["warm"] and not (folder / "slow").exists()


def test_a_worker_and_who_asked_for_it_end_together_and_all_with_the_driver(folder):
    with warm(folder, "early") as place:
        processes = [start(folder, place, "waits.py") for _ in range(3)]
        first, second, third = (int(process.stdout.readline()) for process in processes)
        processes[0].kill()
        os.kill(second, 9)
        assert processes[1].wait(10) == 0
        wait_until_gone(first)
    assert processes[2].wait(10) == 0
    wait_until_gone(third)
    for process in processes:
        process.communicate()
    assert not outcome(folder, place)["warm"], "Ray's workers start all the same"


def wait_until_gone(pid):
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the worker's end", 10)
