"""Work of the host in a step: kernels that the host would launch on a GPU, and milliseconds of Python.

    python benchmarks/host.py [--models dcn,dlrm] [--only single,rank_of_8] [--rounds 120]

With 8,192 rows per GPU, launching a step's operators takes the host longer than running them takes the GPU. The
benchmark trains on one row, on one CPU rank, with as many layers as in jobs/criteo_1tb_8xa100.yaml but vectors of
width 8, so arithmetic takes almost no time:

launches   operators that launch kernels on a GPU (neither views nor allocations), by the part of the step
ms         milliseconds per step in the fastest of many rounds, without counting; compiled: with train.compile;
           while assembling: a thread assembles a batch of 8,192 rows for each step, as the stream does
assembling milliseconds of Python to assemble a batch from one row in each of 4 places of the data
rank of 8  launches and CPU milliseconds per step of one rank of 8 on torch's `fake` process group (fake_group.py),
           whose tables have one or two sharding types; ÷ single: median over rounds of the CPU time divided by the
           CPU time of a single rank, which is valid on a machine that runs other work

Writes benchmarks/results/host.json and the tables of docs/benchmarks.md. With --only, the measurements of the other
part stay in the file.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, repeat
from multiprocessing.connection import Connection
from queue import Queue
from threading import Thread
from time import perf_counter, process_time
from typing import Annotated, Any
from unittest.mock import patch

import harness
import numpy as np
import torch
import typer
from fake_group import join_fake_group, skip_all_reduces
from gpu import FEATURES, WHOLE, batch_of, config_of, schema_of
from harness import REPO, Grid, median_ratio, take_turns
from rank_group import join_group

from raytrec.config.run_config import RunConfig
from raytrec.data.batch import Batch, Collator
from raytrec.data.canonical import build_canonical_table
from raytrec.data.read_plans import ReadPlan, ResolvedReadPlan
from raytrec.data.row_slices import Rows
from raytrec.metrics.selection import Selection
from raytrec.metrics.sums import MAX_PENDING_STEPS, MetricSums
from raytrec.worker.build import build_step
from raytrec.worker.progress import Progress
from raytrec.worker.step import Step

sys.path.append(str(REPO / "tests" / "helpers"))
from operators import OperatorCounter, launches_kernel

WARM, COUNTED, TIMED = MAX_PENDING_STEPS, MAX_PENDING_STEPS, 2 * MAX_PENDING_STEPS  # steps
ROWS, WIDTH = 1000, 8
LANES, BATCH = 4, 8192  # for one of 8 ranks, which read 32 places of the data
CASES: dict[str, dict[str, Any]] = {
    "dcn": {"name": "dcn", "bottom_mlp": [8] * 3, "cross_layers": 3, "cross_rank": 8, "top_mlp": [8] * 4},
    "dlrm": {"name": "dlrm", "bottom_mlp": [8] * 3, "top_mlp": [8] * 4},
}
RANKS = 8  # of the fake group
SINGLE, RANK_OF_8 = "single", "rank_of_8"  # parts of the benchmark
# Side of the rank of 8 → sharding types, which the tables have in turn; None: a single rank.
SHARDING_TYPES: dict[str, list[str] | None] = {
    SINGLE: None,
    "1": ["table_wise"],
    "2": ["row_wise", "table_wise", "table_wise", "table_wise"],
}
# Column of the table → name of the measurement.
SHOWN = {
    "ms per step": "ms",
    "ms, compiled": "compiled_ms",
    "ms, while assembling": "while_assembling_ms",
    "ms to assemble a batch": "assembling_ms",
}


class Launches(OperatorCounter):
    """Context manager that counts operators that would launch a kernel.

    Attributes:
        of_phases: Phase of the step → number of launches.
    """

    def __init__(self, step: Step):
        super().__init__()
        self.of_phases: Counter[str] = Counter()
        self._phases = step.phases

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of_phases[self._phases.current] += launches_kernel(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure(model: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return {"launches": {phase: number}} of a step, and the measurements of SHOWN in milliseconds."""
    batch = batch_of(1, ROWS, [1] * FEATURES)
    plain, compiled = _Loop(model, batch), _Loop(model, batch, compile=True)
    launches = plain.count()
    least, whole = Assembling(LANES), Assembling(BATCH)
    sides: dict[str, Callable[[], float]] = {
        "ms": plain.time,
        "compiled_ms": compiled.time,
        "while_assembling_ms": lambda: plain.time(whole),
        "assembling_ms": least.time,
    }
    took = take_turns(sides, rounds)
    return {"launches": launches} | {name: min(times) for name, times in took.items()}


