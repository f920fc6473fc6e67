"""How the cost of a step grows with table rows, features, bag length, batch, workers and statistics, and that
of a checkpoint with its size.

    python benchmarks/growth.py [--only features,batch] [--steps 10] [--smallest]

Each point is raytrec's own Step with the observers, the agreement and the metrics of a run, on ranks without
Ray and with random batches in memory (benchmarks/growth_point.py). What is measured is CPU time of all ranks,
the least of several blocks of steps: it hardly depends on what else the machine does. The points of a curve
differ in one size; the others are those of BASE. Beside each curve stands the law that the work follows:
constant, as at the first point; or a constant and a part in proportion, with the least relative errors. A
point that is off by more than a quarter is marked as a kink; docs/benchmarks.md says where each comes from.

Prints a table and writes benchmarks/results/growth.json and docs/images/growth.png.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from documents import fill, keep
from growth_point import Point, measure
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results" / "growth.json", HERE.parent / "docs" / "images" / "growth.png"
BASE = Point(features=26, rows=10_000, dim=8, bag=4, batch=1024, workers=1)
KINK = 1.25  # times the law, or a part of it


@dataclass(frozen=True)
class Curve:
    """A family of points.

    Attributes:
        label: of x; unit: of y.
        linear: whether a part of the cost grows in proportion to x; else none does.
        points: x → what is measured.
    """

    label: str
    unit: str
    linear: bool
    points: dict[float, Point]


def _vary(values: list[int], change: Callable[[int], Point]) -> dict[float, Point]:
    return {float(value): change(value) for value in values}


CURVES = {
    "rows": Curve(
        "rows of the table",
        "ms a step",
        False,
        _vary(
            [10**4, 10**5, 10**6, 10**7, 10**8],
            lambda rows: replace(BASE, features=1, rows=rows, dim=4, bag=50),
        ),
    ),
    "features": Curve(
        "features, each with its table",
        "ms a step",
        True,
        _vary([8, 32, 128, 512], lambda features: replace(BASE, features=features, rows=1000, bag=1)),
    ),
    "bag": Curve(
        "ids of a bag",
        "ms a step",
        True,
        _vary([1, 10, 50, 200, 500], lambda bag: replace(BASE, features=8, bag=bag)),
    ),
    "batch": Curve(
        "rows of a batch",
        "ms a step",
        True,
        _vary([128, 512, 2048, 8192], lambda batch: replace(BASE, batch=batch)),
    ),
    "workers": Curve(
        "workers, one global batch",
        "ms a step, all ranks",
        True,
        _vary([1, 2, 4], lambda workers: replace(BASE, workers=workers, batch=4096 // workers)),
    ),
    "statistics": Curve(
        "tables whose statistics are recorded",
        "ms a record",
        True,
        _vary([8, 32, 128, 512], lambda f: replace(BASE, features=f, rows=1000, bag=1, what="record")),
    ),
    "checkpoint": Curve(
        "bytes of tables and their state",
        "ms a save",
        True,
        {
            float(rows * 8 * 36): replace(BASE, features=8, rows=rows, what="save")
            for rows in (10_000, 100_000, 1_000_000)
        },
    ),
}


def run(points: list[Point], steps: int) -> dict[Point, dict[str, Any]]:
    """What the ranks of each point have measured, summed over them; the ranks of some points are the same."""
    import torch.multiprocessing as mp

    found = {}
    for workers in sorted({point.workers for point in points}):
        chosen = [point for point in dict.fromkeys(points) if point.workers == workers]
        with tempfile.TemporaryDirectory(prefix="growth-") as folder:
            mp.spawn(measure, (workers, chosen, steps, folder), nprocs=workers)
            ranks = [
                json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8"))
                for rank in range(workers)
            ]
        for point, *of in zip(chosen, *ranks, strict=True):
            found[point] = {key: sum(each[key] for each in of) for key in of[0]}
    return found


def law_of(xs: list[float], ys: list[float], linear: bool) -> list[float]:
    """What the law says at each x: constant, as at the first; else a + b·x with the least relative errors."""
    if not linear:
        return [ys[0]] * len(xs)
    weighted = np.array([[1 / y, x / y] for x, y in zip(xs, ys, strict=True)])
    a, b = np.linalg.lstsq(weighted / (scale := [1, max(xs)]), np.ones(len(xs)), rcond=None)[0] / scale
    return [float(a + b * x) for x in xs]


def describe(curve: Curve, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """A curve in growth.json: x, y, what the law says, and the kinks."""
    xs = list(curve.points)[: len(measured)]
    ys = [of["cpu_ms"] for of in measured]
    law = law_of(xs, ys, curve.linear)
    kinks = [x for x, y, said in zip(xs, ys, law, strict=True) if not 1 / KINK <= y / said <= KINK]
    out = {
        "x": xs,
        "cpu_ms": [round(y, 3) for y in ys],
        "law": "a + b·x" if curve.linear else "constant",
        "law_ms": [round(said, 3) for said in law],
        "kinks": kinks,
        "label": curve.label,
        "unit": curve.unit,
    }
    if any("bytes" in of for of in measured):
        out["bytes"] = [of["bytes"] for of in measured]
    return out


def show(name: str, curve: dict[str, Any]) -> Table:
    """For a terminal."""
    table = Table(title=f"{name}: {curve['law']}")
    for column in (curve["label"], f"CPU {curve['unit']}", "law", "of the law"):
        table.add_column(column, justify="right", no_wrap=True)
    for x, y, said in zip(curve["x"], curve["cpu_ms"], curve["law_ms"], strict=True):
        mark = "  kink" if x in curve["kinks"] else ""
        table.add_row(f"{x:,.0f}", f"{y:.2f}", f"{said:.2f}", f"{y / said:.2f}{mark}")
    return table


def document(curves: dict[str, Any]) -> str:
    """What docs/benchmarks.md has of the results."""
    lines = ["| size | from | to | CPU | at the first | at the last | law | of the law there | kinks at |"]
    lines.append("|---|---:|---:|---|---:|---:|---|---:|---|")
    for curve in curves.values():
        first, last = curve["cpu_ms"][0], curve["cpu_ms"][-1]
        cells = [curve["label"], f"{curve['x'][0]:,.0f}", f"{curve['x'][-1]:,.0f}", curve["unit"]]
        cells += [f"{first:,.1f}", f"{last:,.1f}", curve["law"], f"{last / curve['law_ms'][-1]:.2f}"]
        lines.append("| " + " | ".join([*cells, ", ".join(f"{x:,.0f}" for x in curve["kinks"])]) + " |")
    saved = curves["checkpoint"]
    each = ", ".join(f"{size / x:.3f}" for x, size in zip(saved["x"], saved["bytes"], strict=True))
    lines += [
        "",
        f"Bytes of a checkpoint's files, of a byte of tables and state, from small to large: {each}.",
    ]
    picture = "![measured points, the law of each curve, and kinks](images/growth.png)"
    return "\n".join([*lines, "", picture])


def _short(x: float) -> str:
    """10 M for 10,000,000."""
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if x >= size:
            return f"{x / size:g}{unit}"
    return f"{x:g}"


def draw(curves: dict[str, Any], path: Path) -> None:
    """A panel for each curve: points, the law, kinks ringed."""
    from matplotlib.ticker import NullFormatter

    from raytrec.report.figures.style import BLUE, MUTED, PLAIN, VERMILION, new_figure, save_png, styled

    @styled
    def made() -> Any:
        figure, panels = new_figure("What a step, a record and a save cost as sizes grow", 12.6, rows=7)
        for axes, curve in zip(panels, curves.values(), strict=False):
            axes.loglog(curve["x"], curve["law_ms"], color=MUTED, linestyle=(0, (3, 2)), label=curve["law"])
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
    only: Annotated[str, typer.Option(help="These curves, with commas between.")] = ",".join(CURVES),
    steps: Annotated[int, typer.Option(help="Steps of a block; the cheapest of five counts.")] = 10,
    largest: Annotated[float, typer.Option(help="Leave out larger x than that.")] = 1e9,
    smallest: Annotated[bool, typer.Option(help="Two points of some curves; writes nothing.")] = False,
) -> None:
    """Prints the tables; with all curves, writes growth.json and growth.png."""
    os.environ |= {"OMP_NUM_THREADS": "1"}
    chosen = {name: CURVES[name] for name in only.split(",")}
    if smallest:
        chosen, steps = {name: chosen[name] for name in ("features", "checkpoint") if name in chosen}, 2
    points = {
        name: [point for x, point in curve.points.items() if x <= largest][: 2 if smallest else None]
        for name, curve in chosen.items()
    }
    measured = run([point for of in points.values() for point in of], steps)
    found = {name: describe(chosen[name], [measured[point] for point in of]) for name, of in points.items()}
    for name, curve in found.items():
        Console(width=110).print(show(name, curve))
    if set(chosen) == set(CURVES) and largest >= 1e9 and not smallest:
        keep(RESULTS, found)
        draw(found, PICTURE)
        fill("docs/benchmarks.md", "growth", document(found))


if __name__ == "__main__":
    typer.run(main)
