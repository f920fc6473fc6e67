"""Quality of `raytrec inspect` and `raytrec train jobs/own.yaml` without manual changes.

    python benchmarks/out_of_box.py SOURCE [--seeds 5] [--only adult_income,numbers]

SOURCE is the folder with adult/, ml-100k/ and ml-1m/; other data sets are from scikit-learn or generated
(out_of_box_data.py). Each data set is written as Parquet, and raytrec inspects it and trains on it. Only the
paths and run.seed are configured. raytrec is compared with scikit-learn's logistic regression (L2, C = 1;
numbers with mean 0 and variance 1, nulls replaced with the mean, a column for each value of text, ids and
lists) and boosted trees (HistGradientBoostingClassifier, text as ordinals). The metrics are AUC and log loss on
the test split.

Writes benchmarks/results/out_of_box.json and the table in docs/quality.md.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import harness
import numpy as np
import pandas as pd
import typer
from harness import QUIET, REPO, Grid
from out_of_box_data import SETS
from scipy import sparse
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MultiLabelBinarizer, OneHotEncoder, OrdinalEncoder, StandardScaler

from raytrec.config.run_config import load_config
from raytrec.driver.launch import open_session
from raytrec.driver.run import train
from raytrec.inspection.propose import inspect

JOB = REPO / "jobs" / "own.yaml"
FIGURES, WHO = ("AUC", "log loss"), ("logistic", "trees", "raytrec")


def main(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Folder with adult/, ml-100k/ and ml-1m/.")],
    seeds: Annotated[int, typer.Option(help="Number of runs on each data set.")] = 5,
    only: Annotated[str, typer.Option(help="Data sets, separated by commas.")] = "",
) -> None:
    """Compare raytrec with scikit-learn on each data set; print and store the results and write the table."""
    results = harness.load("out_of_box")
    for name in harness.split(only) or list(SETS):
        split = SETS[name](source.expanduser())
        results[name] = {"rows": len(split[0]), "positive": float(split[0]["label"].mean())}
        results[name] |= {**of_scikit_learn(*split), "ours": of_raytrec(*split, seeds)}
        print(" | ".join(line(name, results[name])), flush=True)
        harness.store("out_of_box", {key: results[key] for key in SETS if key in results})
    harness.fill("docs/quality.md", "out_of_box", document(results))


def document(results: dict) -> str:
    """Return the table for docs/quality.md."""
    header = ("dataset", "rows", *(f"{who}: {what}" for what in FIGURES for who in WHO))
    return Grid(header, [line(name, results[name]) for name in SETS if name in results]).markdown()


def line(name: str, result: dict) -> list[str]:
    """Return the table row of a data set."""
    cells = [name, f"{result['rows']:,}"]
    for place in range(len(FIGURES)):
        ours = [each[place] for each in result["ours"]]
        spread = f" ± {statistics.stdev(ours):.4f}" if len(ours) > 1 else ""
        others = f"{result['logistic'][place]:.4f}", f"{result['trees'][place]:.4f}"
        cells += [*others, f"{statistics.mean(ours):.4f}{spread}"]
    return cells


def of_raytrec(trained: pd.DataFrame, tested: pd.DataFrame, seeds: int) -> list[tuple[float, float]]:
    """Train raytrec once per seed, and return each run's AUC and log loss."""
    scores = []
    with tempfile.TemporaryDirectory() as place:
        for name, rows in (("train", trained), ("test", tested)):
            (Path(place) / name).mkdir()
            rows.to_parquet(Path(place) / name / "a.parquet", index=False, row_group_size=16_384)
        inspection = inspect(place)
        Path(place, "schema.yaml").write_text(inspection.schema_yaml(), encoding="utf-8")
        places = [f"data.train={place}/train", f"data.test={place}/test"]
        places.append(f"data.transforms={json.dumps(inspection.transforms)}")
        with open_session(load_config(JOB, places)):
            for seed in range(seeds):
                own = [f"run.seed={seed}", f"run.dir={place}/{seed}", *QUIET]
                result = train(JOB, [*places, *own])
                scores.append((float(result.metrics["eval.auc"]), float(result.metrics["eval.logloss"])))
    return scores


def of_scikit_learn(trained: pd.DataFrame, tested: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Train logistic regression and boosted trees, and return the AUC and log loss of each."""
    lists = [name for name in trained if isinstance(trained[name].iloc[0], list | np.ndarray)]
    names = [name for name in trained if name not in (*lists, "label")]
    kinds = [n for n in names if not pd.api.types.is_numeric_dtype(trained[n]) or is_id(n)]
    numeric = [name for name in names if name not in kinds]
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    inputs = make_column_transformer((OneHotEncoder(handle_unknown="ignore"), kinds), (numbers, numeric))
    parts = [[inputs.fit_transform(trained)], [inputs.transform(tested)]]
    for name in lists:
        values = MultiLabelBinarizer(sparse_output=True)
        parts[0].append(values.fit_transform(trained[name]))
        parts[1].append(values.transform(tested[name]))
    linear_train, linear_test = (sparse.hstack([*map(sparse.csr_matrix, part)]).tocsr() for part in parts)
    linear = LogisticRegression(max_iter=3000).fit(linear_train, trained["label"])
    ordered = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    numbers_of = make_column_transformer((ordered, kinds), ("passthrough", numeric))
    trees = HistGradientBoostingClassifier(random_state=0).fit(numbers_of.fit_transform(trained), trained["label"])
    predictions = {
        "logistic": linear.predict_proba(linear_test)[:, 1],
        "trees": trees.predict_proba(numbers_of.transform(tested))[:, 1],
    }
    label = tested["label"]
    return {name: (roc_auc_score(label, p), log_loss(label, p)) for name, p in predictions.items()}


def is_id(name: str) -> bool:
    """Return True if an integer column of these data sets contains ids."""
    return name.endswith("_id") or (name[0] == "c" and name[1:].isdigit())


if __name__ == "__main__":
    typer.run(main)
