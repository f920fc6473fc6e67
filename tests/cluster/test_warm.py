"""Test that the warm process forks workers like new processes and refuses all other requests."""

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
# As on WSL 2, where GPUs have no device file: a query for GPUs arms torch's guard for all forks.
WITH_GPUS = """
import torch
asked = []
torch.cuda._is_compiled, torch._C._cuda_getDeviceCount = (lambda: True), (lambda: asked.append(1) or 1)
torch.cuda._is_in_bad_fork = lambda: bool(asked)
"""
COLD_WORKER = "print('{\"warm\": false}')"  # stands in for Ray's own setup_worker.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    (folder / "worker.py").write_text(WORKER)
    (folder / "setup_worker.py").write_text(COLD_WORKER)
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
    """Context manager of a warm process that imports the given modules."""

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
    """Start a worker the way the raylet does."""
    context = json.dumps({"env_vars": set_for_it})
    command = [sys.executable, "-S", FORKED_WORKER_PROGRAM, str(folder / script), "--node-id=1"]
    command += [f"--serialized-runtime-env-context={context}", "--language=PYTHON"]
    environment = os.environ | {PLACE: str(place), "RAY_JOB_ID": job, "RAY_RAYLET_PID": str(RAYLET)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)


def run_worker(*args, **options):
    with start(*args, **options) as process:
        return json.loads(process.communicate(timeout=60)[0])


@pytest.mark.slow
def test_forked_worker_behaves_like_a_new_process(folder, place):
    one, other = (run_worker(folder, place, COLOUR=colour) for colour in ("red", "blue"))
    assert one["warm"] and one["arguments"] == ["--node-id=1"] and one["folder"] == str(folder)
    assert one["env"]["COLOUR"] == "red" and other["env"]["COLOUR"] == "blue"
    assert {one["pid"], one["id"], one["random"]}.isdisjoint({other["pid"], other["id"], other["random"]})


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"job": "02000000"}, {"MALLOC_ARENA_MAX": "3"}, {"RAY_worker_niceness": "3"}])
def test_changed_startup_settings_prevent_forking(folder, place, wrong):
    assert not run_worker(folder, place, **wrong)["warm"]


@pytest.mark.survive
def test_ids_drawn_before_the_fork_prevent_forking(folder):
    with warm(folder, "seeds") as place:
        assert not run_worker(folder, place)["warm"]


@pytest.mark.survive
@pytest.mark.parametrize("module,forks", [("asks", True), ("begins", False)])
def test_forked_worker_can_use_gpus(folder, module, forks):
    """fbgemm_gpu only queries GPUs on import; a module that initializes CUDA prevents forking."""
    with warm(folder, "with_gpus", module) as place:
        found = run_worker(folder, place)
        assert found["warm"] == forks and not found.get("refused")


@pytest.mark.survive
def test_cold_workers_do_not_wait_for_imports(folder):
    with warm(folder, "slow", early=["with_gpus", "begins"]) as place:
        assert not run_worker(folder, place)["warm"] and not (folder / "slow").exists()


@pytest.mark.survive
def test_forked_workers_end_with_requester_and_driver(folder):
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
    assert not run_worker(folder, place)["warm"], "workers must also start without the warm process"


def wait_until_gone(pid):
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the worker's end", 10)
