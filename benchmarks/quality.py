"""Every model on public data, with several seeds, beside the figures that others have published.

    python benchmarks/quality.py [SOURCE] [--seeds 5] [--only dlrm,toys] [--budget-s 3600] [--smallest]
    python benchmarks/quality.py SOURCE --exports [--only ml100k_dlrm,adult_mmoe]

The rows, their data sets and published figures are benchmarks/quality.yaml; a row's configuration is
jobs/quality/DATA_MODEL.yaml. SOURCE is the folder with the original data (ml-100k, ml-1m, toys, adult); what
is not there is left out. Data sets are prepared by their recipes, into data/quality.

A run of a seed is kept in benchmarks/results/quality.json as soon as it is done: the same command again goes
on with the seeds that are missing, and begins a row anew whose configuration, data or recipe has changed. A
row whose runs have taken its budget (an hour) gets no more seeds. Prints a table, and writes docs/quality.md.

With --exports, rows are trained once more with seed 0 and exported with tables of each precision
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

import documents
import typer
import yaml
from quality_baselines import measure_logistic, measure_popularity
from quality_table import document, exports_document, print_table
from rich.console import Console

from raytrec.common.errors import RaytrecError
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.driver.launch import session_of
from raytrec.driver.run import train
from raytrec.exporting.export import export

HERE = Path(__file__).parent
REPO = HERE.parent
ROWS, RESULTS, JOBS = HERE / "quality.yaml", HERE / "results" / "quality.json", REPO / "jobs" / "quality"
EXPORTS = HERE / "results" / "quality_exports.json"
PREPARED = "data/quality"
BUDGET_S = 3600
BASELINES = {"logistic regression": measure_logistic, "popularity": measure_popularity}  # without seeds
SHORT = ["train.epochs=1", "train.max_steps=3", "train.eval_every_steps=null", "train.early_stopping=null"]
QUIET = ["tracking.enabled=false", "tracking.report=false", "tracking.every_steps=null"]


@dataclass(frozen=True)
class Row:
    """A model on a data set.

    Attributes:
        metrics: what the table calls a figure → its key in result.json; of logistic regression: → the label.
        published: what others report of these figures, and where they do.
        recipe: of its data set, without --out; {source} is the folder with the original data.
        features: of logistic regression, its features with one id a row; none: all, and the dense columns.
        budget_s: it gets no more seeds after so many seconds of runs.
    """

    model: str
    data: str
    metrics: dict[str, str]
    recipe: str
    title: str
    published: dict[str, Any] = field(default_factory=dict)
    job: str = ""
    note: str = ""
    features: list[str] = field(default_factory=list)
    budget_s: float = BUDGET_S

    @property
    def name(self) -> str:
        """What results know it by."""
        return self.job or f"{self.data}_{self.model.split()[0]}"

    @property
    def config(self) -> Path:
        """Its configuration."""
        return JOBS / f"{self.name}.yaml"


def main(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Folder with the original data.")] = Path(
        "."
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row.")] = 5,
    only: Annotated[str, typer.Option(help="Rows, models or data sets alone, with commas between.")] = "",
    budget_s: Annotated[
        float | None, typer.Option(help="After so many seconds a row gets no more seeds; default: its own.")
    ] = None,
    smallest: Annotated[
        bool, typer.Option(help="One run of three steps for each row, on made-up data; writes nothing.")
    ] = False,
    exports: Annotated[
        bool, typer.Option("--exports", help="What tables of fewer bits cost, instead.")
    ] = False,
) -> None:
    """Trains what is missing, prints the table, writes it into the documents."""
    rows = chosen(read_rows(), only)
    if smallest:
        return measure_smallest(rows)
    source = source.expanduser().absolute()
    for row in rows:
        folder = prepare(row, source, REPO / PREPARED)
        if folder is not None and exports:
            measure_exports(row, folder)
        elif folder is not None:
            measure(row, folder, seeds, row.budget_s if budget_s is None else budget_s)
    if exports:
        table = exports_document(read_rows(), json.loads(EXPORTS.read_text()))
        print(table)
        documents.fill("docs/quality.md", "quality_exports", table)
        return None
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print_table(read_rows(), results)
    documents.fill("docs/quality.md", "quality", document(read_rows(), results))
    return None


def read_rows() -> list[Row]:
    """The rows of quality.yaml."""
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
    """Those that are named, by row, model or data set.

    Raises:
        typer.BadParameter: a name is none of theirs.
    """
    names = set(filter(None, only.split(",")))
    if unknown := names - {name for row in rows for name in (row.name, row.model, row.data)}:
        raise typer.BadParameter(
            f"there is no {', '.join(sorted(unknown))}; rows are {', '.join(r.name for r in rows)}"
        )
    return [row for row in rows if not names or names & {row.name, row.model, row.data}]


def prepare(row: Row, source: Path, into: Path) -> Path | None:
    """The folder with a row's data set, which is prepared unless it is there; None: its source is missing."""
    from raytrec_datasets import app

    arguments = shlex.split(row.recipe.format(source=shlex.quote(str(source))))
    original = Path(arguments[arguments.index("--source") + 1])
    if not original.exists():
        Console(stderr=True).print(f"{row.name}: left out, there is no {original}", soft_wrap=True)
        return None
    app([*arguments, "--out", str(into / row.data)], standalone_mode=False)
    return into / row.data


