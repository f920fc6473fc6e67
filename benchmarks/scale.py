"""Cost of each part of the control plane with 256 and 1,024 ranks and 1,000 tables, and its growth.

    python benchmarks/scale.py [--smallest]

The ranks are simulated: a client sends the messages of all ranks. The measured parts are real: the planner,
the coordinator's actor, the recorder with its run folder, the MLflow feed and store, the report, the cursor,
and the checkpoints' planner and index. Each part runs in a separate process (scale_parts.py). Seconds are CPU
seconds unless they are called "wall".

Writes benchmarks/results/scale.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
import typer
from harness import HERE, Grid

PARTS = ("plan", "cursor", "beats", "records", "mlflow", "report", "checkpoint")
SIZES = ((8, 26), (256, 1000), (1024, 1000))
SMALLEST = ((16, 12),)
LIMIT_S = 300  # wall-clock limit of one part


def measure(part: str, world: int, tables: int, folder: Path) -> dict:
    """Run one part, and return its measurements, or {"missing": reason} if the part failed."""
    command = [sys.executable, "-W", "ignore", str(HERE / "scale_parts.py"), part, str(world), str(tables)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"missing": f"timed out after {LIMIT_S} s"}
    if done.returncode:
        return {"missing": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def show(results: dict[str, dict[str, dict]]) -> None:
    """Print a table with a row for each measurement and a column for each size."""
    rows, sections = [], set()
    for part in PARTS:
        for name in dict.fromkeys(name for of_size in results.values() for name in of_size.get(part, {})):
            cells = [text_of(of_size.get(part, {}).get(name))[:24] for of_size in results.values()]
            rows.append([part, name.replace("_", " "), *cells])
        sections.add(len(rows) - 1)
    Grid(("part", "figure", *results), rows, "the control plane, ranks × tables", 2, sections).show(110)


def text_of(value: float | str | None) -> str:
    """Return a measurement as text; "–" if the measurement is missing."""
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def main(smallest: harness.Smallest = False, only: harness.Only = ",".join(PARTS)) -> None:
    """Measure the parts and print the table. The exit code is 1 if a part failed.

    With all parts and without --smallest, benchmarks/results/scale.json is written.
    """
    results: dict[str, dict[str, dict]] = {}
    # The other parts need the plan, and some need the records.
    chosen = [part for part in PARTS if part in ("plan", "records", *harness.split(only))]
    for world, tables in SMALLEST if smallest else SIZES:
        of_size = results.setdefault(f"{world:,} × {tables:,}", {})
        with tempfile.TemporaryDirectory(prefix="scale-", ignore_cleanup_errors=True) as place:
            for part in chosen:
                of_size[part] = measure(part, world, tables, Path(place))
                print(f"{world} × {tables}: {part} {of_size[part]}", file=sys.stderr, flush=True)
    show(results)
    if not smallest and len(chosen) == len(PARTS):
        harness.store("scale", results)
    missing = any("missing" in figures for of_size in results.values() for figures in of_size.values())
    raise typer.Exit(int(missing))


if __name__ == "__main__":
    typer.run(main)
