"""Numbers of rows that tables get: which values share a row, and what becomes of ids that are not seen."""

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from any_parquet import write
from reading import batch_of, read

from raytrec.data.read_plan import ReadPlan
from raytrec.inspection.propose import inspect

ROWS = 4000


def shared_rows(folder, schema, values, feature="word", among=None):
    """Return the share of a column's values that share a row with another value that is more frequent.

    The rows are read as a run reads them, in the order of the file.

    Args:
        among: The values that are compared; default: all.
    """
    batch = batch_of(*read(folder, ReadPlan(schema)))
    rows = batch.sparse[feature].values().tolist()
    pairs, counts = sorted(set(zip(rows, values, strict=True))), Counter(values)
    lost = 0
    for _, of_row in itertools.groupby(pairs, key=lambda pair: pair[0]):
        together = [counts[value] for _, value in of_row if among is None or value in among]
        lost += sum(together) - max(together, default=0)
    return lost / len(values)


def drawn_words(kind, distinct, seed):
    """Return ROWS values of a kind: zipf has few frequent ones, even has equally frequent ones."""
    made = np.random.default_rng(seed)
    words = [f"{kind} {made.integers(1e9)} {i}" for i in range(distinct)]
    places = made.zipf(1.3, ROWS) % distinct if kind == "zipf" else made.permutation(ROWS) % distinct
    return [words[place] for place in places]


@pytest.mark.parametrize("kind,distinct", [("even", 7), ("even", 16), ("zipf", 60), ("even", 400)])
@pytest.mark.parametrize("seed", range(3))
def test_no_two_values_of_small_text_columns_share_a_row(tmp_path, kind, distinct, seed):
    values = drawn_words(kind, distinct, seed)
    write(tmp_path / "a.parquet", {"label": np.arange(ROWS) % 2, "word": values})
    found = inspect(str(tmp_path))
    assert shared_rows(tmp_path, found.schema, values) == 0
    assert found.schema.tables["word"].rows <= 65_536
    assert "each of its values has its own row" in found.schema_yaml()


def test_sizes_stay_as_they_are_without_collisions(tmp_path):
    write(tmp_path / "a.parquet", {"label": np.arange(90) % 2, "word": ["yes", "no", "maybe"] * 30})
    assert inspect(str(tmp_path)).schema.tables["word"].rows == 100


def test_frequent_values_of_large_text_columns_do_not_share_rows(tmp_path):
    frequent = [f"frequent {i}" for i in range(300)]
    values = frequent * 100 + [f"rare {i}" for i in range(1500)]
    write(tmp_path / "a.parquet", {"label": np.arange(len(values)) % 2, "word": values})
    found = inspect(str(tmp_path))
    assert found.schema.tables["word"].rows <= 1.1 * 10 * 1800
    lost = shared_rows(tmp_path, found.schema, values)
    assert 0 < lost <= 1500 / len(values)
    assert shared_rows(tmp_path, found.schema, values, among=set(frequent)) == 0
    assert f"values of {100 * lost:.2g} % of the lookups share a row with more frequent ones" in (
        found.schema_yaml()
    )


@pytest.mark.parametrize("low", [-(2**62), 0, 10**7])
def test_integers_that_are_hashed_have_rows_of_their_own(tmp_path, low):
    made = np.random.default_rng(low % 97)
    ids = made.choice(np.unique(made.integers(low, 2**62, 200)), ROWS)
    write(tmp_path / "a.parquet", {"label": np.arange(ROWS) % 2, "word_id": ids})
    schema = inspect(str(tmp_path)).schema
    assert schema.tables["word"].out_of_range == "hash"
    assert shared_rows(tmp_path, schema, ids.tolist(), "word_id") == 0


def test_features_that_share_a_table_share_no_rows(tmp_path):
    made = np.random.default_rng(8)
    words = [f"{i} {i * i}" for i in range(300)]
    home, work = (made.choice(part, ROWS) for part in (words[:200], words[20:200]))
    write(tmp_path / "a.parquet", {"label": np.arange(ROWS) % 2, "home": home, "work": work})
    schema = inspect(str(tmp_path)).schema
    assert schema.sparse["home"].table == schema.sparse["work"].table
    batch = batch_of(*read(tmp_path, ReadPlan(schema)))
    rows = np.concatenate([batch.sparse[name].values().numpy() for name in ("home", "work")])
    assert len(set(rows.tolist())) == len({*home, *work})


def test_bytes_are_counted_as_they_are_hashed(tmp_path):
    values = [f"{i % 300}".encode() for i in range(ROWS)]
    for kind in (pa.binary(), pa.large_binary()):
        write(tmp_path / "a.parquet", {"label": np.arange(ROWS) % 2, "word": pa.array(values, kind)})
        assert shared_rows(tmp_path, inspect(str(tmp_path)).schema, values) == 0
