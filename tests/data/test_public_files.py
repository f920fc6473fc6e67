"""Every column of Apache's parquet-testing files, read by pages and by pyarrow.

The files are Apache's (https://github.com/apache/parquet-testing, Apache License 2.0) and not part of this
repository. RAYTREC_PARQUET_TESTING names their folder.
"""

import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.data.pages import read_rows
from raytrec.data.pages.chunks import DamagedPageError

DEFAULT_FOLDER = Path(__file__).parents[3] / "shared" / "data" / "parquet-testing"
FOLDER = Path(os.environ.get("RAYTREC_PARQUET_TESTING") or DEFAULT_FOLDER)
READ_ERRORS = (DamagedPageError, ValueError, KeyError, IndexError, TypeError, OSError, pa.ArrowException)
TOO_LARGE = "large_string_map.brotli.parquet"  # 2 GiB of text; both readers fail after minutes
FILES = sorted(path for path in FOLDER.glob("*/*.parquet") if path.name != TOO_LARGE)
# Files with pages that only raytrec rejects: two have wrong checksums, which pyarrow ignores by default;
# in ARROW-GH-41317 a page has none of the three rows that the footer states.
REJECTED_ONLY_BY_RAYTREC = {
    "datapage_v1-corrupt-checksum.parquet",
    "rle-dict-uncompressed-corrupt-checksum.parquet",
    "ARROW-GH-41317.parquet",
}
UNREADABLE = {
    "incorrect_map_schema.parquet",
    "ARROW-GH-41321.parquet",
    "ARROW-GH-45185.parquet",
    "ARROW-GH-47662.parquet",
    "ARROW-RS-GH-6229-DICTHEADER.parquet",
    "ARROW-RS-GH-6229-LEVELS.parquet",
    "PARQUET-1481.parquet",
}  # rejected by pyarrow and by raytrec, some of them only in part

pytestmark = pytest.mark.skipif(not FILES, reason="parquet-testing files not found")


def spans(rows):
    """Return ranges of rows: all, without the first, the middle half, and the last row."""
    return sorted({(0, rows), (min(1, rows - 1), rows), (rows // 4, rows - rows // 4), (rows - 1, rows)})


def try_read(read, *arguments):
    """Return a column, or None if it cannot be read."""
    try:
        return read(*arguments)
    except READ_ERRORS:
        return None


def read_by_pages(path, reader, group, first, last, name):
    with pa.OSFile(str(path)) as file:
        return read_rows(file, (str(path), path.stat().st_size, None), reader, group, first, last, [name])[name]


def read_by_pyarrow(path, group, name):
    return pq.ParquetFile(path).read_row_group(group, columns=[name])[name]


def outcomes(path):
    """Yield the outcome of each span of each column of each row group of a file."""
    reader = try_read(pq.ParquetFile, path)
    if reader is None:
        yield "refused by both"  # pyarrow parses the footer for both readers
        return
    for group in range(reader.num_row_groups):
        rows = reader.metadata.row_group(group).num_rows
        for name in dict.fromkeys(reader.schema_arrow.names):
            whole = try_read(read_by_pyarrow, path, group, name)
            for first, last in spans(rows) if rows else ():
                found = try_read(read_by_pages, path, reader, group, first, last, name)
                if found is None or whole is None:
                    refusing = [side for side, of in (("raytrec", found), ("pyarrow", whole)) if of is None]
                    yield "refused by both" if len(refusing) == 2 else f"refused by {refusing[0]} alone"
                else:
                    expected = whole.slice(first, last - first)
                    same = found.equals(expected) or str(found.to_pylist()) == str(expected.to_pylist())  # NaN
                    yield "equal" if same else "different"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_page_reads_match_pyarrow(path):
    counts = Counter(outcomes(path))
    assert not counts["different"] and not counts["refused by pyarrow alone"], counts
    assert bool(counts["refused by raytrec alone"]) == (path.name in REJECTED_ONLY_BY_RAYTREC), counts
    assert bool(counts["refused by both"]) == (path.name in UNREADABLE), counts


def test_parquet_testing_folder_is_complete():
    assert {path.name for path in FILES} >= REJECTED_ONLY_BY_RAYTREC | UNREADABLE and len(FILES) >= 60
