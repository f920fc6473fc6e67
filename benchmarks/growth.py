"""Growth of the costs of a step, a record of statistics and a checkpoint with sizes such as the number of rows.

    python benchmarks/growth.py [--only features,batch] [--steps 10] [--smallest]

Each point measures raytrec's own step with the observers, the agreement between ranks and the metrics of a run,
on ranks without Ray and with random batches in memory. The measurement is the CPU time of all ranks in the cheapest
of several blocks of steps, which hardly depends on other load. The points of a curve differ in one size; other
sizes are as in BASE. The expected cost of each curve is constant, or linear: a + b·x. A point that deviates from
the expected cost by more than a quarter is a kink.

Writes benchmarks/results/growth.json, docs/images/growth.png and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Annotated, Any

import harness
import numpy as np
import typer
from harness import Grid
from rank_group import on_ranks

KINK = 1.25  # ratio to the expected cost, or its inverse, beyond which a point is a kink
BLOCKS, BATCHES = 5, 4  # number of blocks, of which the cheapest counts; number of different batches
NEVER = 10**9


@dataclass(frozen=True)
class Point:
    """Sizes of one measurement.

    Attributes:
        features: Number of features, one table each.
        rows: Rows of each table.
        dim: Width of each table.
        bag: Number of ids per feature and row.
        batch: Number of rows per rank and step.
        workers: Number of ranks.
        what: Measured cost: "step"; "record", the additional cost of a step that is probed and recorded; or
            "save", a checkpoint.
    """

    features: int = 26
    rows: int = 10_000
    dim: int = 8
    bag: int = 4
    batch: int = 1024
    workers: int = 1
    what: str = "step"


BASE = Point()


@dataclass(frozen=True)
class Curve:
    """Curve of points that differ in one size.

    Attributes:
        label: Name of the size.
        unit: Unit of the cost.
        linear: True if part of the cost should be proportional to the size; False if it should be constant.
        points: Size → point.
    """

    label: str
    unit: str
    linear: bool
    points: dict[float, Point]


def _vary(field: str, values: list[int], **others: Any) -> dict[float, Point]:
    return {float(value): replace(BASE, **{field: value}, **others) for value in values}


TABLES = [8, 32, 128, 512]
CURVES = {
    "rows": Curve(
        "rows of the table",
        "ms per step",
        False,
        _vary("rows", [10**4, 10**5, 10**6, 10**7, 10**8], features=1, dim=4, bag=50),
    ),
    "features": Curve("features, one table each", "ms per step", True, _vary("features", TABLES, rows=1000, bag=1)),
    "bag": Curve("ids per bag", "ms per step", True, _vary("bag", [1, 10, 50, 200, 500], features=8)),
    "batch": Curve("rows per batch", "ms per step", True, _vary("batch", [128, 512, 2048, 8192])),
    "workers": Curve(
        "workers, same global batch",
        "ms per step, all ranks",
        True,
        {float(n): replace(BASE, workers=n, batch=4096 // n) for n in (1, 2, 4)},
    ),
    "statistics": Curve(
        "tables whose statistics are recorded",
        "ms per record",
        True,
        _vary("features", TABLES, rows=1000, bag=1, what="record"),
    ),
    "checkpoint": Curve(
        "bytes of tables and their state",
        "ms per save",
        True,
        {float(n * 8 * 36): replace(BASE, features=8, rows=n, what="save") for n in (10**4, 10**5, 10**6)},
    ),
}


class Unheard:
    """Object that replaces the heartbeat and the coordinator, and ignores all calls."""

    command = 0
    put = property(lambda self: self)

    def __getattr__(self, name: str) -> Callable:
        return lambda *_: None


def schema_of(point: Point) -> Any:
    """Return a schema with one table per feature."""
    from raytrec.config.schema import Schema

    names = [f"f{number}" for number in range(point.features)]
    values = {
        "labels": ["y"],
        "dense": ["d"],
        "sparse": {name: {"table": name} for name in names},
        "tables": {name: {"rows": point.rows, "dim": point.dim} for name in names},
    }
    return Schema.parse(values, "growth")


def batches_of(point: Point, schema: Any) -> Iterator[Any]:
    """Yield BATCHES random batches in an endless cycle, with step numbers as from the stream."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from raytrec.data.batch import Batch

    batches, batch = [], point.batch
    for _ in range(BATCHES):
        ids = torch.randint(0, point.rows, (point.features * batch * point.bag,))
        sparse = KeyedJaggedTensor(
            list(schema.sparse),
            ids,
            lengths=torch.full((point.features * batch,), point.bag, dtype=torch.int32),
            stride=batch,
            length_per_key=[batch * point.bag] * point.features,
        )
        labels = torch.randint(0, 2, (batch, 1)).float()
        rows = batch * point.workers
        batches.append(Batch(torch.randn(batch, 1), sparse, labels, torch.ones(batch), rows))
    step = 0
    while True:
        yield replace(batches[step % BATCHES], step=step)
        step += 1


