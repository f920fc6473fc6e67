"""Plain users and candidates are read as all others are, and the user is repeated where that is faster."""

import time

import numpy as np
import pyarrow as pa
import pytest
from test_plain_rows import COLUMNS, PLAIN_VALUES, SCHEMA, TYPES

from raytrec.scoring.column_splits import MEASURED_CANDIDATES, ColumnSplit, find_min_candidates
from raytrec.scoring.plain_rows import make_plain_reader
from raytrec.scoring.request_rows import RowReader, to_table

USER_FEATURES = ("price", "user", "history")
USER = {name: PLAIN_VALUES[name] for name in USER_FEATURES}
CANDIDATES = [{n: v for n, v in PLAIN_VALUES.items() if n not in USER} | {"item id": i} for i in range(5)]


@pytest.fixture(scope="module")
def split():
    def make_reader(names):
        return RowReader(SCHEMA.select_features(names), (), ("tags", "history"), TYPES)

    others = {*SCHEMA.dense, *SCHEMA.sparse} - set(USER_FEATURES)
    readers = [make_reader(names) for names in (USER_FEATURES, others, {*USER_FEATURES, *others})]
    plain = [make_plain_reader(reader) for reader in readers]
    return ColumnSplit(frozenset(USER), *readers[:2], plain, (), (), None, ())


def to_values(rows):
    """Return the values of rows as lists."""
    return {name: rows.matrix(name).tolist() for name in rows.chunk.matrices}, [v.tolist() for v in rows.values()]


def test_plain_users_and_candidates_equal_tables(split):
    rows, user, same = split.read_plain(USER, 9, CANDIDATES, False)
    assert same is split
    tables = to_table(USER, split.users.columns), to_table(CANDIDATES, split.candidates.columns)
    expected_user, expected = split.read(*tables, [len(CANDIDATES)])
    assert to_values(user) == to_values(expected_user) and to_values(rows) == to_values(expected)
    general = split.candidates.read(tables[1])
    assert to_values(rows)[0]["ids"] == to_values(general)[0]["ids"]
    whole, no_user, no_split = split.read_plain(USER, 9, CANDIDATES, True)
    table = pa.table({name: [(row | USER)[name] for row in CANDIDATES] for name in COLUMNS}, schema=TYPES)
    assert (no_user, no_split) == (None, None) and to_values(whole) == to_values(split.plain[2].read_table(table, 9, 9))


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize(
    "user, candidates",
    [
        (USER | {"history": [1] * 10}, CANDIDATES),
        (USER | {"user": None}, CANDIDATES),
        (USER | {"user": np.int64(3)}, CANDIDATES),
        (USER | {"user": True}, CANDIDATES),
        (USER | {"user": 2**63}, CANDIDATES),
        (USER | {"price": float("nan")}, CANDIDATES),
        ({}, CANDIDATES),
        (USER, []),
        (USER, [3]),
        (USER, [CANDIDATES[0] | {"price": 1.0}]),
        (USER, [*CANDIDATES, CANDIDATES[0] | {"item id": "5"}]),
        (USER, [*CANDIDATES, {}]),
    ],
)
def test_other_users_and_candidates_are_not_plain(split, user, candidates, repeat):
    assert split.read_plain(user, 9, candidates, repeat) is None


def busy(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.mark.parametrize("row_s, expected", [(2e-4, 4), (2e-5, 16), (1e-9, MEASURED_CANDIDATES[-1])])
def test_repeating_the_user_is_chosen_where_it_is_faster(row_s, expected):
    seen = []

    def score(rows, repeat):
        seen.append(len(rows))
        busy(len(rows) * row_s if repeat else 2e-4)

    assert find_min_candidates(score, ["a", "b", "c"]) == expected
    assert max(seen) == expected
