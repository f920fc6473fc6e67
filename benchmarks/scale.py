"""The control plane with 256 and 1,024 ranks and 1,000 tables: what each part costs, and how it grows.

    python benchmarks/scale.py [--smallest]

The ranks are simulated: a client sends what so many ranks would send. What is measured is real: the planner,
the coordinator's actor, the recorder with its run folder, the feed and store of MLflow, the report, the
cursor, and the planner and index of checkpoints. Each part runs in its own process (scale_parts.py). Writes
benchmarks/results/scale.json; seconds are of CPU unless they are called "wall".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from documents import keep
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULT = HERE / "results" / "scale.json"
PARTS = ("plan", "cursor", "beats", "records", "mlflow", "report", "checkpoint")
SIZES = ((8, 26), (256, 1000), (1024, 1000))
SMALLEST = ((16, 12),)
LIMIT_S = 300  # of wall-clock time for one part


def measure(part: str, world: int, tables: int, folder: Path) -> dict:
    """The figures of one part; {"missing": why} where it has none."""
    command = [sys.executable, "-W", "ignore", str(HERE / "scale_parts.py"), part, str(world), str(tables)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, str(folder)], env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"missing": f"not done within {LIMIT_S} s"}
    if done.returncode:
        return {"missing": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def show(found: dict[str, dict[str, dict]]) -> None:
    """A row for each figure, a column for each size."""
    table = Table(title="the control plane, ranks × tables")
    sizes = list(found)
    table.add_column("part", no_wrap=True, min_width=10)
    table.add_column("figure", no_wrap=True, min_width=36)
    for size in sizes:
        table.add_column(size, justify="right", no_wrap=True)
    for part in PARTS:
        names = dict.fromkeys(name for size in sizes for name in found[size].get(part, {}))
        for name in names:
            cells = [_text(found[size].get(part, {}).get(name))[:24] for size in sizes]
            table.add_row(part, name.replace("_", " "), *cells)
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def _text(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def main(
    smallest: Annotated[bool, typer.Option(help="Few ranks and tables; nothing is written.")] = False,
    only: Annotated[str, typer.Option(help="These parts alone, with commas between.")] = "",
) -> None:
    """Prints a table."""
    found: dict[str, dict[str, dict]] = {}
    for world, tables in SMALLEST if smallest else SIZES:
        of_size = found.setdefault(f"{world:,} × {tables:,}", {})
        with tempfile.TemporaryDirectory(prefix="scale-", ignore_cleanup_errors=True) as place:
            for part in PARTS:
                if only and part not in ("plan", "records", *only.split(",")):
                    continue  # the others need the plan, and some the records
                of_size[part] = measure(part, world, tables, Path(place))
                print(f"{world} × {tables}: {part} {of_size[part]}", file=sys.stderr, flush=True)
    show(found)
    if not smallest and not only:
        keep(RESULT, found)
    missing = any("missing" in figures for of_size in found.values() for figures in of_size.values())
    raise typer.Exit(int(missing))


if __name__ == "__main__":
    typer.run(main)
