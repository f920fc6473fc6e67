"""Test runs whose Ray processes die, signals to process groups, and other clusters on the machine."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from test_survive import STEPS, assert_same_result, assert_saved, events, run_file, undisturbed  # noqa: F401
from waiting import wait_for

from raytrec.cluster.local_ray import sweep
from raytrec.driver import run as driver

pytestmark = [pytest.mark.survive, pytest.mark.timeout(400)]
PARTS = {"coordinator": "ray::Coordinator", "raylet": "raylet/raylet", "GCS": "gcs_server"}


@contextmanager
def training(file, *words):
    """Run `raytrec train` in a separate process group; yield it after its first checkpoint."""
    command = [*words, sys.executable, "-m", "raytrec", "train", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(lambda: events(file.parent / "run", "saved") or process.poll() is not None, "checkpoint", 300)
        assert process.poll() is None, process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def find_ray_processes(process):
    """Return the descendants of a process, their command lines, and the folder of its Ray."""
    family = psutil.Process(process.pid).children(recursive=True)
    lines = [" ".join(each.cmdline()) for each in family]
    (session,) = {w.split("=")[1] for line in lines for w in line.split() if w.startswith("--session-dir=")}
    return family, lines, Path(session).parent.parent


def kill_part(process, part):
    """Kill one part of the process's Ray; return the descendants and the folder of Ray."""
    family, lines, ray = find_ray_processes(process)
    (pid,) = [each.pid for each, line in zip(family, lines, strict=True) if PARTS[part] in line]
    os.kill(pid, signal.SIGKILL)
    return family, ray


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(family, ray):
    wait_for(lambda: not any(map(is_alive, family)), "end of Ray's processes", 5)
    assert not ray.exists()


@pytest.mark.parametrize("part", ["coordinator", "raylet"])
def test_run_survives_death_of_coordinator_or_raylet(undisturbed, tiny_data, tmp_path, part):  # noqa: F811
    run = tmp_path / "run"
    with training(run_file(tiny_data, tmp_path)) as process:
        family, ray = kill_part(process, part)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    failed = events(run, "failed")[-1]  # a worker's death may be reported before the raylet's
    assert part in failed["cause"] and failed["again"] and "Traceback" not in said
    assert f"{failed['cause']}; restarting" in " ".join(said.split()) and "state-dump" not in said
    assert 0 < events(run, "start")[-1]["step"] < STEPS
    metrics = json.loads((run / "result.json").read_text())
    assert_same_result(undisturbed, driver.Result(metrics, run))
    wait_until_gone(family, ray)


def test_gcs_exit_is_reported_in_one_sentence(undisturbed, tiny_data, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    with training(run_file(tiny_data, tmp_path)) as process:
        began = time.monotonic()
        family, ray = kill_part(process, "GCS")
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - began < 20
    assert "error: Ray's GCS, the process that manages the cluster, has exited" in said
    assert f"raytrec train --resume {run}" in said and "Traceback" not in said and len(said) < 2000, said
    wait_until_gone(family, ray)
    assert json.loads((run / "driver.json").read_text())["status"] == "FAILED"
    assert_same_result(undisturbed, driver.train(None, resume=run))


def test_killed_driver_leaves_no_ray_processes(tiny_data, tmp_path):
    """Ray's processes end with the driver; the next run removes the folder."""
    with training(run_file(tiny_data, tmp_path)) as process:
        family, _, ray = find_ray_processes(process)
        process.kill()
        wait_for(lambda: not any(map(is_alive, family)), "end of Ray's processes", 20)
    assert ray.exists()
    sweep(ray.parent)
    assert not ray.exists()


@pytest.mark.parametrize("way", ["timeout", "group"])
def test_signal_to_the_process_group_saves_the_run(undisturbed, tiny_data, tmp_path, way):  # noqa: F811
    """Batch systems and containers signal the group; `timeout` also signals the process."""
    run = tmp_path / "run"
    with training(run_file(tiny_data, tmp_path), *(["timeout", "600"] if way == "timeout" else [])) as process:
        os.killpg(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert_saved(run, said)
    assert_same_result(undisturbed, driver.train(None, resume=run))


def test_other_clusters_do_not_disturb_a_run(tiny_data, tmp_path):
    """The other clusters are a head started with `ray start` and a second local run."""
    from heads import RayHead

    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    longer = run_file(tiny_data, tmp_path / "a", train__epochs=1500)
    with training(longer) as process:
        with RayHead(tmp_path / "head", cpus=2), training(run_file(tiny_data, tmp_path / "b")) as other:
            assert other.communicate(timeout=200) and other.returncode == 0
            time.sleep(5)  # the cleaner looks each second
            assert process.poll() is None and not events(tmp_path / "a/run", "failed")
        time.sleep(3)
        assert process.poll() is None and not events(tmp_path / "a/run", "failed")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143
