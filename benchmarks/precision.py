"""AUC with fp16 tables and with quantized collectives (plan.qcomms).

    raytrec prepare synthetic --out data/synthetic
    python benchmarks/precision.py [CONFIG] [section.key=value]... [--seeds 5]

Each precision is trained with the same seeds, so that each run differs from the fp32 run with the same seed
only in precision. The table shows the mean of these differences ± its standard error. Each run is stored in
benchmarks/results/precision.json when it ends, so that the same command continues with the missing runs.
Writes the table into docs/benchmarks.md.
"""

from __future__ import annotations

import tempfile
from math import sqrt
from statistics import mean, stdev
from typing import Annotated

import harness
import typer
from harness import QUIET, Grid

from raytrec.config.run_config import load_config
from raytrec.driver.launch import open_session
from raytrec.driver.run import train

HALF = "plan.tables={'*': {dtype: fp16}}"
COLUMNS = ("tables", "embeddings sent", "gradients sent", "test AUC", "difference from fp32", "rows/s")


def sent(forward: str, backward: str) -> list[str]:
    """Return the settings for collectives with these precisions."""
    return [f"plan.qcomms.forward_precision={forward}", f"plan.qcomms.backward_precision={backward}"]


# (tables, embeddings sent forward, gradients sent backward) → settings
VARIANTS = {
    ("fp32", "fp32", "fp32"): [],
    ("fp32", "fp16", "fp16"): sent("fp16", "fp16"),
    ("fp32", "fp16", "bf16"): sent("fp16", "bf16"),
    ("fp32", "bf16", "bf16"): sent("bf16", "bf16"),
    ("fp32", "int8", "fp16"): sent("int8", "fp16"),
    ("fp32", "int8", "int8"): sent("int8", "int8"),
    ("fp16", "fp32", "fp32"): [HALF],
    ("fp16", "fp16", "fp16"): [HALF, *sent("fp16", "fp16")],
}
Runs = dict[str, dict[str, dict[str, float]]]  # variant → seed → measurements


def run(config: str, settings: list[str]) -> dict[str, float]:
    """Train once and return {auc, ne, rows_per_s}."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, [*settings, f"run.dir={folder}/run"]).metrics
    return {"auc": result["eval.auc"], "ne": result["eval.ne"], "rows_per_s": result["train.samples_per_s"]}


def kept(about: dict) -> Runs:
    """Return the stored runs if they used this configuration, else {}."""
    stored = harness.load("precision")
    return stored["runs"] if stored and stored | about == stored else {}


def rows_of(runs: Runs) -> list[list[str]]:
    """Return the table rows of the variants with runs."""
    exact, out = runs[" ".join(next(iter(VARIANTS)))], []
    for names in VARIANTS:
        if not (seed_runs := runs.get(" ".join(names))):
            continue
        auc, speed = (mean(one[key] for one in seed_runs.values()) for key in ("auc", "rows_per_s"))
        apart = [one["auc"] - exact[seed]["auc"] for seed, one in seed_runs.items() if seed in exact]
        error = stdev(apart) / sqrt(len(apart)) if len(apart) > 1 else float("nan")
        difference = "" if seed_runs is exact else f"{mean(apart):+.1e} ± {error:.1e}"
        out.append([*names, f"{auc:.5f}", difference, f"{speed:,.0f}"])
    return out


def grid(rows: list[list[str]], title: str) -> Grid:
    """Return the table of precisions and measurements."""
    return Grid(COLUMNS, rows, title, left=3)


def document(rows: list[list[str]], title: str) -> str:
    """Return the text for docs/benchmarks.md."""
    return f"{title}:\n\n{grid(rows, title).markdown()}"


def main(
    config: Annotated[str, typer.Argument(metavar="CONFIG")] = "jobs/synthetic.yaml",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs for each precision.")] = 5,
    smallest: harness.Smallest = False,
) -> None:
    """Train the missing runs and print the table; without --smallest, write it into docs/benchmarks.md."""
    settings = ["plan.sharding_types=[table_wise]", *QUIET, *(overrides or [])]
    settings += ["train.epochs=1", "train.max_steps=3"] if smallest else []
    variants, seeds = (list(VARIANTS)[::4], 1) if smallest else (list(VARIANTS), seeds)
    about = {"config": config, "settings": settings}
    runs = {} if smallest else kept(about)
    with open_session(load_config(config, settings)):
        for seed in map(str, range(seeds)):
            for names in variants:
                of_variant = runs.setdefault(" ".join(names), {})
                if seed not in of_variant:
                    of_variant[seed] = run(config, [*settings, *VARIANTS[names], f"run.seed={seed}"])
                    if not smallest:
                        harness.store("precision", about | {"runs": runs})
    rows, workers = rows_of(runs), load_config(config, settings).scaling.max_workers
    title = f"`{config}`, {workers} workers, table-wise, {seeds} seeds"
    grid(rows, title).show()
    if not smallest:
        harness.fill(harness.BENCHMARKS_PAGE, "precision", document(rows, title))


if __name__ == "__main__":
    typer.run(main)
