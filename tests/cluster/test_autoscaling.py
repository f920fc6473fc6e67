"""Test autoscaling: a run gets its nodes, survives the loss of a node, and idle nodes are removed.

Uses Ray's own autoscaler, the node types of cluster.yaml, and Ray nodes on this machine as machines.
"""

import os
import subprocess
import sys
import time

import pytest
from autoscaled import BENCHMARKS, AutoscaledCluster
from planted import EPOCHS, configure, prepare
from recorder import RECORDS, compare
from watched import Run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS, LEAST, MOST = 300, 1, 3
LONGEST_S = 240.0  # upper bound for any wait on a busy machine


class ClusterRun(Run):
    """`raytrec train` on the cluster as a separate process, with a record of the rows of every step."""

    def __init__(self, cluster, folder):
        self.rows = prepare(folder / "data", STEPS)
        config = configure(folder, folder / "data", {"min": LEAST, "max": MOST})
        path = folder / "run"
        super().__init__(path, path / "checkpoints", config, cluster, time.monotonic() + 800)

    def start(self, *arguments):
        command = [sys.executable, str(BENCHMARKS / "recorder.py"), "train", *arguments]
        env = self.nodes.env | {"RAY_ADDRESS": self.nodes.address, RECORDS: os.environ[RECORDS]}
        with self.log.open("w") as log:
            self._process = subprocess.Popen([*command, "tracking.report=false"], env=env, stdout=log, stderr=log)

    def tail(self):
        return f"{super().tail()}\n{self.nodes.log()}"

    def trains_on(self, workers, since=0.0):
        """Return True if a group of this size, started after `since`, has trained a few steps."""
        attempts = self.since(since)
        return bool(attempts) and attempts[-1].world == workers and attempts[-1].last > attempts[-1].first + 5

    def machine(self):
        """Return the machine of rank 0."""
        return self.nodes.node_of(self.attempt().raylets[0])


def assert_auto_device_is_rejected(cluster, folder):
    """Assert that device auto is rejected while the cluster has no GPU, as node types depend on it."""
    config = configure(folder, folder / "guess", {"min": LEAST, "max": MOST})
    prepare(folder / "guess", EPOCHS * 4)
    command = [sys.executable, "-m", "raytrec", "train", str(config), "scaling.device=auto"]
    command += [f"run.dir={folder / 'no-run'}", f"scaling.address={cluster.address}"]
    done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode != 0 and "currently has no GPUs" in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert cluster.nodes() == {}


def test_autoscaler_adds_replaces_and_removes_nodes(tmp_path, monkeypatch):
    monkeypatch.setenv(RECORDS, str(tmp_path / "records"))  # its nodes pass it to the ranks
    with AutoscaledCluster(tmp_path / "cluster", idle_s=8) as cluster:
        assert cluster.nodes() == {}
        assert_auto_device_is_rejected(cluster, tmp_path)
        run = ClusterRun(cluster, tmp_path)
        run.pace(0.05)
        with run.begun():
            run.wait("three workers", lambda: run.trains_on(MOST))
            assert len(cluster.nodes()) >= MOST  # more while one group ends and the next one starts
            run.wait("a checkpoint", run.saved)

            gone, taken = run.machine(), time.time()
            cluster.kill_node(gone)
            run.wait("training again", lambda: run.since(taken))
            run.wait("three workers again", lambda: run.trains_on(MOST, since=taken))
            assert gone not in cluster.nodes() and len(cluster.nodes()) >= MOST

            going, before = run.machine(), run.attempt()
            told = time.time()
            cluster.run(sys.executable, "-m", "raytrec.cluster.preemption", "now", "--node", going, "--seconds", "90")
            assert time.time() - told < 80, "the node has not become empty in time"
            later = run.wait("going on", lambda: run.since(told))[0]
            assert later.first == before.last + 1, "a step was lost despite the notice"

            run.pace(0)
            run.finish()
        run.wait("idle nodes to go", lambda: not cluster.nodes(), alive=False)

    trained = run.record.trained()
    assert sorted(trained) == list(range(1, STEPS + 1))
    outcome = compare(trained, trained, run.rows, EPOCHS)
    assert (outcome["rows_lost"], outcome["rows_doubled"]) == (0, 0)
    assert run.result()["train.rows"] == run.rows * EPOCHS
