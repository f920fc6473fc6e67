"""Quality of every model on public data with several seeds, compared with published results.

    python benchmarks/quality.py [SOURCE] [--seeds 5] [--only dlrm,toys] [--budget-s 3600] [--smallest]
    python benchmarks/quality.py SOURCE --exports [--only ml100k_dlrm,adult_mmoe]

The table's rows, their data sets and published results are in benchmarks/quality.yaml. The configuration of a
row is jobs/quality/DATA_MODEL.yaml. SOURCE is the folder with the original data (ml-100k, ml-1m, toys, adult);
rows whose data is missing are skipped. Data sets are prepared by their recipes, into data/quality.

Each run is stored in benchmarks/results/quality.json when it ends, so that the same command continues with
the missing seeds. A row starts over if its data, its recipe or the text of its configuration, including comments,
has changed. A row whose runs have used up its budget (an hour) gets no more seeds. Writes the table into
docs/quality.md.

With --exports, rows are trained once with seed 0 and exported with tables of each precision
(benchmarks/results/quality_exports.json).
"""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import harness
import typer
import yaml
from harness import HERE, QUIET, REPO
from quality_baselines import measure_logistic, measure_popularity
from quality_table import document, exports_document, grid
from rich.console import Console

from raytrec.common.errors import RaytrecError
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.driver.launch import open_session
from raytrec.driver.run import train
from raytrec.exporting.export import export

ROWS, JOBS = HERE / "quality.yaml", REPO / "jobs" / "quality"
PAGE = "docs/quality.md"
PREPARED = "data/quality"
BUDGET_S = 3600
BASELINES = {"logistic regression": measure_logistic, "popularity": measure_popularity}  # without seeds
SHORT = [
    *("train.epochs=1", "train.max_steps=3", "train.eval_every_steps=null", "train.early_stopping=null"),
    "checkpoint.keep_best=0",
]


@dataclass(frozen=True)
class Row:
    """Table row: a model on a data set.

    Attributes:
        model: Name of the model.
        data: Name of the data set.
        metrics: Metric in the table → key in result.json or, for logistic regression, the label.
        recipe: Recipe of the data set, without --out; {source} is the folder with the original data.
        published: Published values of these metrics, and their source.
        job: Name of the configuration; default: derived from data and model.
        note: Text after the model's name in the table.
        features: Features with one id per row for logistic regression; empty: all such features, and the
            dense columns.
        budget_s: Total seconds of runs after which the row gets no more seeds.
    """

    model: str
    data: str
    metrics: dict[str, str]
    recipe: str
    published: dict[str, Any] = field(default_factory=dict)
    job: str = ""
    note: str = ""
    features: list[str] = field(default_factory=list)
    budget_s: float = BUDGET_S

    @property
    def name(self) -> str:
        """Return the row's key in the results."""
        return self.job or f"{self.data}_{self.model.split()[0]}"

    @property
    def config(self) -> Path:
        """Return the path of the row's configuration."""
        return JOBS / f"{self.name}.yaml"


def main(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder with the original data.")] = ".",
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs for each row.")] = 5,
    only: Annotated[str, typer.Option(help="Rows, models or data sets, separated by commas.")] = "",
    budget_s: Annotated[
        float | None, typer.Option(help="Seconds after which a row gets no more seeds; default: the row's.")
    ] = None,
    smallest: harness.Smallest = False,
    exports: Annotated[bool, typer.Option("--exports", help="Measure quantized exports instead.")] = False,
) -> None:
    """Train the missing runs, print the table and write it into docs/quality.md.

    With --smallest, each row is trained for three steps on synthetic data, and nothing is stored or written.
    """
    rows = chosen(read_rows(), only)
    if smallest:
        return measure_smallest(rows)
    for row in rows:
        folder = prepare(row, Path(source).expanduser().absolute(), REPO / PREPARED)
        if folder is not None and exports:
            measure_exports(row, folder)
        elif folder is not None:
            measure(row, folder, seeds, row.budget_s if budget_s is None else budget_s)
    if exports:
        table = exports_document(read_rows(), harness.load("quality_exports"))
        print(table)
        return harness.fill(PAGE, "quality_exports", table)
    results = harness.load("quality")
    grid(read_rows(), results).show()
    return harness.fill(PAGE, "quality", document(read_rows(), results))


def read_rows() -> list[Row]:
    """Return the rows in quality.yaml."""
    values = yaml.safe_load(ROWS.read_text())
    published = values["published"]
    return [
        Row(
            **row | {"published": published[row["published"]] if "published" in row else {}},
            **values["data"][row["data"]],
        )
        for row in values["rows"]
    ]


def chosen(rows: list[Row], only: str) -> list[Row]:
    """Return the rows selected by names of rows, models or data sets, or all rows if `only` is empty.

    Raises:
        typer.BadParameter: A name is unknown.
    """
    names = set(harness.split(only))
    if unknown := names - {name for row in rows for name in (row.name, row.model, row.data)}:
        raise typer.BadParameter(
            f"unknown row {', '.join(sorted(unknown))}; choose from {', '.join(r.name for r in rows)}"
        )
    return [row for row in rows if not names or names & {row.name, row.model, row.data}]


def prepare(row: Row, source: Path, into: Path) -> Path | None:
    """Prepare or generate a row's data set if necessary; return its folder, or None if the source is missing."""
    from raytrec_datasets import app

    arguments = shlex.split(row.recipe.format(source=shlex.quote(str(source))))
    original = Path(arguments[arguments.index("--source") + 1]) if "--source" in arguments else None
    if original and not original.exists():
        Console(stderr=True).print(f"{row.name}: skipped, because {original} does not exist", soft_wrap=True)
        return None
    app([*arguments, "--out", str(into / row.data)], standalone_mode=False)
    return into / row.data


