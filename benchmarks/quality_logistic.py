"""Logistic regression on a prepared data set, for a row of `make quality` beside the models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from raytrec.config.schema import Schema


def measure_logistic(folder: Path, labels: dict[str, str], features: list[str]) -> dict[str, Any]:
    """{seed: 0, figures, parameters, seconds} of scikit-learn's, one model for each label.

    It has each dense column at mean 0 and variance 1, and a column of 0 and 1 for each value of a feature
    with one id a row; L2 penalty, C = 1.

    Args:
        labels: what the table calls a figure, the AUC on the test split → its label.
        features: sparse features; none: all that have one id a row, and the dense columns.
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
