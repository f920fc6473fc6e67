"""Folders that a table format owns: its own records name the files with current rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath

from pyarrow import fs

from raytrec.common.errors import DataError

PARENTS = 7  # a partition's keys, a folder such as data/, and the table
# Format → (path of its records below the table, how the current rows are written as plain Parquet).
SPARK = 'spark.read.format("{}").load("{{table}}").write.parquet("plain")'
FORMATS = {
    "a Delta Lake table": (
        r"_delta_log",
        'pyarrow.dataset.write_dataset(deltalake.DeltaTable("{table}").to_pyarrow_dataset(), "plain", '
        'format="parquet"), or ' + SPARK.format("delta"),
    ),
    "an Iceberg table": (
        r"metadata/(?:[^/]*\.metadata\.json(?:\.gz)?|version-hint\.text)",
        "pyarrow.parquet.write_table(pyiceberg.table.StaticTable.from_metadata(NEWEST_METADATA_JSON).scan()"
        '.to_arrow(), "plain.parquet"), or ' + SPARK.format("iceberg"),
    ),
    "a Hudi table": (r"\.hoodie", SPARK.format("hudi")),
    "a Paimon table": (r"snapshot/(?:snapshot-\d+|EARLIEST|LATEST)", SPARK.format("paimon")),
    "a transactional Hive table": (
        r"(?:base_\d{7,}(?:_v\d+)?|(?:delete_)?delta_\d{7,}_\d{7,}(?:_\d+)?(?:_v\d+)?)",
        'spark.table(NAME).write.parquet("plain"), or CREATE TABLE … STORED AS PARQUET AS SELECT in Hive',
    ),
    "the output of a Spark stream": (r"_spark_metadata", SPARK.format("parquet")),
}
RECORDS = ("_delta_log", "metadata", ".hoodie", "snapshot", "_spark_metadata")  # where those records are
_PATTERNS = {name: re.compile(rf"/{pattern}(?=/|$)") for name, (pattern, _) in FORMATS.items()}


def check_no_table(filesystem: fs.FileSystem, path: str, inside: Iterable[str], where: str) -> None:
    """Check that no table format owns a folder, a folder above it or one inside of it.

    Args:
        filesystem: Filesystem of the folder.
        path: Path of the folder or file in that filesystem.
        inside: Paths in the folder that are not hidden, and hidden ones that are directly in those.
        where: Config key and name of the folder, for messages.

    Raises:
        DataError: The folder belongs to a table.
    """
    places = [str(folder) for folder in (PurePosixPath(path), *PurePosixPath(path).parents)][:PARENTS]
    asked = [f"{folder.rstrip('/')}/{name}" for folder in places for name in RECORDS]
    with ThreadPoolExecutor(16) as pool:
        above = [found for each in pool.map(partial(_entries, filesystem), asked) for found in each]
    for entry in [path, *above, *inside]:
        for name, pattern in _PATTERNS.items():
            if found := pattern.search(entry):
                table = entry[: found.start()]
                raise DataError(
                    f"the folder is {name} or part of one: its files also hold rows that were removed, "
                    "replaced or never committed",
                    where=f"{where}, {table}{found.group()}",
                    expected="a folder of Parquet files whose rows are all current",
                    do="write the current rows as plain Parquet: " + FORMATS[name][1].format(table=table),
                )


def _entries(filesystem: fs.FileSystem, folder: str) -> list[str]:
    """Return the paths in a folder, none where it does not exist or may not be listed."""
    try:
        return [info.path for info in filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))]
    except OSError:
        return []
