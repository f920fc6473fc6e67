"""UCI Adult: two tasks alone, with a shared bottom, and with experts; logistic regression on the same rows.

    raytrec prepare adult --source DIR --out data/adult
    python benchmarks/adult.py [DATA] [--seeds 5] [--smallest]

Trains jobs/adult.yaml with one worker for each task alone and for both, and for both with mmoe and ple, for
each seed of the initial weights and the order of rows; the figure is the AUC of the test split, of each
task. Logistic regression (scikit-learn) has the same dense columns, and a column of 0 and 1 for each value of
a sparse one.

Prints a table, writes benchmarks/results/adult.json and the table of docs/benchmarks.md. When it has been
interrupted, it goes on with the runs that are missing (they are kept in DATA until all are there).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from documents import fill
from rich.console import Console
from rich.table import Table

from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.driver.run import train
from raytrec.driver.session import session_of

HERE = Path(__file__).parent
CONFIG, RESULTS = HERE.parent / "jobs" / "adult.yaml", HERE / "results" / "adult.json"
KEPT = "measured.json"
TASKS = ("income", "never_married")
SETS = {
    "income alone": TASKS[:1],
    "never_married alone": TASKS[1:],
    "both": TASKS,
    "mmoe": TASKS,
    "ple": TASKS,
}
# What differs from jobs/adult.yaml; chosen on the valid split.
LEARNING = ["optim.dense.lr=0.003", "train.epochs=8"]
MODELS = {
    "mmoe": ["model={name: mmoe, experts: 4, expert_mlp: [64], tower_mlp: [32], dropout: 0.1}", *LEARNING],
    "ple": ["model={name: ple, levels: 1, expert_mlp: [64], tower_mlp: [32], dropout: 0.1}", *LEARNING],
}


def main(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder that `prepare adult` wrote.")] = Path(
        "data/adult"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 5,
    smallest: Annotated[
        bool, typer.Option(help="One short run of both tasks on made-up people; writes nothing.")
    ] = False,
) -> None:
    """Trains, prints the table, writes it into the documents."""
    with tempfile.TemporaryDirectory() as folder:
        if smallest:
            data = prepare_made_up(Path(folder))
            measured = measure(data, {"both": TASKS}, 1, ["train.epochs=1"])
        else:
            measured = measure(data, SETS, seeds, [])
    lines = rows_of(measured)
    table = Table(title="test AUC")
    for column in ("", *TASKS):
        table.add_column(column, justify="right" if column else "left")
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    if not smallest:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(measured, indent=1) + "\n")
        fill("docs/benchmarks.md", "adult", document(lines))
        (data / KEPT).unlink()


def measure(data: Path, sets: dict[str, tuple[str, ...]], seeds: int, overrides: list[str]) -> dict:
    """{config, runs: [{set, seed, AUC of each task}, …], logistic regression: {task: AUC}}."""
    settings = [f"data.{split}={data}/{split}" for split in ("train", "valid", "test")] + overrides
    wanted = [(name, seed) for seed in range(seeds) for name in sets]
    measured = left_by_an_interruption(
        data / KEPT, {"config": CONFIG.read_text(), "models": MODELS, "seeds": seeds}
    )
    done = {(run["set"], run["seed"]) for run in measured["runs"]}
    with tempfile.TemporaryDirectory() as folder, session_of(load_config(CONFIG, settings)):
        for number, (name, seed) in enumerate(wanted):
            if (name, seed) not in done:
                here = [f"run.dir={folder}/{number}", f"run.seed={seed}"]
                figures = run(sets[name], [*settings, *MODELS.get(name, []), *here])
                measured["runs"].append({"set": name, "seed": seed} | figures)
                (data / KEPT).write_text(json.dumps(measured))
    return measured | {"logistic regression": logistic_regression(data)}


def left_by_an_interruption(kept: Path, of: dict) -> dict:
    """What has been measured of the same before; else no runs."""
    before = json.loads(kept.read_text()) if kept.exists() else {}
    return before if before | of == before else of | {"runs": []}


def run(tasks: tuple[str, ...], settings: list[str]) -> dict[str, float]:
    """{task: AUC} of one training."""
    asked = ", ".join(f"{{label: {task}, metrics: [auc]}}" for task in tasks)
    figures = train(CONFIG, [*settings, f"tasks=[{asked}]", "tracking.enabled=false"]).metrics
    return {task: figures[f"eval.{task}.auc" if len(tasks) > 1 else "eval.auc"] for task in tasks}


def logistic_regression(data: Path) -> dict[str, float]:
    """{task: AUC} on the test split, learned from train."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    schema = Schema.load(data / "schema.yaml")
    tables = {split: pq.read_table(data / split) for split in ("train", "test")}
    inputs = {split: _columns(table, schema) for split, table in tables.items()}
    figures = {}
    for task in TASKS:
        learned = LogisticRegression(max_iter=1000).fit(inputs["train"], tables["train"][task].to_numpy())
        scores = learned.decision_function(inputs["test"])
        figures[task] = float(roc_auc_score(tables["test"][task].to_numpy(), scores))
    return figures


def _columns(table: pa.Table, schema: Schema) -> np.ndarray:
    """float64 [rows, dense columns and values of sparse ones]."""
    dense = [table[name].to_numpy()[:, None] for name in schema.dense]
    sparse = [
        np.eye(schema.tables[f.table].rows)[table[name].to_numpy()] for name, f in schema.sparse.items()
    ]
    return np.hstack([*dense, *sparse])


def rows_of(measured: dict) -> list[tuple[str, str, str]]:
    """The lines of the table: what, and the AUC of each task, mean ± standard deviation over seeds."""
    by_set = {name: [run for run in measured["runs"] if run["set"] == name] for name in SETS}
    alone = [_spread([run[task] for run in by_set[f"{task} alone"]]) for task in TASKS]
    both, mmoe, ple = (
        [_spread([run[task] for run in by_set[name]]) for task in TASKS] for name in ("both", "mmoe", "ple")
    )
    regression = [f"{measured['logistic regression'][task]:.4f}" for task in TASKS]
    lines = [
        ("each task alone", *alone),
        ("both, shared bottom", *both),
        ("both, mmoe", *mmoe),
        ("both, ple", *ple),
        ("logistic regression", *regression),
    ]
    return [line for line in lines if any(line[1:])]


def _spread(values: list[float]) -> str:
    """Mean ± standard deviation; the value of one run; nothing of none."""
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def document(lines: list[tuple[str, str, str]]) -> str:
    """The table as Markdown."""
    head = ["| test AUC | income > 50K | never married |", "|---|---|---|"]
    return "\n".join(head + [f"| {' | '.join(line)} |" for line in lines])


def prepare_made_up(folder: Path) -> Path:
    """Prepares a few hundred people in Adult's format, some of each label."""
    from raytrec_datasets.adult.recipe import write

    write_people(folder, np.random.default_rng(0))
    write(folder / "adult", folder, seed=0, dim=8, force=False)
    return folder / "adult"


def write_people(folder: Path, rng: np.random.Generator) -> None:
    """Writes adult.data and adult.test."""
    married = ("Never-married", "Divorced")
    for name, people in (("adult.data", 400), ("adult.test", 100)):
        lines = [
            f"{rng.integers(17, 90)}, Private, {n}, HS-grad, {rng.integers(1, 17)}, {married[n % 2]}, Sales, "
            f"Wife, White, Male, 0, 0, {rng.integers(1, 99)}, Cuba, {('<=50K', '>50K')[n // 2 % 2]}"
            for n in range(people)
        ]
        (folder / name).write_text("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
