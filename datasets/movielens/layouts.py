"""Read MovieLens in its original file layouts, and download it from GroupLens.

100k        u.data (tabs), u.item, u.user (pipes, latin-1, 19 genre flags)
1m          ratings.dat, movies.dat, users.dat (double colons, latin-1)
20m 25m 32m ratings.csv, movies.csv (no attributes of users)

Leave-one-out with given candidates is in candidates.py. A set is downloaded only on request: its checksum is
verified and its license is printed.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
from raytrec_datasets.writing import progress
from rich.console import Console

from raytrec.common.errors import DataError
from raytrec.common.formatting import format_count

WHOLE_NUMBER = re.compile(r"[0-9]{1,18}")
BASE = "https://files.grouplens.org/datasets/movielens/"
MD5 = {  # as published by GroupLens
    "100k": "0e33842e24a9c977be4e0107933c0723",
    "1m": "c4d9eecfca2ab87c1945afe126590906",
    "20m": "cd245b17a1ae2cc31bb14903e1204af3",
    "25m": "6b51fb2759a8657d3bfcbfc42b592ada",
    "32m": "d472be332d4daa821edc399621853b57",
}
TIME_BITS = 33  # enough for timestamps in seconds until the year 2242, but not in milliseconds


@dataclass
class MovieLens:
    """All ratings of a set.

    Attributes:
        ratings: Table with user, item (original ids), rating and timestamp (s since 1970, UTC).
        items: Table with item, title, year (0: unknown) and genres (list of names), one row per item.
        users: Table with user, age, gender, occupation and zip; None if the set has no user attributes.
    """

    ratings: pd.DataFrame
    items: pd.DataFrame
    users: pd.DataFrame | None


def read(folder: Path) -> MovieLens:
    """Read the set in a folder.

    Raises:
        DataError: The folder has no known layout, or a file is missing or cannot be parsed; the error names
            the file.
        OSError: A file cannot be opened.
    """
    for marker, others, reader in LAYOUTS:
        if (folder / marker).is_file():
            for other in others:
                if not (folder / other).is_file():
                    raise DataError(
                        f"{marker} exists, but {other} is missing", where=str(folder), do="extract the whole zip"
                    )
            return reader(folder)
    raise DataError(
        "no MovieLens files found",
        where=str(folder),
        expected="u.data, u.item, u.user (100K), ratings.dat, movies.dat, users.dat (1M), ratings.csv, "
        "movies.csv (20M, 25M, 32M), or NAME.test.negative (leave-one-out with candidates)",
        do="pass the extracted folder as --source, or download a set with --download",
    )


def _read_100k(folder: Path) -> MovieLens:
    flags = _lines(folder / "u.item", "|", 24, [0, *range(5, 24)])
    genre_names = _genres(folder)
    matrix = flags.iloc[:, 5:].to_numpy().astype(int)
    items = pd.DataFrame(
        {
            "item": flags[0].astype(int),
            "title": flags[1],
            "year": flags[2].str.extract(r"(\d{4})$")[0].fillna("0").astype(int),
            "genres": [[genre_names[i] for i in np.flatnonzero(row)] for row in matrix],
        }
    )
    users = _lines(folder / "u.user", "|", 5, [0, 1])
    users.columns = ["user", "age", "gender", "occupation", "zip"]
    users = users.astype({"user": int, "age": int})
    return MovieLens(_ratings(folder / "u.data", "\t"), items, users.assign(age=users.age // 5 * 5))


def _genres(folder: Path) -> list[str]:
    path = folder / "u.genre"
    if not path.is_file():
        return [f"genre {i}" for i in range(19)]
    return [line.split("|")[0] for line in path.read_text("latin-1").splitlines() if "|" in line]


def _read_1m(folder: Path) -> MovieLens:
    ratings = _ratings(folder / "ratings.dat", "::")
    return MovieLens(ratings, movie_table(folder / "movies.dat"), user_table(folder / "users.dat"))


def user_table(path: Path) -> pd.DataFrame:
    """Read users.dat as a table with user and age (int64), gender, occupation and zip (text).

    Raises:
        DataError: A line is invalid.
    """
    users = _lines(path, "::", 5, [0, 2])[[0, 2, 1, 3, 4]]
    users.columns = ["user", "age", "gender", "occupation", "zip"]
    return users.astype({"user": int, "age": int})


def movie_table(path: Path) -> pd.DataFrame:
    """Read movies.dat as a table with item, title, year (0: unknown) and genres (list of names).

    Raises:
        DataError: A line is invalid.
    """
    return _movies(*_lines(path, "::", 3, [0]).values.T)


def _read_csv(folder: Path) -> MovieLens:
    path = folder / "movies.csv"
    try:
        movies = pd.read_csv(path, dtype=str, keep_default_na=False)
        items = _movies(movies["movieId"], movies["title"], movies["genres"])
    except (ValueError, KeyError) as error:
        raise _broken(path, error, "columns movieId,title,genres") from None
    return MovieLens(_ratings(folder / "ratings.csv", ","), items, None)


LAYOUTS: list[tuple[str, list[str], Callable[[Path], MovieLens]]] = [
    ("u.data", ["u.item", "u.user"], _read_100k),
    ("ratings.dat", ["movies.dat", "users.dat"], _read_1m),
    ("ratings.csv", ["movies.csv"], _read_csv),
]


def has_ratings(folder: Path) -> bool:
    """Return True if a folder contains one of these layouts."""
    return any((folder / marker).is_file() for marker, *_ in LAYOUTS)


def _movies(ids, titles, genres) -> pd.DataFrame:
    titles = pd.Series(titles, dtype=object).reset_index(drop=True)
    years = titles.str.extract(r"\((\d{4})\)\s*$")[0].fillna("0").astype(int)
    lists = [[g for g in str(names).split("|") if g not in ("", "(no genres listed)")] for names in genres]
    return pd.DataFrame({"item": np.asarray(ids, dtype=int), "title": titles, "year": years, "genres": lists})


def _lines(path: Path, separator: str, fields: int, numbers: Sequence[int]) -> pd.DataFrame:
    """Read the lines of a small latin-1 file as a table with text columns 0, 1, …; empty lines are ignored.

    Args:
        path: Path of the file.
        separator: Text between two fields.
        fields: Number of fields in each line.
        numbers: Columns that must contain whole numbers.

    Raises:
        DataError: A line is invalid.
    """
    rows = []
    for number, line in enumerate(path.read_text("latin-1").split("\n"), 1):
        if not line:
            continue
        row = line.split(separator)
        if len(row) != fields:
            what = f"line {number} has {format_count(len(row), 'field')}"
            raise _broken(path, what, f"{fields} fields separated by '{separator}'")
        if wrong := [place for place in numbers if not WHOLE_NUMBER.fullmatch(row[place])]:
            field = row[wrong[0]][:60]
            raise _broken(path, f"field {wrong[0] + 1} of line {number} is {field!r}", "a whole number")
        rows.append(row)
    return pd.DataFrame(rows, columns=range(fields))


def _ratings(path: Path, separator: str) -> pd.DataFrame:
    """Read user, item, rating and timestamp with pyarrow, because a set has up to 32 million ratings."""
    names = ["user", "item", "rating", "timestamp"]
    source = path if separator != "::" else io.BytesIO(path.read_bytes().replace(b"::", b"\t"))
    try:
        table = csv.read_csv(
            source,
            csv.ReadOptions(column_names=names, skip_rows=int(separator == ",")),
            csv.ParseOptions(delimiter="," if separator == "," else "\t"),
            csv.ConvertOptions(
                column_types={"user": pa.int64(), "item": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64()}
            ),
        )
    except pa.ArrowInvalid as error:
        raise _broken(path, error, "user, item, rating and timestamp in each line") from None
    if any(column.null_count for column in table.columns):
        raise _broken(path, "a field is empty", "user, item, rating and timestamp in each line")
    times = pc.min_max(table["timestamp"]).as_py()
    if len(table) and not 0 <= times["min"] <= times["max"] < 1 << TIME_BITS:
        raise _broken(path, f"timestamps from {times['min']} to {times['max']}", "seconds since 1970")
    return table.to_pandas()


def _broken(path: Path, error: object, expected: str) -> DataError:
    return DataError(f"cannot parse the file: {error}", where=str(path), expected=expected)


def fetch(name: str, folder: Path, base: str = BASE, md5: str | None = None) -> Path:
    """Download and extract a set unless its folder exists, print its license, and return the folder.

    Args:
        name: Key of MD5, such as 1m.
        folder: Folder for the zip and the extracted files.
        base: URL of the folder with the zips.
        md5: Expected checksum; None: the checksum in MD5.

    Raises:
        DataError: The download fails, its checksum is wrong, or the zip lacks the folder of the set. A zip
            with a wrong checksum is removed.
        OSError: The folder cannot be created or the zip cannot be extracted.
    """
    target = folder / f"ml-{name}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    archive, url = folder / f"ml-{name}.zip", f"{base}ml-{name}.zip"
    digest = _download(url, archive)
    if digest != (md5 or MD5[name]):
        archive.unlink()
        raise DataError(
            f"the download has the wrong checksum {digest}",
            where=url,
            expected=f"MD5 {md5 or MD5[name]}",
            do="try again; if the error persists, download the set and pass its folder as --source",
        )
    partial = folder / f".ml-{name}.partial"  # an interrupted extraction must not look like the set
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(archive) as content:
        for entry in content.namelist():
            if entry.rsplit("/", 1)[-1].upper().startswith("README"):
                Console(stderr=True).print(
                    content.read(entry).decode("utf-8", "replace"), highlight=False, markup=False
                )
        content.extractall(partial)  # zipfile drops absolute paths and '..'
    archive.unlink()
    if not (partial / target.name).is_dir():
        raise DataError(
            f"the zip contains no folder {target.name}",
            where=f"{url}, {partial}",
            do="pass the extracted folder as --source",
        )
    (partial / target.name).rename(target)
    shutil.rmtree(partial)
    return target


def _download(url: str, archive: Path) -> str:
    """Download a file, and return its MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    partial = archive.with_suffix(".partial")
    try:
        with urllib.request.urlopen(url, timeout=30) as answer, partial.open("wb") as file:
            size = int(answer.headers.get("Content-Length") or 0) or None
            with progress("downloading", size) as advance:
                while block := answer.read(1 << 20):
                    file.write(block)
                    digest.update(block)
                    advance(len(block))
    except (urllib.error.URLError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"cannot download: {getattr(error, 'reason', error)}",
            where=f"{url}, {partial}",
            do="check the network and the disk space, or download the set manually and pass its folder as --source",
        ) from None
    shutil.move(partial, archive)
    return digest.hexdigest()
