"""Nodes come when a run asks for them, a run survives one that goes, and nodes go when nothing runs on them.

With Ray's own autoscaler, cluster.yaml's node types, and machines that are Ray nodes on this machine.
"""

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from autoscaled import BENCHMARKS, Autoscaled

sys.path.append(str(BENCHMARKS))

from planted import EPOCHS, configure, prepare
from recorder import PACE, RECORDS, Record, compare, records_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS, LEAST, MOST = 300, 1, 3
LONGEST_S = 240.0  # for anything, on a machine that is busy with other work


class Run:
    """`raytrec train` on the cluster as a separate process, with a record of the rows of every step."""

    def __init__(self, cluster, folder):
        self.cluster, self.path, self.log = cluster, folder / "run", folder / "run.log"
        self.rows = prepare(folder / "data", STEPS)
        self.config = configure(folder, folder / "data", {"min": LEAST, "max": MOST})
        self.record = Record(self.path)

    @contextmanager
    def begun(self):
        self.path.mkdir()
        self.pace(0.05)
        command = [sys.executable, str(BENCHMARKS / "recorder.py"), "train", str(self.config)]
        command += [
            f"run.dir={self.path}",
            f"scaling.address={self.cluster.address}",
            "tracking.report=false",
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=self.cluster.env, stdout=log, stderr=log)
        try:
            yield self
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(30)

    def pace(self, seconds):
        """How much longer a step takes from now on."""
        partial = records_of(self.path) / (PACE + ".partial")
        partial.write_text(str(seconds))
        partial.replace(partial.with_name(PACE))

    def wait(self, what, found, alive=True):
        deadline = time.monotonic() + LONGEST_S
        while not (value := found()):
            ended = self.process.poll()
            story = f"{what}\n{self.log.read_text()[-3000:]}\n{self.cluster.log()}"
            assert ended is None or not alive, f"the run has ended with {ended} before: {story}"
            assert time.monotonic() < deadline, f"nothing for {LONGEST_S:.0f} s: {story}"
            time.sleep(0.3)
        return value

    def trains_on(self, workers, since=0.0):
        """Whether that many workers have trained a few steps, in a group that began after a moment."""
        attempts = [attempt for attempt in self.record.look() if attempt.began > since]
        return bool(attempts) and attempts[-1].world == workers and attempts[-1].last > attempts[-1].first + 5

    def node(self):
        """The machine of rank 0."""
        return self.cluster.node_of(self.record.look()[-1].raylets[0])

    def saved(self, after):
        """Whether a step after this one has been saved."""
        return any(e["event"] == "saved" and not e["error"] and e["step"] > after for e in self.events())

    def events(self):
        path = self.path / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]


def refuses_to_guess(cluster, folder):
    """Without a GPU yet, the device decides which nodes a run needs."""
    config = configure(folder, folder / "guess", {"min": LEAST, "max": MOST})
    prepare(folder / "guess", EPOCHS * 4)
    command = [sys.executable, "-m", "raytrec", "train", str(config), "scaling.device=auto"]
    command += [f"run.dir={folder / 'no-run'}", f"scaling.address={cluster.address}"]
    done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode != 0 and "has no GPU now" in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert cluster.nodes() == {}


def test_nodes_come_and_one_is_taken_away_and_all_go(tmp_path, monkeypatch):
    monkeypatch.setenv(RECORDS, str(tmp_path / "records"))  # its nodes pass it to the ranks
    with Autoscaled(tmp_path / "cluster", idle_s=8) as cluster:
        assert cluster.nodes() == {}
        refuses_to_guess(cluster, tmp_path)
        with Run(cluster, tmp_path).begun() as run:
            run.wait("three workers", lambda: run.trains_on(MOST))
            assert len(cluster.nodes()) >= MOST  # more for a moment, where a group ends while the next begins
            run.wait("a checkpoint", lambda: run.saved(0))

            gone, taken = run.node(), time.time()
            cluster.take_away(gone)
            run.wait("training again", lambda: [a for a in run.record.look() if a.began > taken])
            run.wait("three workers again", lambda: run.trains_on(MOST, since=taken))
            assert gone not in cluster.nodes() and len(cluster.nodes()) >= MOST

            going, before = run.node(), run.record.look()[-1]
            told = time.time()
            cluster.run(
                sys.executable, "-m", "raytrec.cluster.preemption", "now", "--node", going, "--seconds", "90"
            )
            assert time.time() - told < 80, "the node has not become empty in time"
            later = run.wait("going on", lambda: [a for a in run.record.look() if a.began > told])[0]
            assert later.first == before.last + 1, "a step is lost, although there was notice"

            run.pace(0)
            run.wait("its end", lambda: run.process.poll() is not None, alive=False)
            assert run.process.returncode == 0, run.log.read_text()[-3000:]
        run.wait("idle nodes to go", lambda: not cluster.nodes(), alive=False)

    trained = run.record.trained()
    assert sorted(trained) == list(range(1, STEPS + 1))
    outcome = compare(trained, trained, run.rows, EPOCHS)
    assert (outcome["rows_lost"], outcome["rows_doubled"]) == (0, 0)
    result = json.loads((run.path / "result.json").read_text())
    assert result["train.rows"] == run.rows * EPOCHS
