"""What the host does for a step: kernels that it would launch on a GPU, and milliseconds of Python.

    python benchmarks/host.py [--models dcn,dlrm] [--rounds 7]

On a GPU the host has to launch what a step consists of before the GPU is through with it: with 8,192 rows a
GPU the host, not the GPU, is the limit. One rank, on CPU, one row, layers and vectors of width 8 (as many as
in jobs/criteo_1tb_8xa100.yaml), so that arithmetic takes next to nothing:

launches   operators that compute something (no views, no allocations), by the part of the step
ms         of a step, in the median of rounds, without the counting; compiled: with train.compile

Prints a table; writes benchmarks/results/host.json and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from documents import fill, keep
from gpu import FEATURES, WHOLE, batch_of, config_of, schema_of
from rank_group import join_group
from rich.console import Console
from rich.table import Table

from raytrec.metrics.selection import Selection
from raytrec.metrics.sums import Sums
from raytrec.worker.build import build_step
from raytrec.worker.progress import Progress
from raytrec.worker.step import Step

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "helpers"))
from operators import Operators, is_launched  # noqa: E402

RESULTS = HERE / "results" / "host.json"
WARM, COUNTED, TIMED = 8, 4, 30  # steps
ROWS, WIDTH = 1000, 8
CASES: dict[str, dict[str, Any]] = {
    "dcn": {"name": "dcn", "bottom_mlp": [8] * 3, "cross_layers": 3, "cross_rank": 8, "top_mlp": [8] * 4},
    "dlrm": {"name": "dlrm", "bottom_mlp": [8] * 3, "top_mlp": [8] * 4},
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
    rounds: Annotated[int, typer.Option(help="Of every side, interleaved.")] = 7,
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
    """{"launches": {phase: number}, "ms": …, "compiled_ms": …} of a step."""
    batch = batch_of(1, ROWS, [1] * FEATURES)
    sides = {name: _Loop(model, batch, compile=name == "compiled_ms") for name in ("ms", "compiled_ms")}
    launches = sides["ms"].count()
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            took[name].append(side.time())
    return {"launches": launches} | {name: statistics.median(times) for name, times in took.items()}


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

    def time(self) -> float:
        """Milliseconds of a step."""
        began = perf_counter()
        self._train(TIMED)
        return 1000 * (perf_counter() - began) / TIMED


def lines(found: dict[str, Any]) -> list[list[str]]:
    """The table."""
    phases = list(dict.fromkeys(phase for each in found.values() for phase in each["launches"]))
    head = ["launches of a step", *(phase.replace("_", " ") for phase in phases), "all", "ms", "compiled, ms"]
    return [
        head,
        *(
            [
                model,
                *(f"{each['launches'].get(phase, 0):.0f}" for phase in phases),
                f"{sum(each['launches'].values()):.0f}",
                f"{each['ms']:.2f}",
                f"{each['compiled_ms']:.2f}",
            ]
            for model, each in found.items()
        ),
    ]


if __name__ == "__main__":
    typer.run(main)
