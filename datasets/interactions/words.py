"""Text files with a user and its items per line.

1 17 4 23          S3-Rec: items in the order of time. LightGCN: train.txt and test.txt, without order
2 5 8
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from raytrec_datasets.interactions.events import TRAIN, Gathering

from raytrec.common.errors import DataError

BLOCK_BYTES = 1 << 24
NUMBER = r"^[0-9]{1,18}$"


def read(files: list[Path], gathering: Gathering, split: int = TRAIN) -> dict[str, bool]:
    """All files, one after the other; the items of a line are in the order of time."""
    for path in files:
        for users, items in lines(path):
            gathering.add(users, items, split=split)
    return {"of_all": False}


def lines(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    """(the user of each item, items), int64 both, some 16 MiB of text at a time.

    A line with a user alone has no items.

    Raises:
        DataError: a line is empty, or has something other than numbers; names file and line.
    """
    first = 1
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES) + file.readline():
            text = block.decode("utf-8", "replace").removesuffix("\n").split("\n")
            split = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pa.array(text, pa.large_string())))
            words, ends = split.flatten(), split.offsets.to_numpy()
            if bad := _first_bad(words):
                line = int(np.searchsorted(ends, bad - 1, side="right")) - 1
                raise DataError(
                    f"line {first + line} has {words[bad - 1].as_py()!r}",
                    where=f"{path}: {text[line][:60]!r}",
                    expected="a user and items in each line, whole numbers with spaces between them",
                )
            numbers = words.cast(pa.int64()).to_numpy()
            starts = ends[:-1]
            users = np.repeat(numbers[starts], np.diff(ends) - 1)
            is_item = np.ones(len(numbers), bool)
            is_item[starts] = False
            yield pa.array(users), pa.array(numbers[is_item])
            first += len(text)


def _first_bad(words: pa.Array) -> int:
    """The place of the first word that is not a number, from 1; 0: all are."""
    return pc.index(pc.match_substring_regex(words, NUMBER), pa.scalar(False)).as_py() + 1
