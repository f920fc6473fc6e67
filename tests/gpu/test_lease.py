"""Tests of tests/gpu/lease.sh, the script for a GPU that is available for a limited time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest
from blocks import BLOCK_TIMEOUTS_S

SCRIPT = Path(__file__).parent / "lease.sh"


def run_script(out, *arguments, python=sys.executable):
    """Run lease.sh on CPU and return (exit status, results by stage, output)."""
    command = ["bash", str(SCRIPT), "--device", "cpu", "--out", str(out), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHON": str(python)}
    )
    documents = [json.loads(path.read_text()) for path in out.glob("*.json") if "-figures" not in path.name]
    return done.returncode, {one["stage"]: one["result"] for one in documents}, done.stdout + done.stderr


@pytest.fixture
def interpreter(tmp_path):
    """Return a function that makes an interpreter which runs shell code in place of Python scripts."""

    def make(code):
        path = tmp_path / "interpreter"
        path.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n{code}\n')
        path.chmod(0o755)
        (tmp_path / "calls").unlink(missing_ok=True)
        return path

    return make


def read_calls(tmp_path):
    return re.findall(r"--only (\S+)", (tmp_path / "calls").read_text())


def test_failed_stage_does_not_stop_later_stages(tmp_path, interpreter):
    python = interpreter('case "$*" in *parity*) echo broken; exit 3;; esac')
    status, results, said = run_script(tmp_path / "out", python=python)
    others = {"order": "cannot run here", "memory": "cannot run here", "parity": "failed"}
    stages = ("facts", "parts", "tables", "runs", "waits", "speed", "faults")
    assert (status, results) == (1, dict.fromkeys(stages, "passed") | others), said
    assert (tmp_path / "out" / "parity.log").read_text() == "broken\n"
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["exit_status"] == 3


def test_stage_ends_at_the_time_limit_and_later_stages_do_not_start(tmp_path, interpreter):
    began = monotonic()
    status, results, said = run_script(
        tmp_path / "out", "--seconds", "1", "--only", "parity,tables", python=interpreter("exec sleep 300")
    )
    assert (status, results) == (1, {"parity": "timed out", "tables": "not started"}), said
    assert monotonic() - began < 200


def test_next_call_runs_only_stages_that_have_not_passed(tmp_path, interpreter):
    chosen = ("--only", "parts,parity,tables")
    run_script(tmp_path / "out", *chosen, python=interpreter('case "$*" in *parity*) exit 1;; esac'))
    killed = {"stage": "tables", "result": "running", "device": "cpu"}  # left by a call that was killed
    (tmp_path / "out" / "tables.json").write_text(json.dumps(killed))
    status, results, said = run_script(tmp_path / "out", *chosen, python=interpreter("exit 0"))
    assert (status, results) == (0, dict.fromkeys(("parts", "parity", "tables"), "passed")), said
    assert read_calls(tmp_path) == ["parity", "adam,uvm"]


def test_logs_keep_only_the_end_of_the_output(tmp_path, interpreter):
    python = interpreter("seq 100000; echo the end")
    run_script(tmp_path / "out", "--only", "parity", python=python)
    log = (tmp_path / "out" / "parity.log").read_text()
    assert len(log) == 20_000 and log.endswith("the end\n")


def test_stages_cover_every_block(tmp_path, interpreter):
    run_script(tmp_path / "out", python=interpreter("exit 0"))
    named = set(",".join(read_calls(tmp_path)).split(","))
    assert {*BLOCK_TIMEOUTS_S} - named == {"speed"}, "speed is measured by benchmarks/gpu.py"


@pytest.mark.parametrize(
    "words", [["--only", "sped"], ["--device", "tpu"], ["--quick"], ["--out"], ["--seconds", "1h"]]
)
def test_lease_rejects_unknown_arguments(words):
    done = subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


@pytest.mark.survive
@pytest.mark.timeout(900)
def test_shortest_rehearsal_passes_on_cpu(tmp_path):
    status, results, said = run_script(tmp_path, "--smallest", "--only", "facts,parts,waits,memory")
    assert status == 0, said
    assert results == dict.fromkeys(("facts", "parts", "waits"), "passed") | {"memory": "cannot run here"}
    figures = json.loads((tmp_path / "waits-figures.json").read_text())
    assert {block["name"]: block["result"] for block in figures["blocks"]}["phases"] == "passed"
    assert "torch 2" in (tmp_path / "facts.log").read_text()
