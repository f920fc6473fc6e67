"""Test `make chaos`: overlapping faults, and the record that is kept if the benchmark crashes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from autoscaled import BENCHMARKS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# The coordinator is killed again while Ray restarts it; then a fault raises an unexpected error.
BROKEN_BENCHMARK = """
import chaos, faults

def break_down(run, rng):
    raise StopIteration

def kill_twice(run, rng):
    assert run.nodes.of(1) is None, "no node has the raylet of process 1"
    faults.kill_coordinator(run, rng)
    return faults.kill_coordinator(run, rng)

faults.FAULTS["coordinator killed"] = kill_twice, ("failed",)
faults.FAULTS["node added"] = break_down, ()
kinds = ["coordinator killed", "node added"]
chaos.plan, chaos.choose = lambda *_: list(kinds), lambda wanted, nodes: wanted.pop(0)
chaos.main(faults=2, seed=0, only=kinds, minutes=8, keep=False)
"""


def test_crashed_chaos_benchmark_keeps_its_record():
    paths = [os.environ.get("PYTHONPATH"), str(BENCHMARKS)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-W", "ignore", "-c", BROKEN_BENCHMARK]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout and "StopIteration" in done.stdout, done.stdout + done.stderr
    assert "at fault 2 (node added); 0 faults remained" in done.stdout
    folder = Path(done.stdout.rpartition("the files are in ")[2].strip())
    kept = json.loads((folder / "chaos.json").read_text())
    assert [fault["kind"] for fault in kept["list"]] == ["coordinator killed"]
    assert kept["list"][0]["again_s"] > 0
    shutil.rmtree(folder)
