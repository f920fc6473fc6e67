"""A source's layout, by its name, and the Interactions that it holds.

FILE.parquet, or a folder of them    columns of users, items and times; lists of items, too, in their order
FILE.csv, FILE.tsv                   with a line of names (tables.py; also compressed: FILE.csv.gz)
FILE.txt                             a user and its items in the order of time in each line, as of S3-Rec
a folder with train.txt, test.txt    the same without order, as LightGCN has them
NAME.train.rating, or its folder     user, item, rating, time, with NAME.test.rating and NAME.test.negative
                                     beside it, as NCF has them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytrec_datasets.interactions import ncf, tables, words
from raytrec_datasets.interactions.events import Columns, Gathering, Interactions
from raytrec_datasets.interactions.given import read_candidates

from raytrec.common.errors import ConfigError, DataError

TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
EXPECTED = (
    "FILE.parquet or a folder of them, FILE.csv, FILE.tsv, FILE.txt (a user and its items in each line), "
    "a folder with train.txt and test.txt, or NAME.train.rating"
)


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
            "the source has candidates of its own", where=f"--candidates {candidates}", do="leave it out"
        )
    if candidates:
        facts["candidates"] = read_candidates(candidates, gathering, columns)
    return gathering.finish(str(source), **facts)


def _read(source: Path, columns: Columns, gathering: Gathering) -> dict[str, Any]:
    """Adds everything; what else is known of it, as of Interactions."""
    if source.is_dir() and (source / words.TRAIN_FILE).is_file():
        return words.read_divided(source, gathering)
    if train := ncf.train_file(source):
        return ncf.read(train, gathering)
    if source.suffix == ".txt":
        return words.read(source, gathering)
    if source.name.endswith(TABLES):
        return tables.read([source], tables.csv_batches, columns, gathering)
    if files := _parquet_files(source):
        return tables.read(files, tables.parquet_batches, columns, gathering)
    raise DataError("no layout of interactions that is known", where=str(source), expected=EXPECTED)


def _parquet_files(source: Path) -> list[Path]:
    if source.is_dir():
        return sorted(source.rglob("*.parquet"))
    return [source] if source.suffix == ".parquet" else []
