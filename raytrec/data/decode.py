"""One row group of a Parquet file, decoded. No torch here."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.data.faults import answering, retried
from raytrec.data.nested import pick, to_read
from raytrec.errors import DataError
from raytrec.storage import open_filesystem

_footers: dict[tuple, pq.FileMetaData] = {}  # (path, size, mtime) → footer, of this process
FOOTER_BYTES = 16 << 20


def decode(path: str, group: int, rows: int, columns: list[str]) -> pa.Table:
    """Columns of a row group that has at least `rows` rows.

    Raises:
        DataError: what is wrong with the file; names it and the row group.
    """

    def read() -> pa.Table:
        filesystem, inner = open_filesystem(path)
        info = filesystem.get_file_info(inner)
        with filesystem.open_input_file(inner) as file:
            version = path, info.size, info.mtime_ns
            footer = _footers.get(version)
            reader = pq.ParquetFile(file, metadata=footer, pre_buffer=True, page_checksum_verification=True)
            if footer is None:
                _remember(version, reader.metadata)
            asked = to_read(reader.schema_arrow, columns)
            return pick(reader.read_row_group(group, columns=asked, use_threads=False), columns)

    try:
        table = retried(path, read)
        if table.num_rows < rows:
            raise IndexError(f"it has {table.num_rows:,} rows, and had {rows:,} or more before")
    except (pa.ArrowException, OSError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot decode the row group: {(str(error).splitlines() or [type(error).__name__])[0]}",
            where=f"{path}, row group {group}",
            expected=answering(path) + "a whole Parquet file that does not change while it is read",
            do="write or copy the file again, or go on without its rows: data.on_error=skip",
        ) from None
    return table


def _remember(version: tuple, footer: pq.FileMetaData) -> None:
    """Keeps a footer for the file's other row groups; the oldest go when they take too much memory. (Parsed
    for each row group, a footer costs a good part of what decoding does.)"""
    _footers[version] = footer
    while sum(known.serialized_size for known in _footers.values()) > FOOTER_BYTES and len(_footers) > 1:
        del _footers[next(iter(_footers))]
