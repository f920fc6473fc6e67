"""Rows that a run would stop at, found before it comes to them, by reading them as a run would. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.storage import open_filesystem
from raytrec.data.columns import Place
from raytrec.data.decode import undecodable
from raytrec.data.faults import retry_read
from raytrec.data.form import Form
from raytrec.data.fragments import Dataset
from raytrec.data.nested import pick, to_read
from raytrec.data.rows import canonical
from raytrec.data.transform import apply_transforms

ROWS = 1 << 16  # read at a time
BUFFER_BYTES = 1 << 20  # of each column
MOST_ACCUSED = 4  # row groups that are read for what footers say


def check_accused(dataset: Dataset) -> None:
    """Reads the first row groups of which footers say that they hold what the schema does not allow.

    Raises:
        DataError: they do; names file, row group, column and row.
    """
    for group in dataset.accused[:MOST_ACCUSED]:
        for _ in check_rows(group.path, group.index, dataset.form):
            pass


def check_rows(path: str, group: int, form: Form) -> Iterator[int]:
    """Reads a row group as a run would, a few rows at a time; how many they were.

    Raises:
        DataError: rows that a run would stop at; names file, row group, column and row.
    """
    first = 0
    for table in _tables(path, group, form.columns):
        table = apply_transforms(table, form.transforms, f"{path}, row group {group}", form.folder)
        canonical(table, form, Place(path, group, first))
        first += table.num_rows
        yield table.num_rows


def _tables(path: str, group: int, columns: list[str]) -> Iterator[pa.Table]:
    def opened() -> tuple[pq.ParquetFile, list[str]]:
        filesystem, inner = open_filesystem(path)
        file = filesystem.open_input_file(inner)
        reader = pq.ParquetFile(file, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
        return reader, to_read(reader.schema_arrow, columns)

    try:
        reader, asked = retry_read(path, opened)
        with reader:
            found = reader.iter_batches(ROWS, row_groups=[group], columns=asked, use_threads=False)
            for batch in found:
                yield pick(pa.Table.from_batches([batch]), columns)
    except (pa.ArrowException, OSError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise undecodable(error, path, group) from None
