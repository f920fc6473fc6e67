"""The smallest form of every make target, one after the other: does it still run at all?

    python benchmarks/smoke.py [--only train,parity]

One fault, few cases, seconds of data; nothing is written into benchmarks/results or the repository. The exit
code is 1 if one of them fails; what it said is printed then.
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
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

REPO = Path(__file__).parents[1]
LIMIT_S = 300

# What follows `python`, by target (and part of it). {folder} has data of a few rows, and is removed.
PYTEST = "-m pytest -q -p no:cacheprovider"
DATA = "data.train={folder}/data/train data.valid={folder}/data/valid data.test={folder}/data/test"
COMBINATIONS = "tests/parity/test_suite.py::test_every_combination"
MUTATIONS = "tests/mutations/test_refusals.py::test_all_values_of_configurations"
STORE = "tracking.uri=sqlite:///{folder}/mlflow.db"
TARGETS = {
    "install": "-c 'import raytrec, torch, torchrec, fbgemm_gpu, ray, mlflow'",
    "train": f"-m raytrec train jobs/synthetic.yaml {DATA} run.dir={{folder}}/run {STORE}",
    "test": f"{PYTEST} tests/config/test_schema.py tests/tasks/test_whole_batches.py",
    "test-fast": f"{PYTEST} tests/config/test_config.py tests/data/test_order.py",
    "test-survive": f"{PYTEST} tests/worker/test_nonfinite.py -m survive -k leaves_the_steps_out",
    "mutations": f"{PYTEST} '{MUTATIONS}[3]' -m mutations",
    "cluster-test": f"{PYTEST} tests/client/test_run.py -m 'cluster or not cluster'",
    "cluster-test: notebooks": f"{PYTEST} tests/notebooks -m cluster -k 'jobs or own_model'",
    "cluster-test: nodes": f"{PYTEST} tests/cluster/test_autoscaling.py -m cluster",
    "weight": "benchmarks/weight.py",
    "golden": f"{PYTEST} tests/golden -k own",
    "parity": f"{PYTEST} '{COMBINATIONS}[1 ranks, from case 0]' -m parity",
    "chaos": "-W ignore benchmarks/chaos.py --faults 2 --only 'coordinator killed' --only 'node killed'",
    "chaos: ends early": f"{PYTEST} tests/cluster/test_chaos.py -m cluster",
    "bench": "-W ignore benchmarks/step.py --smallest {folder}/data/train",
    "bench-growth": "-W ignore benchmarks/growth.py --smallest",
    "overhead": "benchmarks/overhead.py --smallest",
    "curves": f"benchmarks/curves.py --smallest jobs/synthetic.yaml {DATA}",
    "bench-precision": f"-W ignore benchmarks/precision.py --smallest jobs/synthetic.yaml {DATA}",
    "bench-ingest": "-W ignore benchmarks/ingest.py --smallest {folder}/data/train",
    "bench-checkpoint": "-W ignore benchmarks/checkpoint.py --smallest --folder {folder}/saved",
    "bench-watching": "-W ignore benchmarks/watching.py --smallest",
    "bench-metrics": "-W ignore benchmarks/metric_memory.py --smallest",
    "bench-sequences": "-W ignore benchmarks/sequences.py --smallest",
    "bench-requests": "-W ignore benchmarks/grouped.py --smallest",
    "bench-ids": "-W ignore benchmarks/ids.py --smallest",
    "bench-tiers": "-W ignore benchmarks/tiers.py --smallest --folder {folder}/tiers",
    "bench-ids-resume": "-W ignore benchmarks/ids_resume.py --smallest",
    "bench-ids-quality": "-W ignore benchmarks/ids_quality.py --smallest",
    "quality": "-W ignore benchmarks/quality.py --smallest --only ml100k_dlrm",
    "bench-export": "-W ignore benchmarks/export.py --smallest",
    "bench-host": "-W ignore benchmarks/host.py --smallest --models dcn",
    "bench-serve": "-W ignore benchmarks/serve.py --smallest",
    "soak-serve": "-W ignore tests/serving/soak.py --smallest",
    "bench-start": "-W ignore benchmarks/start.py --smallest",
    "bench-plan": "-W ignore benchmarks/plan.py --smallest",
    "bench-scale": "-W ignore benchmarks/scale.py --smallest",
    "gpu-check": "-W ignore tests/gpu/check.py --smallest --only environment --out {folder}/gpu-check.json",
    "bench-gpu": "-W ignore benchmarks/gpu.py --device cpu --only dense,kinds,host,exchange --rounds 1 "
    "--no-compiled",
    "lint": "-m ruff check benchmarks",
}
# These change the checkout or the environment, or run others, and have nothing smaller.
NONE = ("format", "map", "lock", "clean", "smoke", "test-all", "test-next", "quality-smoke")


def target_of(name: str) -> str:
    """The make target of an entry."""
    return name.partition(":")[0]


def run(smallest: str, folder: Path) -> tuple[float, subprocess.CompletedProcess]:
    """(seconds, what came of it)."""
    began = time.monotonic()
    command = [sys.executable, *shlex.split(smallest.replace("{folder}", shlex.quote(str(folder))))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=REPO, env=environment, start_new_session=True, **pipes) as process:
        try:
            said = process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = f"{process.communicate()[0]}\nit has not ended within {LIMIT_S} s"
    done = subprocess.CompletedProcess(command, process.returncode, said)
    return time.monotonic() - began, done


def main(only: Annotated[str, typer.Option(help="These targets alone, with commas between.")] = "") -> None:
    """Prints a table: target, seconds, whether it passed."""
    wanted = set(filter(None, only.split(",")))
    chosen = {name: command for name, command in TARGETS.items() if not only or target_of(name) in wanted}
    if unknown := wanted - {target_of(name) for name in TARGETS}:
        raise typer.BadParameter(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    table = Table(title="make smoke")
    for column in ("target", "s", "result"):
        table.add_column(column, justify="right" if column == "s" else "left", no_wrap=True)
    failed = []
    with tempfile.TemporaryDirectory(prefix="smoke-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        data = "-m raytrec prepare synthetic --rows 6000 --out {folder}/data"
        chosen = {"data for the others": data, **chosen}
        for name, smallest in chosen.items():
            seconds, done = run(smallest, folder)
            passed = done.returncode == 0
            print(f"{name}: {'passed' if passed else 'FAILED'}, {seconds:.0f} s", flush=True)
            table.add_row(name, f"{seconds:.0f}", "[green]passed[/]" if passed else "[red]FAILED[/]")
            if not passed:
                failed.append(name)
                print("\n".join(done.stdout.splitlines()[-40:]), flush=True)
    Console().print(table)
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
