"""Lookup shares of the most frequent ids, and schema statistics that the planner uses."""

import numpy as np
import pyarrow as pa
import pytest
import yaml
from inspected import inspect_columns

from raytrec.config.schema import Schema
from raytrec.inspection import sketches
from raytrec.inspection.sketches import HotIds


@pytest.mark.parametrize("most", [65_536, 300])
def test_hot_id_shares_match_an_exact_count(most, monkeypatch):
    monkeypatch.setattr(sketches, "MAX_ID_COUNTERS", most)
    monkeypatch.setattr(sketches, "TOP_ID_COUNTS", (1, 10, 100))
    made = np.random.default_rng(0)
    drawn = np.minimum(made.zipf(1.4, 60_000), 5_000).astype(np.uint64)
    found = HotIds()
    for part in np.array_split(drawn, 30):
        found.add(*np.unique(part, return_counts=True))
    counts = np.sort(np.unique(drawn, return_counts=True)[1])[::-1]
    expected = [counts[:n].sum() / len(drawn) for n in (1, 10, 100)]
    assert found.shares() == pytest.approx(expected, rel=1e-4 if most > 5_000 else 0.01)


def test_schema_includes_id_statistics(tmp_path):
    made, rows = np.random.default_rng(1), 2_000
    lengths = made.integers(0, 5, rows)
    ids = made.integers(0, 40, lengths.sum())
    bags = pa.ListArray.from_arrays(np.append(0, lengths.cumsum()).astype(np.int32), ids)
    user = made.integers(0, 50, rows)
    user[: rows // 2] = 7
    found = inspect_columns(tmp_path, {"user_id": user, "tags": bags})
    schema = Schema.parse(yaml.safe_load(found.schema_yaml()), "text")
    tags, of_user = schema.statistics["tags"], schema.statistics["user_id"]
    assert tags.mean_length == pytest.approx(lengths.mean(), rel=1e-4)
    assert (tags.p99_length, tags.max_length, tags.distinct) == (4, 4, 40)
    assert (of_user.mean_length, of_user.p99_length, of_user.distinct) == (1, 1, 50)
    assert of_user.hottest == pytest.approx(
        [np.sort(np.bincount(user))[::-1][:n].sum() / rows for n in (1, 10)], abs=1e-4
    )