def measure_ranks(models: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Return model → key of SHARDING_TYPES → launches, cpu_ms and ratio (of CPU times, to a single rank) of a step."""
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raytrec-host-"))
        ranks = {side: _ForkedRank(types, f"{folder}/store", stack) for side, types in SHARDING_TYPES.items()}
        for name in models:
            for rank in ranks.values():
                rank.end.send(name)
            launches = {side: rank.end.recv() for side, rank in ranks.items()}
            took = take_turns({side: rank.time for side, rank in ranks.items()}, rounds)
            results[name] = {
                side: {
                    "launches": launches[side],
                    "cpu_ms": min(took[side]),
                    "ratio": median_ratio(took[side], took[SINGLE]),
                }
                for side in ranks
            }
    return results


class _ForkedRank:
    """Process of one side, forked before this process has a process group or threads.

    Attributes:
        end: Connection to the process. For the name of a model, the process returns the model's launches; for None,
            it returns the CPU milliseconds per step of the last model.

    Args:
        types: Sharding types of the tables, in turn; None: a single rank.
        store: Path of a file that does not exist yet; used by a single rank.
        stack: Exit stack; the process ends when the stack is closed.
    """

    def __init__(self, types: list[str] | None, store: str, stack: ExitStack):
        context = multiprocessing.get_context("fork")
        self.end, other_end = context.Pipe()
        process = context.Process(target=_answer, args=(types, store, other_end), daemon=True)
        process.start()
        stack.callback(process.kill)
        other_end.close()

    def time(self) -> float:
        """Return the CPU milliseconds per step."""
        self.end.send(None)
        return self.end.recv()


def _answer(types: list[str] | None, store: str, end: Connection) -> None:
    """Serve the requests of a _ForkedRank until the process is killed."""
    if types:
        join_fake_group(RANKS)
    else:
        join_group(0, 1, store)
    while True:
        if model := end.recv():
            loop = _Loop(CASES[model], batch_of(1, ROWS, [1] * FEATURES), types)
            end.send(loop.count())
        else:
            end.send(loop.time(clock=process_time))


class _Loop:
    """Training loop of one model on one rank, which is one of RANKS if `types` has sharding types."""

    def __init__(self, model: dict[str, Any], batch: Any, types: list[str] | None = None, **train: Any):
        schema = schema_of(ROWS, WIDTH)
        config = config_of(replace(WHOLE, layers=model), 1, **train)
        if types:
            config, batch.global_rows = _shard(config, list(schema.tables), types), RANKS
        device = torch.device("cpu")
        with patch("raytrec.embeddings.optim.choose_fused_option", lambda weights: True):  # as on a GPU
            self._step, _ = build_step(config, schema, device)
        if types:
            skip_all_reduces(self._step.model)
        self._progress = Progress(MetricSums(Selection.from_config(config, schema), device))
        self._batch = batch
        self._train(WARM)

    def _train(self, steps: int) -> None:
        for outputs in self._step.train(repeat(self._batch), steps):
            self._progress.count(1, outputs)

    def count(self) -> dict[str, float]:
        """Return a mapping from phase to the number of launches per step."""
        with Launches(self._step) as launches:
            self._train(COUNTED)
        return {phase: number / COUNTED for phase, number in launches.of_phases.items()}

    def time(self, other: Assembling | None = None, clock: Callable[[], float] = perf_counter) -> float:
        """Return the milliseconds per step on a clock, while a thread calls `other`, if given, to assemble batches."""
        ready: Queue = Queue(4)
        thread = Thread(target=lambda: [ready.put(other()) for _ in range(TIMED)])
        if other:
            thread.start()
        began = clock()
        for outputs in self._step.train(repeat(self._batch), TIMED):
            self._progress.count(1, outputs)
            if other:
                ready.get()
        return 1000 * (clock() - began) / TIMED


def _shard(config: RunConfig, tables: list[str], types: list[str]) -> RunConfig:
    """Return the configuration for RANKS workers whose tables have these sharding types in turn."""
    plan = {"tables": {name: {"sharding_type": kind} for name, kind in zip(tables, cycle(types), strict=False)}}
    values = config.model_dump(exclude_unset=True)
    values["data"]["global_batch_size"] = RANKS
    return RunConfig.model_validate(values | {"scaling": {"num_workers": RANKS}, "plan": plan})


class Assembling:
    """Function that assembles batches of `rows` rows from LANES pieces."""

    def __init__(self, rows: int):
        form, n = ResolvedReadPlan(ReadPlan(schema_of(ROWS, WIDTH))), rows // LANES
        numbers, ids = np.zeros(n, np.float32), np.zeros(n, np.int32)
        table = build_canonical_table(form, [numbers], [numbers] * len(form.schema.dense), [ids] * FEATURES, [], n)
        self._collate, self._rows = Collator(form), rows
        self._pieces = [Rows.of(table.to_batches()[0])] * LANES

    def __call__(self) -> Batch:
        """Assemble and return a new batch."""
        return self._collate(self._pieces, self._rows, self._rows)

    def time(self) -> float:
        """Return the milliseconds that assembling a batch takes."""
        began = perf_counter()
        for _ in range(TIMED):
            self()
        return 1000 * (perf_counter() - began) / TIMED


def grid(results: dict[str, Any]) -> Grid:
    """Return the table of results, with a row for each model."""
    phases = list(dict.fromkeys(phase for figures in results.values() for phase in figures["launches"]))
    header = ["model", *(phase.replace("_", " ") for phase in phases), "all launches", *SHOWN]
    rows = []
    for model, figures in results.items():
        launches = figures["launches"]
        counts = [*(launches.get(phase, 0) for phase in phases), sum(launches.values())]
        times = (f"{figures[name]:.2f}" for name in SHOWN.values())
        rows.append([model, *(f"{count:.0f}" for count in counts), *times])
    return Grid(header, rows)


def grid_of_ranks(results: dict[str, Any]) -> Grid:
    """Return the table of the rank of 8, with a row for each model and number of sharding types."""
    header = ["model", "ranks", "sharding types", "all launches", "CPU ms per step", "÷ single"]
    rows = []
    for model, figures in results.items():
        for side, of in figures[RANK_OF_8].items():
            names = [model, "1", "1"] if side == SINGLE else [model, str(RANKS), side]
            numbers = [f"{of['cpu_ms']:.2f}", f"{of['ratio']:.2f}"]
            rows.append([*names, f"{sum(of['launches'].values()):.0f}", *numbers])
    return Grid(header, rows)


def document(results: dict[str, Any]) -> str:
    """Return the table for docs/benchmarks.md: launches and times of a step in a single process."""
    shown = {name: key for name, key in SHOWN.items() if key != "assembling_ms"}
    rows = []
    for model, figures in results.items():
        times = (f"{figures[key]:.2f}" for key in shown.values())
        rows.append([model, f"{sum(figures['launches'].values()):.0f}", *times])
    return Grid(("model", "launches", *shown), rows).markdown()


GRIDS = {SINGLE: grid, RANK_OF_8: grid_of_ranks}


def main(
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(CASES),
    only: harness.Only = ",".join(GRIDS),
    rounds: harness.Rounds = 120,
    smallest: harness.Smallest = False,
) -> None:
    """Print the tables; without --smallest, write benchmarks/results/host.json and docs/benchmarks.md."""
    names, parts, rounds = harness.split(models), harness.split(only), 1 if smallest else rounds
    results = {name: {} for name in names} | ({} if smallest else harness.load("host"))
    if RANK_OF_8 in parts:
        for name, figures in measure_ranks(names, rounds).items():
            results[name][RANK_OF_8] = figures
    if SINGLE in parts:
        with tempfile.TemporaryDirectory(prefix="raytrec-host-") as folder:
            join_group(0, 1, f"{folder}/store")
            for name in names:
                results[name] |= measure(CASES[name], rounds)
    for part in parts:
        GRIDS[part](results).show(140)
    if not smallest:
        harness.publish("host", results, document(results))


if __name__ == "__main__":
    typer.run(main)