def settings_of(row: Row, folder: Path) -> list[str]:
    """Overrides by which a row's configuration reads its data set here."""
    values = load_config(row.config)
    settings = [f"data.{split}={folder}/{split}" for split in ("train", "valid", "test")]
    if values.data.schema_path:
        settings.append(f"data.schema={REPO / values.data.schema_path}")
    if values.eval.retrieval:
        settings.append(f"eval.retrieval.items={folder}/{Path(values.eval.retrieval.items).name}")
    return settings


def measure(row: Row, folder: Path, seeds: int, budget_s: float) -> None:
    """Trains the seeds of a row that are missing, each kept at once."""
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
    with tempfile.TemporaryDirectory() as scratch, session_of(load_config(row.config, settings)):
        for seed in missing:
            spent = sum(run["seconds"] for run in runs)
            if runs and spent + spent / len(runs) > budget_s:
                break
            Console().print(f"{row.name}: seed {seed}", style="bold")
            runs.append(run(row, [*settings, f"run.dir={scratch}/{seed}"], seed))
            keep(row, about | {"runs": runs})
    return None


def kept_runs(row: Row, about: dict) -> list[dict]:
    """The runs of before, if they are of the same configuration, data and recipe."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = before.get(row.name, {})
    return known["runs"] if known and known | about == known else []


def keep(row: Row, result: dict) -> None:
    """Writes a row's runs; those of others stay."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    documents.keep(RESULTS, before | {row.name: result})


def run(row: Row, settings: list[str], seed: int) -> dict:
    """{seed, figures, parameters, rows_per_s, steps, seconds} of one training."""
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
    """Trains seed 0 of a row, and keeps its figures as {figure: {precision of tables: value}}."""
    settings = [*settings_of(row, folder), *QUIET, "run.seed=0"]
    with tempfile.TemporaryDirectory() as scratch:
        trained = train(row.config, [*settings, f"run.dir={scratch}/run"])
        found = {name: {"fp32": trained.metrics[key]} for name, key in row.metrics.items()}
        for precision in ("fp16", "int8", "int4"):
            metrics = export(trained.path, f"{scratch}/{precision}", quantize=precision).metrics
            for name, key in row.metrics.items():
                found[name][precision] = metrics[f"{key}.{precision}"]
    before = json.loads(EXPORTS.read_text()) if EXPORTS.exists() else {}
    documents.keep(EXPORTS, before | {row.name: found})


def parameters(config: RunConfig, schema: Schema) -> int:
    """Numbers that are learned: of the tables that features look up, and of the dense layers."""
    from raytrec.models import build_model
    from raytrec.tasks.task import columns_of, needs_vectors, resolve_tasks

    tasks = resolve_tasks(config.tasks, schema)
    columns = columns_of(tasks)
    model = build_model(schema, config.model, sum(columns.values()), needs_vectors(tasks), columns)
    tables = sum(table.rows * table.dim for table in schema.tables.values())
    return tables + sum(parameter.numel() for parameter in model.parameters())


def measure_smallest(rows: list[Row]) -> None:
    """Whether every row still runs.

    Raises:
        typer.Exit: one does not; the others have been tried.
    """
    from quality_sources import write_sources

    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        write_sources(Path(scratch))
        first = next(row for row in read_rows() if row.model not in BASELINES)
        settings = [*settings_of(first, Path(scratch)), *SHORT, "scaling.num_workers=1"]
        with session_of(load_config(first.config, settings)):
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
    """What `run` gives of three steps on made-up data."""
    folder = prepare(row, scratch, scratch / "prepared")
    assert folder is not None
    if baseline := BASELINES.get(row.model):
        return baseline(folder, row.metrics, row.features)
    settings = [*settings_of(row, folder), *SHORT, *QUIET, "scaling.num_workers=1"]
    return run(row, [*settings, f"run.dir={scratch}/{row.name}"], 0)


if __name__ == "__main__":
    typer.run(main)
