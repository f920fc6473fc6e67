"""What lower precision costs in AUC: of tables (fp16), and of what workers send one another (plan.qcomms).

    raytrec prepare synthetic --out data/synthetic
    python benchmarks/precision.py [CONFIG] [section.key=value]... [--seeds 5]

Each precision is trained with the same seeds, so that a seed's run differs from its fp32 run in nothing else,
and the table has the mean of these differences beside its standard error. A run is kept in
benchmarks/results/precision.json as soon as it is done: the same command again goes on with those that are
missing. Prints a table, and writes it into docs/benchmarks.md.
"""

from __future__ import annotations

import json
import tempfile
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import typer
from documents import fill, keep
from rich.console import Console
from rich.table import Table

from raytrec.config.run_config import load_config
from raytrec.driver.launch import session_of
from raytrec.driver.run import train

RESULTS = Path(__file__).parent / "results" / "precision.json"
QUIET = ["tracking.enabled=false", "tracking.report=false", "tracking.every_steps=null"]
HALF = "plan.tables={'*': {dtype: fp16}}"
COLUMNS = ("tables", "embeddings", "gradients", "test AUC", "difference to fp32", "NE", "rows/s")
LEFT = 3  # columns of names


def sent(forward: str, backward: str) -> list[str]:
    """Settings of quantized collectives."""
    return [f"plan.qcomms.forward_precision={forward}", f"plan.qcomms.backward_precision={backward}"]


# (tables, embeddings on their way, gradients on their way back) → settings
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
Runs = dict[str, dict[str, dict[str, float]]]  # variant → seed → figures


def run(config: str, settings: list[str]) -> dict[str, float]:
    """{auc, ne, rows_per_s} of one training."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, [*settings, f"run.dir={folder}/run"]).metrics
    return {"auc": result["eval.auc"], "ne": result["eval.ne"], "rows_per_s": result["train.samples_per_s"]}


def kept(about: dict) -> Runs:
    """The runs of before, if they are of this configuration."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return before["runs"] if before and before | about == before else {}


def rows_of(runs: Runs) -> list[list[str]]:
    """The table's rows, of the variants that there are runs of."""
    exact, out = runs[" ".join(next(iter(VARIANTS)))], []
    for names in VARIANTS:
        if not (found := runs.get(" ".join(names))):
            continue
        figures = {key: mean(one[key] for one in found.values()) for key in ("auc", "ne", "rows_per_s")}
        apart = [one["auc"] - exact[seed]["auc"] for seed, one in found.items() if seed in exact]
        error = stdev(apart) / sqrt(len(apart)) if len(apart) > 1 else float("nan")
        difference = "" if found is exact else f"{mean(apart):+.1e} ± {error:.1e}"
        out.append(
            [
                *names,
                f"{figures['auc']:.5f}",
                difference,
                f"{figures['ne']:.5f}",
                f"{figures['rows_per_s']:,.0f}",
            ]
        )
    return out


def document(rows: list[list[str]], title: str) -> str:
    """The table for docs/benchmarks.md."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * LEFT}{'---:|' * (len(COLUMNS) - LEFT)}"]
    return "\n".join([f"{title}:", "", *lines, *(f"| {' | '.join(row)} |" for row in rows)])


def main(
    config: Annotated[str, typer.Argument(metavar="CONFIG")] = "jobs/synthetic.yaml",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each precision.")] = 5,
    smallest: Annotated[bool, typer.Option(help="Few steps of few precisions; writes nothing.")] = False,
) -> None:
    """Trains what is missing, prints the table, writes it into the documents."""
    settings = ["plan.sharding_types=[table_wise]", *QUIET, *(overrides or [])]
    settings += ["train.epochs=1", "train.max_steps=3"] if smallest else []
    variants = list(VARIANTS)[::4] if smallest else list(VARIANTS)
    about = {"config": config, "settings": settings}
    runs = {} if smallest else kept(about)
    with session_of(load_config(config, settings)):
        for seed in map(str, range(1 if smallest else seeds)):
            for names in variants:
                of_variant = runs.setdefault(" ".join(names), {})
                if seed not in of_variant:
                    own = [*settings, *VARIANTS[names], f"run.seed={seed}"]
                    of_variant[seed] = run(config, own)
                    if not smallest:
                        keep(RESULTS, about | {"runs": runs})
    rows, workers = rows_of(runs), load_config(config, settings).scaling.max_workers
    title = f"`{config}`, {workers} workers, table-wise, {1 if smallest else seeds} seeds"
    table = Table(title=title)
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if place < LEFT else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    if not smallest:
        fill("docs/benchmarks.md", "precision", document(rows, title))


if __name__ == "__main__":
    typer.run(main)
