"""Baselines for `make quality`: logistic regression, and the popularity of items in recent days.

Each function returns {seed: 0, figures, parameters, seconds} for a prepared data set. Metrics have the names
used in the table.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from raytrec.config.schema import Schema

DAY_S, DAYS, TOP = 86_400, (1, 3, 7, 14, 30, 100), 10


def measure_logistic(folder: Path, labels: dict[str, str], features: list[str]) -> dict[str, Any]:
    """Fit scikit-learn's logistic regression for each label, and return the metrics.

    The inputs are the dense columns, scaled to mean 0 and variance 1, and a column of 0 and 1 for each value
    of a feature with one id per row. The penalty is L2 with C = 1.

    Args:
        folder: Folder of the data set.
        labels: Name of a metric in the table (AUC on the test split) → label.
        features: Sparse features; empty: all features with one id per row, and the dense columns.
    """
    from sklearn.compose import make_column_transformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    began, schema = time.monotonic(), Schema.load(folder / "schema.yaml")
    train, test = (pq.read_table(folder / split).to_pandas() for split in ("train", "test"))
    single = [name for name in schema.sparse if not hasattr(train[name].iloc[0], "__len__")]
    inputs = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore"), features or single),
        (StandardScaler(), [] if features else schema.dense),
    )
    figures, parameters = {}, 0
    for name, label in labels.items():
        model = make_pipeline(inputs, LogisticRegression(max_iter=1000)).fit(train, train[label])
        figures[name] = float(roc_auc_score(test[label], model.decision_function(test)))
        parameters += model[-1].coef_.size + 1
    seconds = round(time.monotonic() - began, 1)
    return {"seed": 0, "figures": figures, "parameters": parameters, "seconds": seconds}


def measure_popularity(folder: Path, names: dict[str, str], features: list[str]) -> dict[str, Any]:
    """Rank items by the number of their users in the days before a row, and return the metrics.

    Items that the row's user has seen are excluded. The number of days is chosen from DAYS by NDCG on the
    valid split. Among items with equal counts, the item with more users at any earlier time comes first.

    Args:
        folder: Folder of the data set.
        names: Names of HR@10 and NDCG@10 in the table, in this order.
        features: Unused.
    """
    began = time.monotonic()
    parts = {name: pq.read_table(folder / name).to_pandas() for name in ("train", "valid", "test")}
    earlier = parts["train"][["user", "history", "history_time"]].explode(["history", "history_time"])
    earlier = earlier.dropna().set_axis(["user", "item", "time"], axis=1)
    met = pd.concat([earlier, *(part[["user", "item", "time"]] for part in parts.values())])
    met = met.drop_duplicates(["user", "item"]).astype(np.int64).sort_values("time")
    items, times = met["item"].to_numpy(), met["time"].to_numpy()
    chosen = max(DAYS, key=lambda days: _popular(parts["valid"], items, times, days)[1])
    figures = dict(zip(names, _popular(parts["test"], items, times, chosen), strict=True))
    seconds = round(time.monotonic() - began, 1)
    return {"seed": 0, "figures": figures, "parameters": 1, "seconds": seconds}


def _popular(rows: pd.DataFrame, items: np.ndarray, times: np.ndarray, days: int) -> tuple[float, float]:
    """Return HR@10 and NDCG@10 if items are ranked by their popularity in the days before each row."""
    rows = rows.sort_values("time")
    counts, ever, ranks = np.zeros(items.max() + 1), np.zeros(items.max() + 1), []
    firsts, ends = (np.searchsorted(times, rows["time"] - span) for span in (days * DAY_S, 0))
    first = end = 0
    for next_first, next_end, item, seen_items in zip(firsts, ends, rows["item"], rows["seen"], strict=True):
        np.add.at(counts, items[end:next_end], 1)
        np.add.at(ever, items[end:next_end], 1)
        np.subtract.at(counts, items[first:next_first], 1)
        first, end = next_first, next_end
        scores = counts + ever / (end + 1)
        scores[seen_items] = -1
        ranks.append((scores > scores[item]).sum())
    places = np.array(ranks)
    return float((places < TOP).mean()), float(((places < TOP) / np.log2(places + 2)).mean())
