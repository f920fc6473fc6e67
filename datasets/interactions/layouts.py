"""Read sources in common layouts as Interactions.

FILE.parquet, or a folder of them    columns of users, items and times; items may be ordered lists
FILE.csv, FILE.tsv                   with a line of names (tables.py; also compressed: FILE.csv.gz)
FILE.inter                           like CSV, with tabs and name:type (RecBole)
FILE.txt                             a user and its items in chronological order in each line (S3-Rec)
a folder of train, valid and test    files or folders in one of these formats, named by their split; items in .txt are
                                     then unordered (LightGCN)
NAME.train.rating, or its folder     Neural Collaborative Filtering (He et al., 2017): user, item, rating and
                                     time, separated by tabs
  NAME.test.rating                   the left-out pair of each user
  NAME.valid.rating                  pairs for validation, optional
  NAME.test.negative                 (user,item) of the left-out pair, then the items with which it is ranked
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from raytrec_datasets.interactions import tables
from raytrec_datasets.interactions.candidates import read_candidates
from raytrec_datasets.interactions.events import (
    TEST,
    TRAIN,
    VALID,
    VALID_NAMES,
    Columns,
    InteractionBuilder,
    Interactions,
    Pairs,
)
from raytrec_datasets.interactions.tables import find_suffix, suffix_of

from raytrec.common.errors import ConfigError, DataError, convert_os_errors
from raytrec.data.files.listing import is_hidden, list_files, list_local_folder

TRAIN_END, TEST_END, NEGATIVE_END = ".train.rating", ".test.rating", ".test.negative"
PAIR = re.compile(r"\((\d+),(\d+)\)")
RATINGS = "user, item and, if any, rating and time, separated by tabs; all but the rating are whole numbers"
EXPECTED = (
    "FILE.parquet or a folder of them, FILE.csv or FILE.tsv (or .gz), FILE.inter, FILE.txt (a user and its items in "
    "each line), a folder with train, valid and test of one of these, or NAME.train.rating"
)
SPLITS = {"train": TRAIN, "training": TRAIN, "test": TEST} | dict.fromkeys(VALID_NAMES, VALID)
# Name of the data set, split, and number of the file, as in clicks.train or test-00000-of-00002.
SPLIT = re.compile(rf"(?:(.*)[._-])?({'|'.join(SPLITS)})(?:[._-]?\d+(?:-of-\d+)?)?", re.IGNORECASE)


def read_interactions(source: Path, columns: Columns, candidates: Path | None) -> Interactions:
    """Read a source in any of the layouts.

    Args:
        source: File or folder.
        columns: Names of the columns, for Parquet and CSV.
        candidates: File with the candidates of each test user; None: the source's own, if any.

    Raises:
        ConfigError: The source or `candidates` lacks a column or has a column of an unsupported type, the source
            contains candidates in addition to the file, or the format of `candidates` is unknown.
        DataError: A file does not exist or cannot be read, the source has no known layout or no interactions, or a
            line or row is invalid; the error names the file and, if known, the line.
    """
    if not source.exists():
        raise DataError("the file or folder does not exist", where=str(source), expected=EXPECTED)
    builder = InteractionBuilder()
    facts = _read(source, columns, builder)
    if candidates and "candidates" in facts:
        raise ConfigError(
            "the source has its own candidates", where=f"--candidates {candidates}", do="omit --candidates"
        )
    if candidates:
        facts["candidates"] = read_candidates(candidates, builder, columns)
    return builder.finish(str(source), **facts)


def _read(source: Path, columns: Columns, builder: InteractionBuilder) -> dict[str, Any]:
    """Add all interactions of a source, and return further attributes of Interactions."""
    if train := _ncf_file(source):
        return _read_ncf(train, builder)
    facts: dict[str, Any] = {}
    splits = find_splits(source)
    for split, files in splits.items():
        facts = tables.read(files, columns, builder, split)
    if splits:
        return facts | ({"in_order": False} if suffix_of(splits[TRAIN][0]) == ".txt" else {})
    files = list_source(source)
    if not files or (source.is_dir() and suffix_of(files[0]) != ".parquet"):
        raise DataError("unknown layout of interactions", where=str(source), expected=EXPECTED)
    return tables.read(files, columns, builder)


def list_source(place: Path) -> list[Path]:
    """Return the files of a folder in the known formats, or a single file; hidden files and folders are skipped.

    If there are Parquet files, they are selected as in training, and files that are left out are reported on stderr.

    Raises:
        DataError: The place cannot be listed, belongs to a table format, or contains a Parquet file that is not
            readable (`list_files`).
    """
    with convert_os_errors("the folder cannot be listed", DataError, where=str(place)):
        entries = list_local_folder(str(place), set(), defaultdict(list)) if place.is_dir() else [(str(place), 1)]
    by_suffix: dict[str, list[Path]] = {}
    for path in (Path(name) for name, size in sorted(entries) if size is not None):
        if suffix := "" if path != place and is_hidden(path.name) else suffix_of(path):
            by_suffix.setdefault(suffix, []).append(path)
    if ".parquet" not in by_suffix:
        return [path for files in by_suffix.values() for path in files]
    listing = list_files(str(place), "--source")
    if listing.left_out:
        print(f"{place}: {listing}", file=sys.stderr)
    return [Path(file) for file in listing.files]


def find_splits(source: Path) -> dict[int, list[Path]]:
    """Return the files of train, valid and test in a folder, in this order, or {} if there are no splits.

    Files or folders are named by their split, such as train.csv, clicks.valid.inter, test-0001.parquet
    or val/. The valid split is optional.

    Raises:
        DataError: The folder contains splits of several data sets, or train without test; but train alone, as
            Parquet, is not an error.
    """
    datasets: dict[tuple[str, str], dict[int, list[Path]]] = {}
    for place in sorted(source.iterdir()) if source.is_dir() else ():
        named = SPLIT.fullmatch(place.name[: len(place.name) - len(find_suffix(place.name))])
        files = list_source(place) if named else []
        suffixes = {suffix_of(path) for path in files}
        if named and len(suffixes) == 1:
            of_set = datasets.setdefault((named[1] or "", *suffixes), {})
            of_set.setdefault(SPLITS[named[2].lower()], []).extend(files)
    datasets = {key: splits for key, splits in datasets.items() if TRAIN in splits}
    if len(datasets) > 1:
        raise DataError(
            "the folder contains splits of several data sets",
            where=f"{source}: {', '.join(str(splits[TRAIN][0].name) for splits in datasets.values())}",
            expected="files of one data set, in one format",
            do="use one folder per data set, or pass one file",
        )
    for (_, suffix), splits in datasets.items():
        if TEST in splits:
            return dict(sorted(splits.items()))
        if VALID in splits or suffix != ".parquet":
            raise DataError(
                f"{splits[TRAIN][0].name} exists, but the test split is missing",
                where=str(source),
                expected="files or folders named train and test, and optionally valid",
                do="add the test split, or pass a single file so that raytrec splits it",
            )
    return {}


def _ncf_file(source: Path) -> Path | None:
    """Return the path of NAME.train.rating, given directly or by its folder, or None for other sources."""
    paths = sorted(source.glob(f"*{TRAIN_END}")) if source.is_dir() else [source]
    return paths[0] if paths and paths[0].name.endswith(TRAIN_END) else None


def _read_ncf(train: Path, builder: InteractionBuilder) -> dict[str, Any]:
    """Read NAME.*.rating and, if it exists, NAME.test.negative; return attributes of Interactions.

    Raises:
        DataError: A line is invalid, or the files disagree.
    """
    name = train.name.removesuffix(TRAIN_END)
    test, negative = train.with_name(name + TEST_END), train.with_name(name + NEGATIVE_END)
    places = [train.with_name(f"{name}.{word}.rating") for word in VALID_NAMES]
    valid = next((path for path in places if path.is_file()), None)
    parts = {TRAIN: read_ratings(train)} | ({VALID: read_ratings(valid)} if valid else {}) | {TEST: read_ratings(test)}
    timed = all(part.shape[1] == 3 for part in parts.values())
    for split, part in parts.items():
        times = pa.array(part[:, 2]) if timed else None
        builder.add(pa.array(part[:, 0]), pa.array(part[:, 1]), times, split)
    facts: dict[str, Any] = {"in_order": timed, "of_all": False}
    if negative.is_file():
        lists = read_negatives(negative)
        check_same(dict(parts[TEST][:, :2].tolist()), {u: items[0] for u, items in lists.items()}, test)
        facts["candidates"] = _as_pairs(lists, builder)
    return facts


def _as_pairs(lists: dict[int, list[int]], builder: InteractionBuilder) -> Pairs:
    """Return candidates, given by keys of users and items, as pairs of ids of a source."""
    users = np.repeat(list(lists), [len(items) for items in lists.values()])
    items = np.concatenate([np.array(items) for items in lists.values()])
    return Pairs(builder.users.ids(pa.array(users)), builder.items.ids(pa.array(items)))


def read_negatives(path: Path) -> dict[int, list[int]]:
    """Read NAME.test.negative as user → distinct candidates, of which the first is the left-out item.

    Raises:
        DataError: A line does not contain a user and candidates (the error names the line), or there are no lines.
    """
    candidates: dict[int, list[int]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        first, *others = line.split("\t")
        pair = PAIR.fullmatch(first.strip())
        if not pair or not others or not all(item.strip().isdecimal() for item in others):
            raise DataError(
                f"line {number} does not contain a user and candidates",
                where=str(path),
                expected="(user,item) followed by items, separated by tabs",
            )
        candidates[int(pair[1])] = list(dict.fromkeys([int(pair[2]), *map(int, others)]))
    if not candidates:
        raise DataError("the file contains no users", where=str(path), expected="a line for each user")
    return candidates


def check_same(rated: dict[int, int], left_out: dict[int, int], path: Path) -> None:
    """Check that NAME.test.rating and NAME.test.negative leave out the same pairs.

    Args:
        rated: User → item in NAME.test.rating.
        left_out: User → left-out item in NAME.test.negative.
        path: Path of NAME.test.rating, for messages.

    Raises:
        DataError: The pairs differ; the error names a user.
    """
    users = rated.keys() | left_out.keys()
    if odd := sorted(user for user in users if rated.get(user) != left_out.get(user)):
        item, other = (items.get(odd[0], "missing") for items in (rated, left_out))
        raise DataError(
            f"the test item of user {odd[0]} is {item}, but {other} in *{NEGATIVE_END}",
            where=str(path),
            expected="the same pairs of user and item in both files",
        )


def read_ratings(path: Path) -> np.ndarray:
    """Read the user, item and, if present, time in each line; int64 [n, 2 or 3].

    Raises:
        DataError: The file is missing, or a line is invalid; the error names the file and the line.
    """
    try:
        table = csv.read_csv(path, csv.ReadOptions(autogenerate_column_names=True), csv.ParseOptions(delimiter="\t"))
    except (OSError, pa.ArrowInvalid) as error:
        raise _broken(path, str(error)) from None
    columns = [table.column(place) for place in (0, 1, 3) if place < table.num_columns]
    if len(columns) < 2 or any(column.type != pa.int64() or column.null_count for column in columns):
        raise _broken(path, "a user, item or time is not a whole number")
    return np.stack([column.to_numpy() for column in columns], axis=1)


def _broken(path: Path, why: str) -> DataError:
    """Return the error for a file that cannot be parsed. The error names the first invalid line, if any."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                fields = line.rstrip("\n").split("\t")
                named = [fields[place] for place in (0, 1, 3) if place < len(fields)]
                if len(named) < 2 or not all(field.isdecimal() for field in named):
                    where = f"{path}, line {number}: {line[:60]!r}"
                    return DataError("the line does not match the layout", where=where, expected=RATINGS)
    return DataError(f"cannot read the file: {why}", where=str(path), expected=RATINGS)