class Loop:
    """Training loop with the parts of raytrec/worker/loop.py that run between two reports."""

    def __init__(self, point: Point, rank: int, folder: str, every_steps: int):
        import torch

        from raytrec.checkpoint.state import LogicalState
        from raytrec.config.run_config import RunConfig
        from raytrec.metrics.selection import Selection
        from raytrec.metrics.sums import MetricSums
        from raytrec.worker.build import build_step
        from raytrec.worker.checkpointing import CheckpointManager
        from raytrec.worker.context import WorkerContext, WorkerTask
        from raytrec.worker.nonfinite import RecentBatches
        from raytrec.worker.observers import make_observers
        from raytrec.worker.progress import Progress, RankRun

        schema, device, self.rows = schema_of(point), torch.device("cpu"), point.batch * point.workers
        config = RunConfig.model_validate(
            {
                "run": {"dir": folder},
                "data": {"train": "unused/train", "global_batch_size": self.rows},
                "scaling": {"num_workers": point.workers},
                # Its cost is proportional to the number of features, unlike that of DLRM's dot products.
                "model": {"name": "dcn", "cross_layers": 1, "cross_rank": 1, "top_mlp": [8]},
                "checkpoint": {"every_s": None},
                "tracking": {"every_steps": every_steps},
                "checks": {"every_steps": None, "at_checkpoints": False},
            }
        )
        task = WorkerTask(config, schema, {}, Unheard(), f"{folder}/checkpoints")
        context = WorkerContext(rank, point.workers, device, task, Unheard(), 0)
        self.step, plan = build_step(config, schema, device)
        self.progress = Progress(MetricSums(Selection.from_config(config, schema), device))
        self.batches = RecentBatches(batches_of(point, schema), 0)
        state = LogicalState(self.step.model, self.step.optimizer)
        run = RankRun(context, self.step, plan, state, self.progress, self.batches, NEVER)
        self.observers = make_observers(run)
        self.checkpoints = CheckpointManager(run, self.observers)
        for observer in self.observers:
            observer.begin()

    def train(self, steps: int) -> float:
        """Train, and return this rank's CPU milliseconds per step."""
        began = process_time()
        for outputs in self.step.train(self.batches, steps):
            self.progress.count(self.rows, outputs)
            for observer in self.observers:
                observer.after_step(self.rows)
            self.checkpoints.after_step(outputs)
        return (process_time() - began) / steps * 1e3

    def save(self) -> float:
        """Save a checkpoint, and return this rank's CPU milliseconds."""
        self.train(1)  # the previous step may already have a checkpoint
        began = process_time()
        self.checkpoints.save(wait=True)
        return (process_time() - began) * 1e3


def measure(rank: int, device: Any, points: list[Point], steps: int, folder: str) -> list[dict[str, float]]:
    """Return the measurements of each point on this rank, as in `measure_point`."""
    figures = []
    for number, point in enumerate(points):
        figures.append(measure_point(point, rank, steps, f"{folder}/{number}"))
        gc.collect()  # models are reference cycles
        if rank == 0:
            print(point, figures[-1], flush=True)
    return figures


