"""How fast raytrec trains, against the loop that you would write by hand.

    raytrec prepare synthetic --out data/step --rows 1000000 --multi-hot 8
    python benchmarks/step.py [data/step/train] [--rounds 3] [--steps 240] [--models dlrm] [--workers 1,2]
    python benchmarks/step.py --profile raytrec --models dlrm --workers 2

The data is Criteo-shaped: 13 dense columns, 26 sparse features with 50 ids a row in all. Sides: limit,
by_hand and ray_recipe (benchmarks/step_sides.py), and `raytrec train` with its defaults but for one: it reads
0.06 GiB ahead. (With half a GiB it would have read everything before it is measured.) For the same reason the
folder is read eight times over as one epoch. Each side is a command of its own, and they take turns: a round
runs every side of a model and a number of workers before it begins the next. Of each figure the best round
counts: whatever else a machine does only slows a side. Of each run the first 60 steps warm up, and the next
--steps are measured: some twenty seconds, so that what is done once, such as opening MLflow's database, does
not count as if it were done all the time:

rows/s          of all ranks together
CPU-µs a row    over all processes that the command has started, Ray's included
peak memory     of all these processes, before and after the measured steps; what they share counts once
first step      seconds from the command's start to the end of step 1 (of raytrec, which does not note that
                step: to the end of step 20, less 19 steps at the measured pace)

Prints a table for each model and number of workers, and writes benchmarks/results/step.json,
docs/images/step.png and the tables in README.md and docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from time import sleep, time
from typing import Annotated

import typer
from documents import keep
from processes import Command
from rich.console import Console
from step_results import SIDES, cases_of, draw, summarize, table_of, write_tables
from step_sides import EVERY, WARM_UP, Settings

HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results" / "step.json", HERE.parent / "docs" / "images" / "step.png"
MODELS = {
    "dlrm": {"name": "dlrm", "bottom_mlp": [512, 256], "top_mlp": [256, 128]},
    "dcn": {"name": "dcn", "cross_layers": 3, "cross_rank": 64, "top_mlp": [256, 128]},
}
BATCH = 2048  # rows of a rank
TAIL = EVERY  # steps after those that are measured
TIMES = 8  # that the folder is read in an epoch
LONGEST_S = 600.0  # of one run
TICK_S, MEMORY_S = 0.2, 1.0  # between two samples


@dataclass
class Measured:
    """One run of one side."""

    samples_per_s: float
    cpu_us_per_row: float
    peak_mib: float
    first_step_s: float
    after_last_step_s: float
    cpu_us_by_role: dict[str, float]


def command_of(side: str, settings: Settings, folder: Path) -> list[str]:
    """The command that runs a side."""
    if side != "raytrec":
        path = folder / "settings.json"
        path.write_text(json.dumps(asdict(settings)))
        return [sys.executable, "-W", "ignore", str(HERE / "step_sides.py"), side, str(path)]
    config = folder / "config.yaml"
    config.write_text(json.dumps({"data": {"train": settings.data}, "model": settings.model}))  # is YAML, too
    values = {
        "data.global_batch_size": settings.batch * settings.workers,
        "scaling.num_workers": settings.workers,
        "train.max_steps": settings.total,
        "train.epochs": 1000,
        "data.buffer_gib": 0.06,
        "run.dir": folder / "run",
    }
    program = [str(HERE / "step_profile.py")] if "STEP_PROFILE" in os.environ else ["-m", "raytrec"]
    overrides = [f"{key}={value}" for key, value in values.items()]
    return [sys.executable, *program, "train", str(config), *overrides]


def times_of(side: str, settings: Settings, folder: Path) -> dict[int, float]:
    """Step → when it had been trained, of the steps that the side notes."""
    path = folder / "run" / "metrics.jsonl" if side == "raytrec" else Path(settings.steps)
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["unix_s"] for line in lines if line.get("kind", "train") == "train"}


def run(side: str, settings: Settings, folder: Path, steps: int) -> Measured:
    """Runs a side once.

    Raises:
        RuntimeError: it has failed, or takes too long.
    """
    folder.mkdir(parents=True)
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
    ended = command.samples[-1][0]
    if code or end not in (times := times_of(side, settings, folder)):
        raise RuntimeError(f"{side}: no step {end}\n{command.said}")
    seconds, rows = times[end] - times[begin], steps * settings.batch * settings.workers
    before, after = command.cpu_s(times[begin]), command.cpu_s(times[end])
    by_role = {name: (after[name] - before.get(name, 0.0)) / rows * 1e6 for name in after}
    first = times.get(1, times[EVERY] - seconds / steps * (EVERY - 1))
    return Measured(
        samples_per_s=rows / seconds,
        cpu_us_per_row=sum(by_role.values()),
        peak_mib=command.peak_mib,
        first_step_s=first - command.began,
        after_last_step_s=ended - times[max(times)],
        cpu_us_by_role={name: round(value, 3) for name, value in sorted(by_role.items()) if value > 0.005},
    )


def main(
    data: Annotated[str, typer.Argument(help="Folder of Parquet.")] = "data/step/train",
    rows: Annotated[int, typer.Option(help="Rows of a rank's batch.")] = BATCH,
    steps: Annotated[int, typer.Option(help="Steps that are measured; a multiple of 20.")] = 240,
    rounds: Annotated[int, typer.Option(help="Runs of each side.")] = 3,
    models: Annotated[str, typer.Option(help="With commas between.")] = "dlrm,dcn",
    workers: Annotated[str, typer.Option(help="With commas between.")] = "1,2",
    sides: Annotated[str, typer.Option(help="With commas between.")] = ",".join(SIDES),
    profile: Annotated[
        str | None, typer.Option(help="One run of this side, its ranks under cProfile.")
    ] = None,
    smallest: Annotated[bool, typer.Option(help="Few steps of DLRM, one worker; writes nothing.")] = False,
) -> None:
    """Prints the tables; with all models, workers and sides, writes results, picture and documents."""
    if steps % EVERY:
        raise typer.BadParameter(f"--steps is a multiple of {EVERY}")
    whole = (models, workers, sides) == ("dlrm,dcn", "1,2", ",".join(SIDES)) and not (smallest or profile)
    if smallest:
        rows, steps, rounds, models, workers = min(rows, 256), EVERY, 1, "dlrm", "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what has been started ends, too
    cases = cases_of(models.split(","), [int(number) for number in workers.split(",")])
    chosen = sides.split(",")
    if profile:
        from step_profile import profile_side

        return profile_side(profile, cases, lambda *of: settings_of(*of, data, rows, steps), run, steps)
    found: dict[str, dict[str, list[Measured]]] = {case: {side: [] for side in chosen} for case in cases}
    with tempfile.TemporaryDirectory(prefix="step-", ignore_cleanup_errors=True) as place:
        data = str(repeat(Path(data), Path(place)))
        for turn in range(rounds):
            for case, (model, ranks) in cases.items():
                for side in chosen:
                    folder = Path(place) / f"{case}-{side}-{turn}"
                    settings = settings_of(model, ranks, folder, data, rows, steps)
                    found[case][side].append(measured := run(side, settings, folder, steps))
                    tell(case, side, measured)
    title = f"{rows:,} rows a rank, {steps} steps, best of {rounds} round{'s' * (rounds > 1)}"
    results = summarize(title, found)
    for case in cases:
        Console(width=120).print(table_of(results, case))
    if whole:
        keep(RESULTS, results)
        draw(results, PICTURE)
        write_tables(results)


def repeat(data: Path, place: Path) -> Path:
    """A folder in which every file of a dataset is several times."""
    folder = place / "data" / "train"
    folder.mkdir(parents=True)
    (place / "data" / "schema.yaml").write_text((data.parent / "schema.yaml").read_text())
    for number in range(TIMES):
        for file in data.glob("*.parquet"):
            (folder / f"{number}-{file.name}").symlink_to(file.absolute())
    return folder


def settings_of(model: str, workers: int, folder: Path, data: str, rows: int, steps: int) -> Settings:
    """Of a run in this folder."""
    total = WARM_UP + steps + TAIL
    return Settings(
        str(Path(data).absolute()), MODELS[model], workers, rows, total, str(folder / "steps.jsonl")
    )


def tell(case: str, side: str, measured: Measured) -> None:
    """A line for each run, as it ends."""
    print(
        f"{case:6} {side:10} {measured.samples_per_s:9,.0f} rows/s {measured.cpu_us_per_row:6.1f} CPU-µs a "
        f"row, {measured.peak_mib:6,.0f} MiB, first step {measured.first_step_s:4.1f} s; "
        + ", ".join(f"{name} {value:.2f}" for name, value in measured.cpu_us_by_role.items()),
        flush=True,
    )


if __name__ == "__main__":
    typer.run(main)
