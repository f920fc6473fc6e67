"""Tests of `make bench`: CPU time of processes, summaries of rounds, and the docs tables."""

import sys
from importlib import import_module
from time import monotonic, sleep

import harness
import pytest
from processes import Command
from step import Measured
from step_results import documents, markdown, rows_of, summarize

SPIN_SOURCE = "import time\nwhile time.process_time() < {}: pass\n"
# The first process uses 0.3 s of CPU time and exits. The second, in a separate session, uses 0.2 s and stays.
TWO_PROCESSES_SOURCE = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-S", "-c", {SPIN_SOURCE.format(0.3)!r}])
subprocess.Popen([sys.executable, "-S", "-c", {SPIN_SOURCE.format(0.2)!r} + "time.sleep(9)"],
    start_new_session=True)
time.sleep(1.5)
"""


@pytest.fixture
def results():
    def measured(speed, cpu):
        return Measured(speed, cpu, 100.0)

    rounds = {
        "limit": [measured(100.0, 10.0), measured(50.0, 12.0)],
        "by_hand": [measured(90.0, 11.0), measured(45.0, 13.0)],
        "ray_recipe": [measured(50.0, 20.0), measured(25.0, 24.0)],
        "raytrec": [measured(95.0, 10.5), measured(40.0, 12.6)],
    }
    slower = {side: [measured(m.samples_per_s / 2, m.cpu_us_per_row) for m in of] for side, of in rounds.items()}
    slower["raytrec"] = [measured(30.0, 12.0), measured(15.0, 14.4)]
    return summarize("some rows", {"dlrm_1": rounds, "dlrm_2": slower})


@pytest.mark.slow
def test_cpu_time_includes_detached_and_exited_processes(tmp_path):
    command = Command([sys.executable, "-S", "-c", TWO_PROCESSES_SOURCE], tmp_path / "one")
    other = Command([sys.executable, "-S", "-c", SPIN_SOURCE.format(0.1)], tmp_path / "two")
    deadline = monotonic() + 60
    while command.running and monotonic() < deadline:
        command.look(0.1)
        sleep(0.02)
    assert other.end() in (0, -9)
    moment, spent = command.samples[-1]
    assert 0.4 <= spent <= 1.5, "expected the CPU time of exactly two processes"
    assert command.peak_mib > 1
    assert len(command._marked.pids()) == 1, "expected only the process in the other session"
    halves = command.cpu_s((command.samples[-2][0] + moment) / 2)
    assert command.samples[-2][1] <= halves <= spent
    command.end()
    while command._marked.pids() and monotonic() < deadline:
        sleep(0.02)
    assert not command._marked.pids()


def test_summary_uses_best_rounds_and_worst_case(results):
    assert results["by_case"]["dlrm_1"]["raytrec_over_limit"] == pytest.approx(0.95)
    assert results["ratios"]["raytrec_over_limit"] == pytest.approx(0.6), "expected the ratio of dlrm_2"
    assert results["ratios"]["raytrec_over_by_hand"] == pytest.approx(30 / 45, abs=1e-4)
    assert results["cpu_ratio"] == pytest.approx(1.2)
    assert results["samples_per_s"]["raytrec"] == {"dlrm_1": 95.0, "dlrm_2": 30.0}


def test_step_table_has_one_line_per_side(results):
    lines = markdown(results, ["dlrm_2"]).splitlines()
    assert len(lines) == 2 + 4 and lines[2].startswith("| DLRM, 2 workers | ")
    assert "| raytrec train | 30 | 12.0 | 100 |" in lines[-1]
    assert len(rows_of(results, "dlrm_1")) == 4


DOCUMENTED = ["start", "ids", "ids_quality", "sequences", "tiers", "grouped", "sync_interval", "online"]
DOCUMENTED += ["table_shards"]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_benchmarks_page_has_latest_results(name):
    found = harness.load(name)
    expected = import_module(name).document(found) if found else ""
    assert harness.filled(harness.BENCHMARKS_PAGE, name) == [expected]


@pytest.mark.parametrize("page", ["README.md", harness.BENCHMARKS_PAGE])
def test_docs_have_latest_step_tables(page):
    results = harness.load("step")
    assert harness.filled(page, "step") == [documents(results)[page] if results else ""]
