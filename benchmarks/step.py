"""Training speed of raytrec compared with hand-written loops.

    raytrec prepare synthetic --out data/step --rows 1000000 --multi-hot 8
    python benchmarks/step.py [data/step/train] [--rounds 3] [--steps 240] [--models dlrm] [--workers 1,2]

The data has the shape of Criteo: 13 dense columns, and 26 sparse features with 50 ids per row in total. The
sides are limit, by_hand and ray_recipe (benchmarks/step_sides.py), and `raytrec train` with its defaults,
except that it reads 0.06 GiB ahead. With the default of half a GiB, it would read everything before the
measured steps. For the same reason, the folder is read eight times as one epoch. Each side is a separate
command, and the sides take turns for each model and number of workers. The best round of each measurement is reported,
because other load can only slow a side down. Each run warms up for 60 steps and measures --steps steps, about
twenty seconds, so that one-time work, such as opening MLflow's database, has little weight:

rows/s          of all ranks together
CPU-µs per row  over all processes that the command starts, including Ray's
peak memory     of all these processes, before and after the measured steps, with shared pages counted once

Writes benchmarks/results/step.json, docs/images/step.png and the tables in README.md and docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from time import sleep, time
from typing import Annotated

import harness
import typer
from harness import take_turns
from processes import Command
from step_results import SIDES, cases_of, documents, draw, summarize, table_of
from step_sides import EVERY, WARM_UP, Settings

HERE = Path(__file__).parent
MODELS = {
    "dlrm": {"name": "dlrm", "bottom_mlp": [512, 256], "top_mlp": [256, 128]},
    "dcn": {"name": "dcn", "cross_layers": 3, "cross_rank": 64, "top_mlp": [256, 128]},
}
BATCH = 2048  # rows per rank
TAIL = EVERY  # number of steps after the measured steps
TIMES = 8  # number of copies of the folder that are read in an epoch
LONGEST_S = 600.0  # time limit of one run
TICK_S, MEMORY_S = 0.2, 1.0  # seconds between two samples of CPU time, and of memory


@dataclass
class Measured:
    """Measurements of one run of a side, as described in the module docstring."""

    samples_per_s: float
    cpu_us_per_row: float
    peak_mib: float


def command_of(side: str, settings: Settings, folder: Path) -> list[str]:
    """Return the command that runs a side."""
    if side != "raytrec":
        path = folder / "settings.json"
        path.write_text(json.dumps(asdict(settings)))
        return [sys.executable, "-W", "ignore", str(HERE / "step_sides.py"), side, str(path)]
    config = folder / "config.yaml"
    config.write_text(json.dumps({"data": {"train": settings.data}, "model": settings.model}))  # JSON is YAML
    values = {
        "data.global_batch_size": settings.batch * settings.workers,
        "scaling.num_workers": settings.workers,
        "train.max_steps": settings.total,
        "train.epochs": 1000,
        "data.buffer_gib": 0.06,
        "run.dir": folder / "run",
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    return [sys.executable, "-m", "raytrec", "train", str(config), *overrides]


def times_of(side: str, settings: Settings, folder: Path) -> dict[int, float]:
    """Return a mapping from step to time of its end (seconds since 1970), for the steps that a side has recorded."""
    path = folder / "run" / "metrics.jsonl" if side == "raytrec" else Path(settings.steps)
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["unix_s"] for line in lines if line.get("kind", "train") == "train"}


def run(side: str, settings: Settings, folder: Path, steps: int) -> Measured:
    """Run a side once, and return its measurements.

    Raises:
        RuntimeError: The side exited with a code other than 0, or did not record the last measured step in LONGEST_S.
    """
    command = Command(command_of(side, settings, folder), folder)
    begin, end = WARM_UP, WARM_UP + steps
    times: dict[int, float] = {}
    try:
        while command.running and time() < command.began + LONGEST_S:
            times = times_of(side, settings, folder)
            measuring = begin in times and end not in times
            command.look(None if measuring else MEMORY_S)
            sleep(TICK_S)
    finally:
        code = command.end()
    if code or end not in (times := times_of(side, settings, folder)):
        last = max(times, default=0)
        raise RuntimeError(f"{side} exited with code {code} after step {last} of {end}\n{command.output}")
    seconds, rows = times[end] - times[begin], steps * settings.batch * settings.workers
    cpu_s = command.cpu_s(times[end]) - command.cpu_s(times[begin])
    return Measured(samples_per_s=rows / seconds, cpu_us_per_row=cpu_s / rows * 1e6, peak_mib=command.peak_mib)


def main(
    data: Annotated[str, typer.Argument(help="Folder with Parquet files.")] = "data/step/train",
    rows: Annotated[int, typer.Option(help="Number of rows in a rank's batch.")] = BATCH,
    steps: Annotated[int, typer.Option(help="Number of measured steps; a multiple of 20.")] = 240,
    rounds: harness.Rounds = 3,
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(MODELS),
    workers: harness.Workers = "1,2",
    sides: Annotated[str, typer.Option(help="Sides, separated by commas.")] = ",".join(SIDES),
    smallest: harness.Smallest = False,
) -> None:
    """Run the sides and print the tables.

    With all models, workers and sides and without --smallest, results, plot and documents are written.
    """
    if steps % EVERY:
        raise typer.BadParameter(f"--steps must be a multiple of {EVERY}")
    whole = not smallest and (models, workers, sides) == (",".join(MODELS), "1,2", ",".join(SIDES))
    if smallest:
        models, workers, rows, steps, rounds = "dlrm", "1", 256, EVERY, 1
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit in order, which ends the commands
    runs: dict[str, dict[str, list[Measured]]] = {}
    cases = cases_of(harness.split(models), harness.integers(workers))
    with tempfile.TemporaryDirectory(prefix="step-", ignore_cleanup_errors=True) as place:
        data = str(repeat(Path(data), Path(place)).absolute())

        def turn(case: str, side: str) -> Measured:
            model, ranks = cases[case]
            folder = Path(tempfile.mkdtemp(prefix=f"{case}-{side}-", dir=place))
            total = WARM_UP + steps + TAIL
            settings = Settings(data, MODELS[model], ranks, rows, total, str(folder / "steps.jsonl"))
            measured = run(side, settings, folder, steps)
            print(f"{case:6} {side:10} {asdict(measured)}", flush=True)
            return measured

        for case in cases:
            turns = {side: lambda side=side, case=case: turn(case, side) for side in harness.split(sides)}
            runs[case] = take_turns(turns, rounds)
    title = f"{rows:,} rows per rank, {steps} steps, best of {rounds} round{'s' * (rounds > 1)}"
    results = summarize(title, runs)
    for case in cases:
        table_of(results, case).show()
    if whole:
        harness.store("step", results)
        draw(results, harness.IMAGES / "step.png")
        for page, text in documents(results).items():
            harness.fill(page, "step", text)


def repeat(data: Path, place: Path) -> Path:
    """Return a new folder that contains TIMES copies of every file of a data set.

    The files are copied, because raytrec reads only the first of several links to one file.
    """
    folder = place / "data" / "train"
    folder.mkdir(parents=True)
    (place / "data" / "schema.yaml").write_text((data.parent / "schema.yaml").read_text())
    for number in range(TIMES):
        for file in data.glob("*.parquet"):
            shutil.copyfile(file, folder / f"{number}-{file.name}")
    return folder


if __name__ == "__main__":
    typer.run(main)