def measure_point(point: Point, rank: int, steps: int, folder: str) -> dict[str, float]:
    """Return {cpu_ms} of a point on this rank; for "save", also the checkpoint's bytes, 0 except on rank 0."""
    loops = [Loop(point, rank, folder, every) for every in ((1, NEVER) if point.what == "record" else (NEVER,))]
    for loop in loops:
        loop.train(2)
    if point.what == "save":
        least = min(loops[0].save() for _ in range(BLOCKS))
        newest = max(Path(folder, "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        return {"cpu_ms": least, "bytes": size if rank == 0 else 0}
    first, *others = (min(loop.train(steps) for _ in range(BLOCKS)) for loop in loops)
    return {"cpu_ms": first - sum(others)}


def run(points: list[Point], steps: int) -> dict[Point, dict[str, Any]]:
    """Return each point's measurements, summed over its ranks; points with the same number of ranks share ranks."""
    figures = {}
    for workers in sorted({point.workers for point in points}):
        chosen = [point for point in dict.fromkeys(points) if point.workers == workers]
        with tempfile.TemporaryDirectory(prefix="growth-") as folder:
            ranks = on_ranks(workers, measure, chosen, steps, folder)
        for point, *of in zip(chosen, *ranks, strict=True):
            figures[point] = {key: sum(each[key] for each in of) for key in of[0]}
    return figures


def expected_costs(xs: list[float], ys: list[float], linear: bool) -> list[float]:
    """Return the expected cost at each x: the first y, or the a + b·x with the smallest squared relative errors."""
    if not linear:
        return [ys[0]] * len(xs)
    weighted = np.array([[1 / y, x / y] for x, y in zip(xs, ys, strict=True)])
    a, b = np.linalg.lstsq(weighted / (scale := [1, max(xs)]), np.ones(len(xs)), rcond=None)[0] / scale
    return [float(a + b * x) for x in xs]


def describe(curve: Curve, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a curve for growth.json: sizes, measured costs, expected costs and kinks."""
    xs = list(curve.points)[: len(measured)]
    ys = [of["cpu_ms"] for of in measured]
    costs = expected_costs(xs, ys, curve.linear)
    kinks = [x for x, y, expected in zip(xs, ys, costs, strict=True) if not 1 / KINK <= y / expected <= KINK]
    out = {
        "x": xs,
        "cpu_ms": [round(y, 3) for y in ys],
        "expected": "a + b·x" if curve.linear else "constant",
        "expected_ms": [round(expected, 3) for expected in costs],
        "kinks": kinks,
        "label": curve.label,
        "unit": curve.unit,
    }
    if any("bytes" in of for of in measured):
        out["bytes"] = [of["bytes"] for of in measured]
    return out


def table_of(name: str, curve: dict[str, Any]) -> Grid:
    """Return the table of a curve for the terminal."""
    rows = []
    for x, y, expected in zip(curve["x"], curve["cpu_ms"], curve["expected_ms"], strict=True):
        mark = "  kink" if x in curve["kinks"] else ""
        rows.append([f"{x:,.0f}", f"{y:.2f}", f"{expected:.2f}", f"{y / expected:.2f}{mark}"])
    header = (curve["label"], f"CPU {curve['unit']}", "expected", "÷ expected")
    return Grid(header, rows, f"{name}: {curve['expected']}", left=0)


def document(curves: dict[str, Any]) -> str:
    """Return the text for docs/benchmarks.md: the table and the plot."""
    header = ("size", "from", "to", "expected cost", "last ÷ expected", "kinks at")
    rows = []
    for curve in curves.values():
        cells = [curve["label"], f"{curve['x'][0]:,.0f}", f"{curve['x'][-1]:,.0f}", curve["expected"]]
        cells.append(f"{curve['cpu_ms'][-1] / curve['expected_ms'][-1]:.2f}")
        rows.append([*cells, ", ".join(f"{x:,.0f}" for x in curve["kinks"])])
    picture = "![measured costs, the expected cost of each curve, and kinks](images/growth.png)"
    return "\n\n".join([Grid(header, rows).markdown(), picture])


def _short(x: float) -> str:
    """Format a number in a short form, such as "10 M"."""
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if x >= size:
            return f"{x / size:g}{unit}"
    return f"{x:g}"


def draw(curves: dict[str, Any], path: Path) -> None:
    """Plot each curve in a panel: measured costs, expected costs, and rings around kinks."""
    from matplotlib.ticker import NullFormatter

    from raytrec.report.figures.style import BLUE, MUTED, PLAIN, VERMILION, new_figure, save_png, styled

    @styled
    def made() -> Any:
        figure, panels = new_figure("Cost of a step, a record and a save by size", 12.6, rows=7)
        for axes, curve in zip(panels, curves.values(), strict=False):
            axes.loglog(curve["x"], curve["expected_ms"], color=MUTED, linestyle=(0, (3, 2)), label=curve["expected"])
            axes.loglog(curve["x"], curve["cpu_ms"], "o-", color=BLUE, markersize=3)
            at = [(x, y) for x, y in zip(curve["x"], curve["cpu_ms"], strict=True) if x in curve["kinks"]]
            if at:
                axes.plot(*zip(*at, strict=True), "o", color=VERMILION, fillstyle="none", markersize=8)
            axes.set_xlabel(curve["label"])
            axes.set_ylabel(f"CPU {curve['unit']}")
            axes.set_xticks(curve["x"], [_short(x) for x in curve["x"]], minor=False)
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_formatter(PLAIN)
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.legend()
        for axes in panels[len(curves) :]:
            axes.set_axis_off()
        return figure

    save_png(made(), path)


def main(
    only: harness.Only = ",".join(CURVES),
    steps: Annotated[int, typer.Option(help="Steps per block; the cheapest of five blocks is reported.")] = 10,
    largest: Annotated[float, typer.Option(help="Largest measured size.")] = 1e9,
    smallest: harness.Smallest = False,
) -> None:
    """Print the tables; with all curves, write growth.json and growth.png."""
    os.environ |= {"OMP_NUM_THREADS": "1"}
    chosen = {name: CURVES[name] for name in harness.split(only)}
    if smallest:
        chosen, steps = {name: chosen[name] for name in ("features", "checkpoint") if name in chosen}, 2
    points = {
        name: [point for x, point in curve.points.items() if x <= largest][: 2 if smallest else None]
        for name, curve in chosen.items()
    }
    measured = run([point for of in points.values() for point in of], steps)
    curves = {name: describe(chosen[name], [measured[point] for point in of]) for name, of in points.items()}
    for name, curve in curves.items():
        table_of(name, curve).show()
    if set(chosen) == set(CURVES) and largest >= 1e9 and not smallest:
        harness.publish("growth", curves, document(curves))
        draw(curves, harness.IMAGES / "growth.png")


if __name__ == "__main__":
    typer.run(main)
