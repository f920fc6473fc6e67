"""The layout of a source, and its Interactions.

FILE.parquet, or a folder of them    columns of users, items and times; lists of items, too, in their order
FILE.csv, FILE.tsv                   with a line of names (tables.py; also compressed: FILE.csv.gz)
FILE.inter                           the same with tabs and name:type, as RecBole has it
FILE.txt                             a user and its items in the order of time in each line, as of S3-Rec
a folder of train, valid and test    files or folders of any of these, named by their split; .txt has no order
                                     there (LightGCN)
NAME.train.rating, or its folder     user, item, rating, time, with NAME.valid.rating, NAME.test.rating and
                                     NAME.test.negative, as NCF has them
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from raytrec_datasets.interactions import ncf, tables, words
from raytrec_datasets.interactions.candidates import read_candidates
from raytrec_datasets.interactions.events import (
    TEST,
    TRAIN,
    VALID,
    VALID_NAMES,
    Columns,
    Gathering,
    Interactions,
)

from raytrec.common.errors import ConfigError, DataError

SUFFIXES = (".parquet", ".csv", ".tsv", ".csv.gz", ".tsv.gz", ".inter", ".txt")
EXPECTED = (
    "FILE.parquet or a folder of them, FILE.csv, FILE.tsv, FILE.inter, FILE.txt (a user and its items in "
    "each line), a folder with train, valid and test of one of these, or NAME.train.rating"
)
SPLITS = {"train": TRAIN, "training": TRAIN, "test": TEST} | dict.fromkeys(VALID_NAMES, VALID)
# The data set's name, the split and the number of the file: clicks.train, test-00000-of-00002
SPLIT = re.compile(rf"(?:(.*)[._-])?({'|'.join(SPLITS)})(?:[._-]?\d+(?:-of-\d+)?)?", re.IGNORECASE)


def read_interactions(source: Path, columns: Columns, candidates: Path | None) -> Interactions:
    """Reads a source in any of the layouts.

    Args:
        candidates: a file of what is ranked for each user of the test.

    Raises:
        ConfigError: a column that the source does not have.
        DataError: no known layout, or a line or row that is not what it should be; names file and line.
    """
    if not source.exists():
        raise DataError("there is no such file or folder", where=str(source), expected=EXPECTED)
    gathering = Gathering()
    facts = _read(source, columns, gathering)
    if candidates and "candidates" in facts:
        raise ConfigError(
            "the source has its own candidates", where=f"--candidates {candidates}", do="leave it out"
        )
    if candidates:
        facts["candidates"] = read_candidates(candidates, gathering, columns)
    return gathering.finish(str(source), **facts)


def _read(source: Path, columns: Columns, gathering: Gathering) -> dict[str, Any]:
    """Adds everything; what else is known of it, as of Interactions."""
    if train := ncf.train_file(source):
        return ncf.read(train, gathering)
    facts: dict[str, Any] = {}
    splits = find_splits(source)
    for split, files in splits.items():
        facts = _read_files(files, columns, gathering, split)
    if splits:
        return facts | ({"in_order": False} if suffix_of(splits[TRAIN][0]) == ".txt" else {})
    files = sorted(source.rglob("*.parquet")) if source.is_dir() else [source]
    if not files or not suffix_of(files[0]):
        raise DataError("no layout of interactions that is known", where=str(source), expected=EXPECTED)
    return _read_files(files, columns, gathering)


def _read_files(
    files: list[Path], columns: Columns, gathering: Gathering, split: int = TRAIN
) -> dict[str, bool]:
    """Adds files of one layout."""
    if suffix_of(files[0]) == ".txt":
        return words.read(files, gathering, split)
    is_parquet = suffix_of(files[0]) == ".parquet"
    return tables.read(
        files, tables.parquet_batches if is_parquet else tables.csv_batches, columns, gathering, split
    )


def suffix_of(path: Path) -> str | None:
    """What decides how a file is read; None: nothing."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def find_splits(source: Path) -> dict[int, list[Path]]:
    """The files of train, valid and test in a folder that has them, in this order; {}: it has none.

    They are files or folders named by their split, such as train.csv, clicks.valid.inter, test-0001.parquet
    or val/; valid may be absent.

    Raises:
        DataError: train alone, or splits of several data sets.
    """
    found: dict[tuple[str, str], dict[int, list[Path]]] = {}
    for place in sorted(source.iterdir()) if source.is_dir() else ():
        inside = place.rglob("*") if place.is_dir() else [place]
        files = sorted(path for path in inside if path.is_file() and suffix_of(path))
        suffixes = {suffix_of(path) for path in files}
        stem = place.name if place.is_dir() else place.name.removesuffix(suffix_of(place) or "")
        if (named := SPLIT.fullmatch(stem)) and len(suffixes) == 1:
            of_set = found.setdefault((named[1] or "", *suffixes), {})
            of_set.setdefault(SPLITS[named[2].lower()], []).extend(files)
    found = {key: splits for key, splits in found.items() if TRAIN in splits}
    if len(found) > 1:
        raise DataError(
            "train, valid and test of several data sets are there",
            where=f"{source}: {', '.join(str(splits[TRAIN][0].name) for splits in found.values())}",
            expected="files of one data set, in one format",
            do="give each data set a folder, or name one file",
        )
    for (_, suffix), splits in found.items():
        if TEST in splits:
            return dict(sorted(splits.items()))
        if VALID in splits or suffix != ".parquet":
            raise DataError(
                f"{splits[TRAIN][0].name} is there, and a file of the test is missing",
                where=str(source),
                expected="train and test, and valid if there is one, in files or folders of these names",
                do="name the file alone, if raytrec is to divide it",
            )
    return {}
