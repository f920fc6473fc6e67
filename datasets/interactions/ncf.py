"""He et al.'s files (Neural Collaborative Filtering, 2017): leave-one-out with given candidates.

NAME.train.rating      user, item, rating, time, with tabs between them
NAME.test.rating       the pair of each user that was left out
NAME.test.negative     (user,item) of that pair, then the items that it is ranked with
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from raytrec_datasets.interactions.events import TEST, TRAIN, Gathering, Pairs

from raytrec.common.errors import DataError

TRAIN_END, TEST_END, NEGATIVE_END = ".train.rating", ".test.rating", ".test.negative"
PAIR = re.compile(r"\((\d+),(\d+)\)")


def train_file(source: Path) -> Path | None:
    """NAME.train.rating, given itself or by its folder; None: the source is something else."""
    found = sorted(source.glob(f"*{TRAIN_END}")) if source.is_dir() else [source]
    return found[0] if found and found[0].name.endswith(TRAIN_END) else None


def read(train: Path, gathering: Gathering) -> dict[str, Any]:
    """The three files; users of the test have the candidates of NAME.test.negative, if it is there.

    Raises:
        DataError: a line is not what it should be, or the files disagree.
    """
    name = train.name.removesuffix(TRAIN_END)
    test, negative = train.with_name(name + TEST_END), train.with_name(name + NEGATIVE_END)
    parts = {TRAIN: _ratings(train), TEST: _ratings(test)}
    timed = all(part.shape[1] == 3 for part in parts.values())
    for split, part in parts.items():
        times = pa.array(part[:, 2]) if timed else None
        gathering.add(pa.array(part[:, 0]), pa.array(part[:, 1]), times, split)
    facts: dict[str, Any] = {"in_order": timed, "of_all": False}
    if negative.is_file():
        lists = read_negatives(negative)
        check_same(dict(parts[TEST][:, :2].tolist()), {u: items[0] for u, items in lists.items()}, test)
        facts["candidates"] = as_pairs(lists, gathering)
    return facts


def as_pairs(lists: dict[int, list[int]], gathering: Gathering) -> Pairs:
    """Candidates of users, keys both, in the ids of a source."""
    users = np.repeat(list(lists), [len(items) for items in lists.values()])
    items = np.concatenate([np.array(items) for items in lists.values()])
    return Pairs(gathering.users.ids(pa.array(users)), gathering.items.ids(pa.array(items)))


def read_negatives(path: Path) -> dict[int, list[int]]:
    """NAME.test.negative: user → its candidates, each once; the first is the one that was left out.

    Raises:
        DataError: a line is no user with candidates; names it.
    """
    found: dict[int, list[int]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        first, *others = line.split("\t")
        pair = PAIR.fullmatch(first.strip())
        if not pair or not others or not all(item.strip().isdecimal() for item in others):
            raise DataError(
                f"line {number} is no user with candidates",
                where=str(path),
                expected="(user,item) and items, with tabs between them",
            )
        found[int(pair[1])] = list(dict.fromkeys([int(pair[2]), *map(int, others)]))
    if not found:
        raise DataError("there are no users", where=str(path), expected="a line for each user")
    return found


def check_same(rated: dict[int, int], left_out: dict[int, int], path: Path) -> None:
    """Whether NAME.test.rating leaves out the pairs of NAME.test.negative.

    Raises:
        DataError: it does not; names a user.
    """
    users = rated.keys() | left_out.keys()
    if odd := sorted(user for user in users if rated.get(user) != left_out.get(user)):
        raise DataError(
            f"user {odd[0]} has item {rated.get(odd[0])} here, and {left_out.get(odd[0])} in {NEGATIVE_END}",
            where=str(path),
            expected="the same pairs in both files",
        )


def _ratings(path: Path) -> np.ndarray:
    """User, item and, if it is there, time of each line: int64 [n, 2 or 3].

    Raises:
        DataError: the file is missing, or a line has something else; names it.
    """
    try:
        frame = pd.read_csv(path, sep="\t", header=None, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise DataError(f"the file does not parse: {error}", where=str(path), expected=_EXPECTED) from None
    frame = frame[[0, 1, *([3] if frame.shape[1] > 3 else [])]] if frame.shape[1] > 1 else frame
    numbers = frame.apply(lambda column: column.str.fullmatch("[0-9]{1,18}")).fillna(False)
    if frame.shape[1] < 2 or not numbers.to_numpy().all():
        line = int(np.argmin(numbers.to_numpy().all(axis=1))) if frame.shape[1] > 1 else 0
        raise DataError(f"line {line + 1} is no such line", where=str(path), expected=_EXPECTED)
    return frame.to_numpy().astype(np.int64)


_EXPECTED = "user, item, rating and time in each line, whole numbers with tabs between them"
