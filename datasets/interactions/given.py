"""Candidates from a file: what is ranked for each user of the test beside its own items.

FILE.parquet      a column of users and one of items or lists of them, named as the source's
FILE.txt          a user and items in each line, as S3-Rec's NAME_sample.txt
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from raytrec_datasets.interactions import tables, words
from raytrec_datasets.interactions.events import Columns, Gathering, Pairs

from raytrec.common.errors import ConfigError, DataError


def read_candidates(path: Path, gathering: Gathering, columns: Columns) -> Pairs:
    """The candidates of a file, in the ids of a source that has been read; of other users there are none.

    Items that the source does not have become new ones.

    Raises:
        ConfigError: no layout of candidates.
        DataError: a line or row is not what it should be; names file and line.
    """
    users, items = [], []
    kinds = gathering.users.keys.type, gathering.items.keys.type
    for user_keys, item_keys in _parts(path, columns):
        try:
            user_keys, item_keys = user_keys.cast(kinds[0]), item_keys.cast(kinds[1])
        except pa.ArrowInvalid as error:
            raise DataError(
                f"its users or items are none of the source's: {error}", where=f"--candidates {path}"
            ) from None
        user = gathering.users.known_ids(user_keys)
        users.append(user[user >= 0])
        items.append(gathering.items.ids(item_keys.filter(pa.array(user >= 0))))
    if not sum(map(len, users)):
        raise DataError("none of its users are the source's", where=f"--candidates {path}")
    return Pairs(np.concatenate(users), np.concatenate(items))


def _parts(path: Path, columns: Columns) -> Iterator[tuple[pa.Array, pa.Array]]:
    if not path.is_file():
        raise DataError("there is no such file", where=f"--candidates {path}")
    if path.suffix == ".parquet":
        for users, items, _ in tables.parquet_batches(path, Columns(columns.user, columns.item)):
            yield users, items
    elif path.suffix == ".txt":
        yield from words.lines(path)
    else:
        raise ConfigError(
            f"no layout of candidates that is known: {path.name}",
            where="--candidates",
            expected="FILE.parquet, or FILE.txt with a user and items in each line",
        )
