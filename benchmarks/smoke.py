"""Run the smallest forms of the make targets, one after another.

    python benchmarks/smoke.py [--only train,parity]

The smallest forms run few cases on little data, inject few faults, and write nothing into benchmarks/results
or the repository. If a target fails, the exit code is 1 and the end of the target's output is printed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer
from harness import REPO, Grid, Only, split

LIMIT_S = 600

# Target (and part of it) → arguments of `python`. {folder} contains data with a few rows and is removed.
PYTEST = "-m pytest -q -p no:cacheprovider"
DATA = "data.train={folder}/data/train data.valid={folder}/data/valid data.test={folder}/data/test"
COMBINATIONS = "tests/parity/test_suite.py::test_all_combinations_match_one_process"
MUTATIONS = "tests/mutations/test_refusals.py::test_mutated_input_is_handled_in_all_examples"
STORE = "tracking.uri=sqlite:///{folder}/mlflow.db"
TARGETS = {
    "install": "-c 'import raytrec, torch, torchrec, fbgemm_gpu, ray, mlflow'",
    "train": f"-m raytrec train jobs/synthetic.yaml {DATA} run.dir={{folder}}/run {STORE}",
    "test": f"{PYTEST} tests/config/test_schema.py tests/tasks/test_whole_batches.py",
    "test-fast": f"{PYTEST} tests/config/test_config.py tests/data/test_order.py",
    "test-slow": f"{PYTEST} tests/skew -m slow",
    "test-survive": f"{PYTEST} tests/worker/test_nonfinite.py -m survive -k steps_are_skipped",
    "mutations": f"{PYTEST} '{MUTATIONS}[config values-3]' -m mutations",
    "cluster-test": f"{PYTEST} tests/client/test_run.py -m 'cluster or not cluster'",
    "cluster-test: notebooks": f"{PYTEST} tests/notebooks -m cluster -k 'jobs or own_model'",
    "cluster-test: nodes": f"{PYTEST} tests/cluster/test_autoscaling.py -m cluster",
    "weight": "benchmarks/weight.py",
    "golden": f"{PYTEST} tests/golden -k own",
    "parity": f"{PYTEST} '{COMBINATIONS}[1 ranks, from case 0]' -m parity",
    "chaos": "-W ignore benchmarks/chaos.py --faults 2 --only 'coordinator killed' --only 'node killed'",
    "chaos: ends early": f"{PYTEST} tests/cluster/test_chaos.py -m cluster",
    "bench": "-W ignore benchmarks/step.py --smallest {folder}/data/train",
    "overhead": "benchmarks/overhead.py --smallest",
    "curves": f"benchmarks/curves.py --smallest jobs/synthetic.yaml {DATA}",
    "bench-precision": f"-W ignore benchmarks/precision.py --smallest jobs/synthetic.yaml {DATA}",
    "bench-ingest": "-W ignore benchmarks/ingest.py --smallest {folder}/data/train",
    "bench-sequences": "-W ignore benchmarks/sequences.py --smallest",
    "bench-requests": "-W ignore benchmarks/grouped.py --smallest",
    "bench-ids": "-W ignore benchmarks/ids.py --smallest",
    "bench-tiers": "-W ignore benchmarks/tiers.py --smallest --folder {folder}/tiers",
    "bench-ids-quality": "-W ignore benchmarks/ids_quality.py --smallest",
    "quality": "-W ignore benchmarks/quality.py --smallest --only ml100k_dlrm",
    "bench-export": "-W ignore benchmarks/export.py --smallest",
    "bench-host": "-W ignore benchmarks/host.py --smallest --models dcn",
    "bench-serve": "-W ignore benchmarks/serve.py --smallest",
    "bench-table-shards": "-W ignore benchmarks/table_shards.py --smallest",
    "soak-serve": "-W ignore tests/serving/soak.py --smallest",
    "soak-online": "-W ignore tests/serving/soak_online.py --smallest",
    "bench-online": "-W ignore benchmarks/online.py --smallest",
    "bench-sync": "-W ignore benchmarks/sync_interval.py --smallest",
    "bench-start": "-W ignore benchmarks/start.py --smallest",
    "bench-plan": "-W ignore benchmarks/plan.py --smallest",
    "bench-scale": "-W ignore benchmarks/scale.py --smallest",
    "gpu-check": "-W ignore tests/gpu/check.py --smallest --only environment --out {folder}/gpu-check.json",
    "gpu-lease": f"{PYTEST} tests/gpu/test_lease.py -m survive",
    "bench-gpu": "-W ignore benchmarks/gpu.py --device cpu --only dense,kinds,host,exchange --rounds 1 --no-compiled",
    "lint": "-m ruff check benchmarks",
}
# Targets without a smaller form, which change the checkout or the environment, or run other targets.
NONE = ("format", "map", "lock", "clean", "smoke", "test-all", "test-whole", "test-next", "cuda-wheels")
NONE += ("quality-smoke",)


def target_of(name: str) -> str:
    """Return the make target of an entry."""
    return name.partition(":")[0]


def run(smallest: str, folder: Path) -> tuple[float, subprocess.CompletedProcess]:
    """Run a smallest form, and return (seconds, completed process)."""
    began = time.monotonic()
    command = [sys.executable, *shlex.split(smallest.replace("{folder}", shlex.quote(str(folder))))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=REPO, env=environment, start_new_session=True, **pipes) as process:
        try:
            output = process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = f"{process.communicate()[0]}\ntimed out after {LIMIT_S} s"
    done = subprocess.CompletedProcess(command, process.returncode, output)
    return time.monotonic() - began, done


def main(only: Only = "") -> None:
    """Run the targets, and print a table of their seconds and results."""
    wanted = set(split(only))
    chosen = {name: command for name, command in TARGETS.items() if not only or target_of(name) in wanted}
    if unknown := wanted - {target_of(name) for name in TARGETS}:
        raise typer.BadParameter(f"unknown target {', '.join(sorted(unknown))}; use {', '.join(TARGETS)}")
    rows, failed = [], []
    with tempfile.TemporaryDirectory(prefix="smoke-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        data = "-m raytrec prepare synthetic --rows 6000 --out {folder}/data"
        chosen = {"data for the others": data, **chosen}
        for name, smallest in chosen.items():
            seconds, done = run(smallest, folder)
            passed = done.returncode == 0
            print(f"{name}: {'passed' if passed else 'FAILED'}, {seconds:.0f} s", flush=True)
            rows.append([name, "[green]passed[/]" if passed else "[red]FAILED[/]", f"{seconds:.0f}"])
            if not passed:
                failed.append(name)
                print("\n".join(done.stdout.splitlines()[-40:]), flush=True)
    Grid(("target", "result", "s"), rows, "make smoke", left=2).show()
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
