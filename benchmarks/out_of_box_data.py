"""Data sets of out_of_box.py: public ones, and synthetic ones whose rows are drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn import datasets

ADULT = [
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation",
    "relationship", "race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country",
    "income",
]  # fmt: skip
Split = tuple[pd.DataFrame, pd.DataFrame]


def adult(source: Path, label: Callable[[pd.DataFrame], pd.Series], drop: list[str]) -> Split:
    """Read UCI Adult with a label computed from its columns, and without the columns in `drop`."""
    parts = []
    for name, skip in (("adult.data", 0), ("adult.test", 1)):
        table = pd.read_csv(source / "adult" / name, names=ADULT, skipinitialspace=True, skiprows=skip)
        table["income"] = table["income"].str.rstrip(".")
        parts.append(table.assign(label=label(table).astype("int8")).drop(columns=drop))
    return parts[0], parts[1]


def ml100k(source: Path) -> Split:
    """Read MovieLens-100K with the label "rating ≥ 4" and columns of users and films; a random fifth is the test."""
    folder = source / "ml-100k"
    users = pd.read_csv(folder / "u.user", sep="|", names=["user_id", "age", "gender", "occupation", "zip"])
    films = pd.read_csv(folder / "u.item", sep="|", encoding="latin1", header=None)
    genres = [np.flatnonzero(row).tolist() for row in films.iloc[:, 5:].to_numpy()]
    rows = pd.read_csv(folder / "u.data", sep="\t", names=["user_id", "item_id", "rating", "time"])
    rows = rows.merge(users).merge(pd.DataFrame({"item_id": films[0], "genres": genres}))
    rows = rows.assign(label=(rows["rating"] >= 4).astype("int8")).drop(columns=["rating", "time"])
    order = np.random.default_rng(0).permutation(len(rows))
    return rows.iloc[order[:80_000]], rows.iloc[order[80_000:]]


def seen_films(source: Path, rows: int = 120_000) -> Split:
    """Read MovieLens-1M's pairs of a user and a rated film (label 1), and add two random films for each (label 0)."""
    draw, pairs = np.random.default_rng(3), pd.read_parquet(source / "ml-1m" / "pairs.parquet")
    pairs = pairs.set_axis(["user_id", "item_id"], axis=1).astype("int64")
    seen = pairs.iloc[draw.permutation(len(pairs))[: rows // 3]]
    films = draw.choice(pairs["item_id"].unique(), 2 * len(seen))
    drawn = pd.DataFrame({"user_id": np.tile(seen["user_id"], 2), "item_id": films})
    table = pd.concat([seen.assign(label=np.int8(1)), drawn.assign(label=np.int8(0))])
    return split_rows(table.iloc[draw.permutation(len(table))])


def built_in(name: str, least: int) -> Split:
    """Read a scikit-learn data set, with label 1 for targets ≥ `least`, and add a column of 3 ids that are noise."""
    found = getattr(datasets, f"load_{name}")(as_frame=True)
    table = found.data.set_axis([f"v{i}" for i in range(found.data.shape[1])], axis=1)
    table = table.assign(c0=np.arange(len(table)) % 3, label=(found.target >= least).astype("int8"))
    return split_rows(table.iloc[np.random.default_rng(0).permutation(len(table))], len(table) * 2 // 3)


def numbers(rows: int = 60_000) -> Split:
    """Draw rows like those of covertype: ten quantities of very different scales, and 44 indicators."""
    draw = np.random.default_rng(1)
    values, label = datasets.make_classification(
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


def clicks(rows: int, trained: int | None = None, seed: int = 1) -> Split:
    """Draw rows like those of Criteo: power-law ids, numbers with long tails, and linear log-odds."""
    draw, tables = np.random.default_rng(seed), (5, 9, 17, 50, 500, 3000)
    ids = [draw.zipf(1.6, rows) % count for count in tables]
    weights = [draw.normal(0, 0.6, count) for count in tables]
    n = [draw.lognormal(0, 2, rows), draw.integers(0, 53, rows), draw.normal(0, 1, rows)]
    gain = draw.exponential(100, rows) * (draw.random(rows) < 0.1)
    odds = sum(w[i] for w, i in zip(weights, ids, strict=True)) + 0.5 * np.log1p(n[0]) + 0.03 * n[1]
    odds = odds + 0.8 * (gain > 0) + 0.3 * n[2] - 3.5
    columns = {f"c{i}": each.astype(np.int64) for i, each in enumerate(ids)}
    columns |= {f"n{i}": each for i, each in enumerate([*n, gain])}
    return split_rows(labelled(columns, odds, draw), trained)


def rare_label(rows: int = 80_000) -> Split:
    """Draw rows of which 0.5 % are positive, with linear log-odds; 40 % of the numbers are null."""
    draw, tables = np.random.default_rng(5), (4, 12, 60, 300)
    n = draw.normal(0, 1, (rows, 12))
    ids = [draw.integers(0, count, rows) for count in tables]
    odds = n @ draw.normal(0, 0.25, 12) - 5.75
    odds = odds + sum(draw.normal(0, 0.35, count)[i] for count, i in zip(tables, ids, strict=True))
    values = np.where(draw.random(n.shape) < 0.4, np.nan, n * draw.lognormal(0, 2, 12))
    columns = {f"n{i}": values[:, i] for i in range(12)} | {f"c{i}": each for i, each in enumerate(ids)}
    return split_rows(labelled(columns, odds, draw), rows * 3 // 4)


def rare_ids(rows: int = 60_000) -> Split:
    """Draw rows with four id columns, two of which contain mostly rare ids, and a number; log-odds are linear."""
    draw, tables = np.random.default_rng(6), (20_000, 8_000, 50, 12)
    ids = [(draw.pareto(0.8, rows) * 50).astype(np.int64) % count for count in tables[:2]]
    ids += [draw.integers(0, count, rows) for count in tables[2:]]
    columns = {f"c{i}": each for i, each in enumerate(ids)} | {"n0": draw.normal(0, 1, rows)}
    odds = sum(draw.normal(0, 0.7, count)[i] for count, i in zip(tables, ids, strict=True))
    return split_rows(labelled(columns, odds + 0.3 * columns["n0"] - 1.5, draw))


def contexts(rows: int = 72_000) -> Split:
    """Draw rows like those of Frappe: apps that people used in a context, and two random apps for each."""
    draw, people, apps, used = np.random.default_rng(7), 900, 4000, rows // 3
    of_people, of_apps = draw.normal(0, 1, (people, 6)), draw.normal(0, 1, (apps, 6))
    of_hours, popular = draw.normal(0, 0.5, (24, 6)), -1.1 * np.log(np.arange(1, apps + 1))
    user = (draw.pareto(1.2, used) * 60).astype(np.int64) % people
    context = {"c2": draw.integers(0, 7, used), "c3": draw.integers(0, 24, used)}
    context |= {"c4": draw.integers(0, 9, used), "c5": draw.zipf(1.5, used) % 80}
    app = np.empty(used, np.int64)
    for first in range(0, used, 1000):
        part = slice(first, first + 1000)
        taste = (1.3 * of_people[user[part]] + of_hours[context["c3"][part]]) @ of_apps.T
        app[part] = (popular + taste + draw.gumbel(size=taste.shape)).argmax(1)
    columns = {"c0": np.tile(user, 3), "c1": np.concatenate([app, draw.integers(0, apps, 2 * used)])}
    columns |= {name: np.tile(values, 3) for name, values in context.items()}
    table = pd.DataFrame(columns).assign(label=np.repeat([1, 0, 0], used).astype("int8"))
    return split_rows(table.iloc[draw.permutation(len(table))])


def census(rows: int = 90_000) -> Split:
    """Draw rows like census income: 14 columns of text, numbers that are mostly 0, and 2 % positives."""
    draw, sizes = np.random.default_rng(8), (9, 52, 47, 17, 7, 24, 15, 5, 10, 38, 8, 6, 43, 3)
    age, group = draw.integers(0, 90, rows), draw.integers(0, 6, rows)
    columns: dict[str, np.ndarray] = {"age": age}
    odds = 2.2 * np.exp(-(((age - 48) / 18) ** 2)) - 6.4
    for i, count in enumerate(sizes):
        kind = np.minimum(draw.zipf(1.5, rows) + group * (i % 3) - 1, 10**6) % count
        odds = odds + draw.normal(0, 0.45, count)[kind]
        columns[f"text{i}"] = np.array([f"kind {i}-{j}" for j in range(count)])[kind]
    gain = np.round(draw.exponential(4000, rows)) * (draw.random(rows) < 0.05)
    weeks = np.where(draw.random(rows) < 0.45, 0, draw.choice([*[52] * 8, *range(1, 52, 5)], rows))
    odds = odds + 1.6 * (weeks > 40) + np.log1p(gain) / 4 + 0.8 * (group == 3) * (weeks > 40)
    hourly = np.where(draw.random(rows) < 0.9, 0, draw.integers(300, 2500, rows))
    stocks = np.round(draw.exponential(900, rows)) * (draw.random(rows) < 0.1)
    columns |= {"gain": gain, "weeks": weeks, "hourly": hourly, "stocks": stocks}
    return split_rows(labelled(columns, odds, draw), rows * 2 // 3)


def wide_numbers(rows: int = 24_000, count: int = 150) -> Split:
    """Draw rows of correlated numbers, a third of them with linear effects, and an uninformative id."""
    draw = np.random.default_rng(9)
    values = draw.normal(0, 1, (rows, 20)) @ draw.normal(0, 0.3, (20, count)) + draw.normal(0, 1, (rows, count))
    odds = values @ (draw.normal(0, 1, count) * (draw.random(count) < 0.3)) * 0.14 - 1
    columns = {f"q{i}": values[:, i] * 10.0 ** draw.integers(-3, 4) for i in range(count)}
    columns |= {"c0": draw.integers(0, 20, rows)}
    return split_rows(labelled(columns, odds, draw), rows * 2 // 3)


def labelled(columns: dict[str, np.ndarray], odds: np.ndarray, draw: np.random.Generator) -> pd.DataFrame:
    """Return a table of the columns, with labels drawn according to their log-odds."""
    label = draw.random(len(odds)) < 1 / (1 + np.exp(-odds))
    return pd.DataFrame(columns).assign(label=label.astype("int8"))


def split_rows(table: pd.DataFrame, trained: int | None = None) -> Split:
    """Split rows into the first `trained` (default: five sixths) for training and the others for the test."""
    cut = trained or len(table) * 5 // 6
    return table.iloc[:cut], table.iloc[cut:]


MARRIED, FAMILY = "marital_status", ["marital_status", "relationship"]
SETS: dict[str, Callable[[Path], Split]] = {
    "adult_income": lambda source: adult(source, lambda t: t["income"] == ">50K", ["income"]),
    "adult_married": lambda source: adult(source, lambda t: t[MARRIED] == "Never-married", FAMILY),
    "adult_hours": lambda source: adult(source, lambda t: t["hours_per_week"] > 40, ["hours_per_week"]),
    "ml100k": ml100k,
    "seen_films": seen_films,
    "cancer": lambda _: built_in("breast_cancer", 1),
    "digits": lambda _: built_in("digits", 5),
    "numbers": lambda _: numbers(),
    "wide_numbers": lambda _: wide_numbers(),
    "census": lambda _: census(),
    "contexts": lambda _: contexts(),
    "rare_label": lambda _: rare_label(),
    "rare_ids": lambda _: rare_ids(),
    "clicks": lambda _: clicks(96_000),
    "clicks_5000": lambda _: clicks(24_000, 5_000),
    "clicks_5000_b": lambda _: clicks(25_000, 5_000, seed=12),
    "clicks_1000": lambda _: clicks(21_000, 1_000, seed=11),
}
