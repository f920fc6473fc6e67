"""Files of Neural Collaborative Filtering (He et al., 2017).

NAME.train.rating      user, item, rating, time, with tabs between them
NAME.test.rating       the pair of each user that was left out
NAME.valid.rating      pairs of the validation, if it is there
NAME.test.negative     (user,item) of that pair, then the items that it is ranked with
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from raytrec_datasets.interactions.events import TEST, TRAIN, VALID, VALID_NAMES, Gathering, Pairs

from raytrec.common.errors import DataError

TRAIN_END, TEST_END, NEGATIVE_END = ".train.rating", ".test.rating", ".test.negative"
PAIR = re.compile(r"\((\d+),(\d+)\)")


def train_file(source: Path) -> Path | None:
    """NAME.train.rating, given itself or by its folder; None: the source is something else."""
    found = sorted(source.glob(f"*{TRAIN_END}")) if source.is_dir() else [source]
    return found[0] if found and found[0].name.endswith(TRAIN_END) else None


def read(train: Path, gathering: Gathering) -> dict[str, Any]:
    """All files of a name; users of the test have the candidates of NAME.test.negative, if it is there.

    Raises:
        DataError: a line is not what it should be, or the files disagree.
    """
    name = train.name.removesuffix(TRAIN_END)
    test, negative = train.with_name(name + TEST_END), train.with_name(name + NEGATIVE_END)
    places = [train.with_name(f"{name}.{word}.rating") for word in VALID_NAMES]
    valid = next((path for path in places if path.is_file()), None)
    parts = {TRAIN: _ratings(train)} | ({VALID: _ratings(valid)} if valid else {}) | {TEST: _ratings(test)}
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
        DataError: a line is not a user with candidates; names it.
    """
    found: dict[int, list[int]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        first, *others = line.split("\t")
        pair = PAIR.fullmatch(first.strip())
        if not pair or not others or not all(item.strip().isdecimal() for item in others):
            raise DataError(
                f"line {number} is not a user with candidates",
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
        table = csv.read_csv(
            path, csv.ReadOptions(autogenerate_column_names=True), csv.ParseOptions(delimiter="\t")
        )
    except (OSError, pa.ArrowInvalid) as error:
        raise _broken(path, str(error)) from None
    columns = [table.column(place) for place in (0, 1, 3) if place < table.num_columns]
    if len(columns) < 2 or any(column.type != pa.int64() or column.null_count for column in columns):
        raise _broken(path, "a user, item or time is not a whole number")
    return np.stack([column.to_numpy() for column in columns], axis=1)


def _broken(path: Path, why: str) -> DataError:
    """The error of a file, with its first line that is none of the layout's."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                fields = line.rstrip("\n").split("\t")
                named = [fields[place] for place in (0, 1, 3) if place < len(fields)]
                if len(named) < 2 or not all(field.isdecimal() for field in named):
                    where = f"{path}, line {number}: {line[:60]!r}"
                    return DataError("the line is none of this layout", where=where, expected=_EXPECTED)
    return DataError(f"the file does not parse: {why}", where=str(path), expected=_EXPECTED)


_EXPECTED = "user, item, rating and time in each line, whole numbers with tabs between them"
