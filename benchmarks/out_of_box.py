"""What `raytrec inspect` and `raytrec train jobs/own.yaml` reach without a look at the data.

    python benchmarks/out_of_box.py SOURCE [--seeds 5] [--only adult_income,numbers]

SOURCE is the folder with adult/ and ml-100k/; the other data sets are made here. A data set is written as
Parquet, inspected, and trained with no other key than its places and run.seed. Beside it are scikit-learn's
logistic regression (L2, C = 1), with numbers at mean 0 and variance 1 and a column for each value of text,
ids and lists, and boosted trees (HistGradientBoostingClassifier), with text as ordered numbers. Figures are
AUC on the test split.

Prints a table; writes benchmarks/results/out_of_box.json and the table of docs/quality.md.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from documents import fill, keep
from scipy import sparse
from sklearn.compose import make_column_transformer
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import MultiLabelBinarizer, OneHotEncoder, OrdinalEncoder, StandardScaler

from raytrec.config.run_config import load_config
from raytrec.driver.run import train
from raytrec.driver.session import session_of
from raytrec.inspection.propose import inspect

HERE = Path(__file__).parent
RESULTS, JOB = HERE / "results" / "out_of_box.json", HERE.parent / "jobs" / "own.yaml"
ADULT = [
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation",
    "relationship", "race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country",
    "income",
]  # fmt: skip
QUIET = ["tracking.enabled=false", "tracking.report=false", "tracking.every_steps=null"]
Split = tuple[pd.DataFrame, pd.DataFrame]


def adult(source: Path, label: Callable[[pd.DataFrame], pd.Series], drop: list[str]) -> Split:
    """UCI Adult as it comes, with one of its columns to be told from the others."""
    parts = []
    for name, skip in (("adult.data", 0), ("adult.test", 1)):
        table = pd.read_csv(source / "adult" / name, names=ADULT, skipinitialspace=True, skiprows=skip)
        table["income"] = table["income"].str.rstrip(".")
        parts.append(table.assign(label=label(table).astype("int8")).drop(columns=drop))
    return parts[0], parts[1]


def ml100k(source: Path) -> Split:
    """MovieLens-100K: ratings ≥ 4 by user, film, the user's columns and the film's genres; a random fifth is
    the test."""
    folder = source / "ml-100k"
    users = pd.read_csv(folder / "u.user", sep="|", names=["user_id", "age", "gender", "occupation", "zip"])
    films = pd.read_csv(folder / "u.item", sep="|", encoding="latin1", header=None)
    genres = [np.flatnonzero(row).tolist() for row in films.iloc[:, 5:].to_numpy()]
    rows = pd.read_csv(folder / "u.data", sep="\t", names=["user_id", "item_id", "rating", "time"])
    rows = rows.merge(users).merge(pd.DataFrame({"item_id": films[0], "genres": genres}))
    rows = rows.assign(label=(rows["rating"] >= 4).astype("int8")).drop(columns=["rating", "time"])
    order = np.random.default_rng(0).permutation(len(rows))
    return rows.iloc[order[:80_000]], rows.iloc[order[80_000:]]


def numbers(rows: int = 60_000) -> Split:
    """In the form of covertype: ten quantities of very different sizes, and 44 indicators."""
    draw = np.random.default_rng(1)
    values, label = make_classification(
        rows, 10, n_informative=8, n_redundant=2, n_clusters_per_class=8, class_sep=0.8, random_state=3
    )
    sizes = np.array([280, 112, 7.5, 212, 58, 1559, 27, 20, 38, 1325])
    means = np.array([2959, 156, 14, 269, 46, 2350, 212, 223, 143, 1980])
    values = np.round(values * sizes + means).astype(np.int64)
    soil = np.digitize(values[:, 0] + draw.normal(0, 150, rows), np.linspace(2300, 3600, 39))
    soil, wild = (soil + draw.integers(0, 3, rows)) % 40, draw.integers(0, 4, rows)
    flipped = draw.random(rows) < 0.05 + 0.02 * wild
    columns = {f"q{i}": values[:, i] for i in range(10)}
    columns |= {f"wild{i}": (wild == i).astype(np.int64) for i in range(4)}
    columns |= {f"soil{i}": (soil == i).astype(np.int64) for i in range(40)}
    return split_rows(pd.DataFrame(columns).assign(label=np.where(flipped, 1 - label, label).astype("int8")))


def clicks(rows: int, trained: int | None = None) -> Split:
    """In the form of Criteo: ids by a power law in tables of 5 to 3,000, numbers with long tails. Log-odds
    are a sum of what each brings, as logistic regression takes it.
    """
    draw, tables = np.random.default_rng(1), (5, 9, 17, 50, 500, 3000)
    ids = [draw.zipf(1.6, rows) % count for count in tables]
    weights = [draw.normal(0, 0.6, count) for count in tables]
    n = [draw.lognormal(0, 2, rows), draw.integers(0, 53, rows), draw.normal(0, 1, rows)]
    gain = draw.exponential(100, rows) * (draw.random(rows) < 0.1)
    odds = sum(w[i] for w, i in zip(weights, ids, strict=True)) + 0.5 * np.log1p(n[0]) + 0.03 * n[1]
    odds = odds + 0.8 * (gain > 0) + 0.3 * n[2] - 3.5
    columns = {f"c{i}": each.astype(np.int64) for i, each in enumerate(ids)}
    columns |= {f"n{i}": each for i, each in enumerate([*n, gain])}
    label = (draw.random(rows) < 1 / (1 + np.exp(-odds))).astype("int8")
    return split_rows(pd.DataFrame(columns).assign(label=label), trained)


def split_rows(table: pd.DataFrame, trained: int | None = None) -> Split:
    """The first rows to train, five sixths unless it is said how many, and the others to test."""
    cut = trained or len(table) * 5 // 6
    return table.iloc[:cut], table.iloc[cut:]


MARRIED, FAMILY = "marital_status", ["marital_status", "relationship"]
SETS: dict[str, Callable[[Path], Split]] = {
    "adult_income": lambda source: adult(source, lambda t: t["income"] == ">50K", ["income"]),
    "adult_married": lambda source: adult(source, lambda t: t[MARRIED] == "Never-married", FAMILY),
    "adult_hours": lambda source: adult(source, lambda t: t["hours_per_week"] > 40, ["hours_per_week"]),
    "ml100k": ml100k,
    "numbers": lambda _: numbers(),
    "clicks": lambda _: clicks(96_000),
    "few_clicks": lambda _: clicks(24_000, 5_000),
}


def main(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Folder with adult/ and ml-100k/.")],
    seeds: Annotated[int, typer.Option(help="Runs of each data set.")] = 5,
    only: Annotated[str, typer.Option(help="Data sets alone, with commas between.")] = "",
) -> None:
    """Prints the table."""
    names = [name for name in only.split(",") if name] or list(SETS)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        split = SETS[name](source.expanduser())
        found = {"rows": len(split[0]), **of_scikit_learn(*split), "ours": of_raytrec(*split, seeds)}
        kept[name] = found
        print(" | ".join(line(name, found)), flush=True)
        keep(RESULTS, {key: kept[key] for key in SETS if key in kept})
    rows = [line(name, kept[name]) for name in SETS if name in kept]
    header = ["data", "rows", "logistic regression", "boosted trees", "raytrec", "seeds"]
    table = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    fill("docs/quality.md", "out_of_box", "\n".join(f"| {' | '.join(cells)} |" for cells in table))


def line(name: str, found: dict) -> list[str]:
    ours = found["ours"]
    spread = f" ± {statistics.stdev(ours):.4f}" if len(ours) > 1 else ""
    others = f"{found['logistic']:.4f}", f"{found['trees']:.4f}"
    return [name, f"{found['rows']:,}", *others, f"{statistics.mean(ours):.4f}{spread}", str(len(ours))]


def of_raytrec(trained: pd.DataFrame, tested: pd.DataFrame, seeds: int) -> list[float]:
    """The AUC of each seed."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        for name, rows in (("train", trained), ("test", tested)):
            (Path(place) / name).mkdir()
            rows.to_parquet(Path(place) / name / "a.parquet", index=False, row_group_size=16_384)
        Path(place, "schema.yaml").write_text(inspect(place).schema_yaml(), encoding="utf-8")
        places = [f"data.train={place}/train", f"data.test={place}/test"]
        with session_of(load_config(JOB, places)):
            for seed in range(seeds):
                own = [f"run.seed={seed}", f"run.dir={place}/{seed}", *QUIET]
                result = train(JOB, [*places, *own])
                found.append(float(result.metrics["eval.auc"]))
    return found