def settings_of(row: Row, folder: Path) -> list[str]:
    """Return the overrides with which a row's configuration reads the data set in `folder`."""
    values = load_config(row.config)
    settings = [f"data.{split}={folder}/{split}" for split in ("train", "valid", "test")]
    if values.data.schema_path:
        settings.append(f"data.schema={REPO / values.data.schema_path}")
    if values.eval.retrieval:
        settings.append(f"eval.retrieval.items={folder}/{Path(values.eval.retrieval.items).name}")
    return settings


def measure(row: Row, folder: Path, seeds: int, budget_s: float) -> None:
    """Train the missing seeds of a row, and store each run when it ends."""
    baseline = BASELINES.get(row.model)
    about = {
        "config": json.dumps([row.metrics, row.features]) if baseline else row.config.read_text(),
        "data": json.loads((folder / "prepared.json").read_text())["rows"],
        "recipe": row.recipe,
    }
    runs = kept_runs(row, about)
    missing = [seed for seed in range(1 if baseline else seeds) if seed not in {run["seed"] for run in runs}]
    if not missing or sum(run["seconds"] for run in runs) >= budget_s:
        return None
    if baseline:
        return keep(row, about | {"runs": [baseline(folder, row.metrics, row.features)]})
    settings = [*settings_of(row, folder), *QUIET]
    with tempfile.TemporaryDirectory() as scratch, open_session(load_config(row.config, settings)):
        for seed in missing:
            spent = sum(run["seconds"] for run in runs)
            if runs and spent + spent / len(runs) > budget_s:
                break
            Console().print(f"{row.name}: seed {seed}", style="bold")
            runs.append(run(row, [*settings, f"run.dir={scratch}/{seed}"], seed))
            keep(row, about | {"runs": runs})
    return None


def kept_runs(row: Row, about: dict) -> list[dict]:
    """Return the stored runs if they used the same configuration, data and recipe, else []."""
    known = harness.load("quality").get(row.name, {})
    return known["runs"] if known and known | about == known else []


def keep(row: Row, result: dict) -> None:
    """Store a row's runs, and keep the stored runs of other rows."""
    harness.store("quality", harness.load("quality") | {row.name: result})


def run(row: Row, settings: list[str], seed: int) -> dict:
    """Train once, and return {seed, figures, parameters, rows_per_s, workers, steps, seconds}."""
    began = time.monotonic()
    result = train(row.config, [*settings, f"run.seed={seed}"]).metrics
    config = load_config(row.config, settings)
    place = Path(config.data.schema_path or Path(config.data.train).parent / "schema.yaml")
    return {
        "seed": seed,
        "figures": {name: result[key] for name, key in row.metrics.items()},
        "parameters": parameters(config, Schema.load(place)),
        "rows_per_s": round(result["train.samples_per_s"] or 0),
        "workers": result["world_size"],
        "steps": result["train.steps"],
        "seconds": round(time.monotonic() - began, 1),
    }


def measure_exports(row: Row, folder: Path) -> None:
    """Train seed 0 of a row, export it in each precision, and store {figure: {precision: value}}."""
    settings = [*settings_of(row, folder), *QUIET, "run.seed=0"]
    with tempfile.TemporaryDirectory() as scratch:
        trained = train(row.config, [*settings, f"run.dir={scratch}/run"])
        values = {name: {"fp32": trained.metrics[key]} for name, key in row.metrics.items()}
        for precision in ("fp16", "int8", "int4"):
            metrics = export(trained.path, f"{scratch}/{precision}", quantize=precision).metrics
            for name, key in row.metrics.items():
                values[name][precision] = metrics[f"{key}.{precision}"]
    harness.store("quality_exports", harness.load("quality_exports") | {row.name: values})


def parameters(config: RunConfig, schema: Schema) -> int:
    """Return the number of parameters in the tables and dense layers."""
    from raytrec.models import build_model
    from raytrec.tasks.task import count_logits, needs_vectors, resolve_tasks

    tasks = resolve_tasks(config.tasks, schema)
    model = build_model(schema, config.model, count_logits(tasks), needs_vectors(tasks))
    tables = sum(table.rows * table.dim for table in schema.tables.values())
    return tables + sum(parameter.numel() for parameter in model.parameters())


def measure_smallest(rows: list[Row]) -> None:
    """Train every row for a few steps on synthetic data.

    Raises:
        typer.Exit: A row failed. All other rows are run before the error is raised.
    """
    from quality_sources import write_sources

    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        write_sources(Path(scratch))
        first = next(row for row in read_rows() if row.model not in BASELINES)
        settings = [*settings_of(first, Path(scratch)), *SHORT, "scaling.num_workers=1"]
        with open_session(load_config(first.config, settings)):
            for row in rows:
                try:
                    found = run_smallest(row, Path(scratch))
                    print(f"{row.name}: passed, {found['figures']}, {found['seconds']} s", flush=True)
                except RaytrecError as error:
                    failed.append(row.name)
                    why = Path(scratch, row.name, "error.txt")
                    story = why.read_text(encoding="utf-8") if why.exists() else ""
                    print(f"{row.name}: FAILED\n{error}\n{story}", flush=True)
    if failed:
        raise typer.Exit(1)


def run_smallest(row: Row, scratch: Path) -> dict:
    """Train a row for three steps on synthetic data, and return the result of the run."""
    folder = prepare(row, scratch, scratch / "prepared")
    assert folder is not None
    if baseline := BASELINES.get(row.model):
        return baseline(folder, row.metrics, row.features)
    settings = [*settings_of(row, folder), *SHORT, *QUIET, "scaling.num_workers=1"]
    return run(row, [*settings, f"run.dir={scratch}/{row.name}"], 0)


if __name__ == "__main__":
    typer.run(main)
