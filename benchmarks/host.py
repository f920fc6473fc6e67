"""What the host does for a step: kernels that it would launch on a GPU, and milliseconds of Python.

    python benchmarks/host.py [--models dcn,dlrm] [--rounds 120]

On a GPU the host has to launch what a step consists of before the GPU is through with it: with 8,192 rows a
GPU the host, not the GPU, is the limit. One rank, on CPU, one row, layers and vectors of width 8 (as many as
in jobs/criteo_1tb_8xa100.yaml), so that arithmetic takes next to nothing:

launches   operators that compute something (no views, no allocations), by the part of the step
ms         of a step, in the fastest of many rounds, without the counting; compiled: with train.compile;
           while assembling: as a thread assembles a batch of 8,192 rows for each step, as the stream's does
assembling milliseconds of Python in which a batch is assembled, from one row in each of 4 places of the data

Prints a table; writes benchmarks/results/host.json and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from queue import Queue
from threading import Thread
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from documents import fill, keep
from gpu import FEATURES, WHOLE, batch_of, config_of, schema_of
from rank_group import join_group
from rich.console import Console
from rich.table import Table

from raytrec.data.batch import Batch, Collator
from raytrec.data.canonical import canonical_table
from raytrec.data.form import Form, ReadPlan
from raytrec.data.pieces import Rows
from raytrec.metrics.selection import Selection
from raytrec.metrics.sums import HELD, Sums
from raytrec.worker.build import build_step
from raytrec.worker.progress import Progress
from raytrec.worker.step import Step

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "helpers"))
from operators import Operators, is_launched  # noqa: E402

RESULTS = HERE / "results" / "host.json"
WARM, COUNTED, TIMED = HELD, HELD, 2 * HELD  # steps
ROWS, WIDTH = 1000, 8
LANES, BATCH = 4, 8192  # of a rank of 8: 32 places of the data
CASES: dict[str, dict[str, Any]] = {
    "dcn": {"name": "dcn", "bottom_mlp": [8] * 3, "cross_layers": 3, "cross_rank": 8, "top_mlp": [8] * 4},
    "dlrm": {"name": "dlrm", "bottom_mlp": [8] * 3, "top_mlp": [8] * 4},
}
# Columns of the table → of what is measured.
SHOWN = {
    "ms": "ms",
    "compiled, ms": "compiled_ms",
    "while assembling, ms": "while_assembling_ms",
    "assembling, ms": "assembling_ms",
}


class Launches(Operators):
    """Counts those inside a `with`.

    Attributes:
        of_phases: phase that the step is in → how many.
    """

    def __init__(self, step: Step):
        super().__init__()
        self.of_phases: Counter[str] = Counter()
        self._phases = step.phases

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of_phases[self._phases.current] += is_launched(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


def main(
    models: Annotated[str, typer.Option(help="Which ones, by comma.")] = ",".join(CASES),
    rounds: Annotated[int, typer.Option(help="Of every side, interleaved.")] = 120,
    smallest: Annotated[bool, typer.Option(help="Whether it runs at all; writes nothing.")] = False,
) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory(prefix="raytrec-host-") as folder:
        join_group(0, 1, f"{folder}/store")
        found = {name: measure(CASES[name], 1 if smallest else rounds) for name in models.split(",")}
    table = lines(found)
    shown = Table(*table[0])
    for line in table[1:]:
        shown.add_row(*line)
    Console(width=140).print(shown)
    if not smallest:
        keep(RESULTS, found)
        rows = [f"| {' | '.join(line)} |" for line in (table[0], ["---"] * len(table[0]), *table[1:])]
        fill("docs/benchmarks.md", "host", "\n".join(rows))


def measure(model: dict[str, Any], rounds: int) -> dict[str, Any]:
    """{"launches": {phase: number}} of a step, and the milliseconds in SHOWN."""
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
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, time in sides.items():
            took[name].append(time())
    return {"launches": launches} | {name: min(times) for name, times in took.items()}


class _Loop:
    """The training loop of one model on one rank."""

    def __init__(self, model: dict[str, Any], batch: Any, **train: Any):
        schema = schema_of(ROWS, WIDTH)
        config = config_of(replace(WHOLE, layers=model), 1, **train)
        device = torch.device("cpu")
        with patch("raytrec.embeddings.optim.in_one_kernel", lambda weights: True):  # as on a GPU
            self._step, _ = build_step(config, schema, device)
        self._progress = Progress(Sums(Selection.of_config(config, schema), device))
        self._batch = batch
        self._train(WARM)

    def _train(self, steps: int) -> None:
        for outputs in self._step.train(repeat(self._batch), steps):
            self._progress.count(1, outputs)

    def count(self) -> dict[str, float]:
        """Launches of a step, by phase."""
        with Launches(self._step) as launches:
            self._train(COUNTED)
        return {phase: number / COUNTED for phase, number in launches.of_phases.items()}

    def time(self, other: Assembling | None = None) -> float:
        """Milliseconds of a step, while batches are assembled in another thread."""
        ready: Queue = Queue(4)
        thread = Thread(target=lambda: [ready.put(other()) for _ in range(TIMED)])
        if other:
            thread.start()
        began = perf_counter()
        for outputs in self._step.train(repeat(self._batch), TIMED):
            self._progress.count(1, outputs)
            if other:
                ready.get()
        return 1000 * (perf_counter() - began) / TIMED


class Assembling:
    """Puts batches of so many rows together from LANES pieces."""

    def __init__(self, rows: int):
        form, n = Form(ReadPlan(schema_of(ROWS, WIDTH))), rows // LANES
        numbers, ids = np.zeros(n, np.float32), np.zeros(n, np.int32)
        table = canonical_table(form, [numbers], [numbers] * len(form.schema.dense), [ids] * FEATURES, [], n)
        self._collate, self._rows = Collator(form), rows
        self._pieces = [Rows.of(table.to_batches()[0])] * LANES

    def __call__(self) -> Batch:
        return self._collate(self._pieces, self._rows, self._rows)

    def time(self) -> float:
        """Milliseconds of a batch."""
        began = perf_counter()
        for _ in range(TIMED):
            self()
        return 1000 * (perf_counter() - began) / TIMED


def lines(found: dict[str, Any]) -> list[list[str]]:
    """The table."""
    phases = list(dict.fromkeys(phase for each in found.values() for phase in each["launches"]))
    head = ["launches of a step", *(phase.replace("_", " ") for phase in phases), "all", *SHOWN]
    return [
        head,
        *(
            [
                model,
                *(f"{each['launches'].get(phase, 0):.0f}" for phase in phases),
                f"{sum(each['launches'].values()):.0f}",
                *(f"{each[name]:.2f}" for name in SHOWN.values()),
            ]
            for model, each in found.items()
        ),
    ]


if __name__ == "__main__":
    typer.run(main)