def of_scikit_learn(trained: pd.DataFrame, tested: pd.DataFrame) -> dict[str, float]:
    """The AUC of logistic regression and of boosted trees."""
    lists = [name for name in trained if isinstance(trained[name].iloc[0], list | np.ndarray)]
    names = [name for name in trained if name not in (*lists, "label")]
    kinds = [n for n in names if not pd.api.types.is_numeric_dtype(trained[n]) or is_id(n)]
    rest = [name for name in names if name not in kinds]
    inputs = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore"), kinds), (StandardScaler(), rest)
    )
    parts = [[inputs.fit_transform(trained)], [inputs.transform(tested)]]
    for name in lists:
        values = MultiLabelBinarizer(sparse_output=True)
        parts[0].append(values.fit_transform(trained[name]))
        parts[1].append(values.transform(tested[name]))
    linear_train, linear_test = (sparse.hstack([*map(sparse.csr_matrix, part)]).tocsr() for part in parts)
    linear = LogisticRegression(max_iter=2000).fit(linear_train, trained["label"])
    ordered = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    numbers_of = make_column_transformer((ordered, kinds), ("passthrough", rest))
    trees = HistGradientBoostingClassifier(random_state=0).fit(
        numbers_of.fit_transform(trained), trained["label"]
    )
    scores = linear.decision_function(linear_test), trees.decision_function(numbers_of.transform(tested))
    return dict(zip(("logistic", "trees"), (roc_auc_score(tested["label"], s) for s in scores), strict=True))


def is_id(name: str) -> bool:
    """Whether a column of whole numbers is of ids in these data sets."""
    return name.endswith("_id") or (name[0] == "c" and name[1:].isdigit())


if __name__ == "__main__":
    typer.run(main)
