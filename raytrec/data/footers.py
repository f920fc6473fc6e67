"""Footers of Parquet files, and whether they can be true. No torch here."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.errors import DataError
from raytrec.common.storage import open_filesystem
from raytrec.data.faults import retry_read, storage_hint

MOST_ROWS = 2**31 - 1  # of a row group; no writer comes near
CLOSELY_ROWS = 65_536  # row groups of more are looked at closely
SIGNATURE_BYTES = 28  # after a footer in plain text, where columns are encrypted


class Implausible(Exception):
    """A footer that claims what the file cannot hold."""


def _check_claims(footer: pq.FileMetaData, size: int) -> None:
    """Looks whether a file of `size` bytes can hold what its footer claims, before anything counts on it.

    Raises:
        Implausible: what it claims.
    """
    for g in range(footer.num_row_groups):
        group = footer.row_group(g)
        if not 0 <= group.num_rows <= MOST_ROWS:
            raise Implausible(f"its footer claims {group.num_rows:,} rows in row group {g}")
        # Of ordinary row groups, one column: there may be millions.
        for c in range(group.num_columns if group.num_rows > CLOSELY_ROWS else min(1, group.num_columns)):
            chunk, column = group.column(c), footer.schema.column(c)
            begin = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
            held = chunk.total_compressed_size
            what = f"its footer claims {group.num_rows:,} rows in row group {g}, and of column {column.path}"
            if begin < 0 or held < 0 or begin + held > size:
                raise Implausible(
                    f"{what} {held:,} bytes from byte {begin:,} on, in a file of {size:,} bytes"
                )
            if column.max_repetition_level == 0 and chunk.num_values != group.num_rows:
                raise Implausible(f"{what} {chunk.num_values:,} values")


def _check_plain(uri: str, tail: bytes, footer: pq.FileMetaData | None = None) -> None:
    """Refuses an encrypted file: asked for the metadata of an encrypted column, pyarrow ends the process.

    Args:
        tail: the last 8 bytes of the file.

    Raises:
        DataError: the file is encrypted.
    """
    signature = int.from_bytes(tail[:4], "little") - footer.serialized_size if footer else 0
    if tail[4:] == b"PARE" or signature == SIGNATURE_BYTES:
        raise DataError(
            "the file is encrypted, or some of its columns are",
            where=uri,
            expected="Parquet without encryption, as raytrec has no keys",
            do="write the file again without encryption, or remove it",
        )


def read_footer(uri: str) -> pq.FileMetaData:
    """The metadata of a Parquet file.

    Raises:
        DataError: when the file is cut off, empty, encrypted or no Parquet.
    """

    def read() -> pq.FileMetaData:
        filesystem, path = open_filesystem(uri)
        with filesystem.open_input_file(path) as file:
            tail = file.read_at(8, max(0, file.size() - 8))
            _check_plain(uri, tail)
            metadata = pq.read_metadata(file)
            _check_plain(uri, tail, metadata)
            _check_claims(metadata, file.size())
            return metadata

    try:
        metadata = retry_read(uri, read)
        _ = metadata.schema.to_arrow_schema().names, metadata.schema.names  # may be no UTF-8
    except (pa.ArrowException, OSError, UnicodeDecodeError, Implausible) as error:
        raise DataError(
            f"not a whole Parquet file: {str(error).splitlines()[0]}",
            where=uri,
            expected=storage_hint(uri) + "a readable footer; the file may be cut off, or still being written",
            do="write or copy the file again, or remove it",
        ) from None
    return metadata
