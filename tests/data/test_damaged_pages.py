"""Damaged pages give an error or correct rows; columns are never misaligned."""

import random
from bisect import bisect_right

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import make_schema
from test_pages import table

from raytrec.common.errors import DataError
from raytrec.data import pages
from raytrec.data.fragments import scan
from raytrec.data.item_reader import read_item
from raytrec.data.order import LaneItem, Part
from raytrec.data.pages import decode as decoding
from raytrec.data.pages.chunks import read_struct
from raytrec.data.pages.decode import ReadErrorPolicy, decode_columns
from raytrec.data.read_plans import ReadPlan

ROWS, PAGE = 1500, 100  # rows per file, rows per page
COPIES = 40
CODECS = ["none", "snappy", "gzip", "brotli", "zstd", "lz4"]
SPANS = [(230, 40), (610, 300), (ROWS - 30, 30)]  # first row, rows


@pytest.fixture(autouse=True)
def read_by_pages(monkeypatch):
    """Read even small row groups page by page."""
    monkeypatch.setattr(decoding, "MAX_FULL_DECODE_ROWS", 10)


def write_columns(path, **how):
    """Write a column of each kind in pages of PAGE rows and return the decoded columns."""
    whole = table(ROWS)
    pq.write_table(whole, path, max_rows_per_page=PAGE, **how)
    return decode_columns(str(path), 0, 0, ROWS, [*whole.column_names[:-1], "who.city", "who.age", "who.bag"])


def find_pages(path):
    """Yield (column name, page index) in file order."""
    footer, file = pq.read_metadata(path), pa.OSFile(str(path))
    for i in range(footer.num_columns):
        found = pages._pages(pages._RowSpan((str(path), file.size(), 0), footer, 0, 0, 0), i)
        found.look_up(lambda at, size: file.read_at(size, at))
        yield footer.schema.column(i).path.removesuffix(".list.element"), found


def find_affected_rows(place, at):
    """Return the column and the rows that damage to this byte may change."""
    name, found = next((name, found) for name, found in place if at < found._end)
    page = bisect_right(found._offsets, at) - 1
    return name, range(page * PAGE, (page + 1) * PAGE) if page >= 0 else range(ROWS)  # dictionary: all rows


def damage_pages(raw, chance, end):
    """Return a copy with one bit or nine bytes changed, and the first and last changed position."""
    copy, at = bytearray(raw), chance.randrange(4, end - 9)
    if chance.random() < 0.5:
        copy[at] ^= 1 << chance.randrange(8)
        return copy, at, at
    copy[at : at + 9] = chance.randbytes(9)
    return copy, at, at + 8


@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "no checksums"])
@pytest.mark.parametrize("codec", [*CODECS[:1], *(pytest.param(codec, marks=pytest.mark.slow) for codec in CODECS[1:])])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_damaged_files_give_an_error_or_correct_rows(tmp_path, version, codec, checksums):
    """Without checksums, values of the damaged page may differ, but rows of other pages are unchanged."""
    path = tmp_path / "good.parquet"
    how = {"data_page_version": version, "compression": codec, "write_page_checksum": checksums}
    good, place = write_columns(path, **how), list(find_pages(path))
    raw, chance, outcomes = path.read_bytes(), random.Random(f"{version} {codec}"), set()
    for n in range(COPIES):
        copy, first, last = damage_pages(raw, chance, place[-1][1]._end)
        path = tmp_path / f"{n}.parquet"
        path.write_bytes(copy)
        changed = {find_affected_rows(place, first), find_affected_rows(place, last)}
        names = sorted({"few"} | {name for name, _ in changed})
        for begin, rows in SPANS:
            try:
                found = decode_columns(str(path), 0, begin, rows, names)
            except DataError as error:
                outcomes.add("error")
                assert f"{n}.parquet, row group 0" in str(error)
                continue
            outcomes.add("rows")
            for name in names:
                right = good[name].slice(begin, rows)
                if found[name].equals(right):
                    continue
                assert not checksums, (name, n)
                pairs = enumerate(zip(found[name].to_pylist(), right.to_pylist(), strict=True), begin)
                wrong = [row for row, (got, expected) in pairs if got != expected]
                assert all(any(name == c and row in r for c, r in changed) for row in wrong), (name, n)
    assert outcomes == {"error", "rows"}


@pytest.mark.parametrize("whole", [True, False], ids=["read whole", "read by pages"])
def test_page_of_unknown_type_does_not_shift_later_rows(tmp_path, monkeypatch, whole):
    """pyarrow skips a page of unknown type, and the page checksum does not cover the header."""
    path = tmp_path / "a.parquet"
    write_columns(path, write_page_checksum=True)
    raw, at = bytearray(path.read_bytes()), dict(find_pages(path))["many"]._offsets[2]
    assert raw[at : at + 2] == b"\x15\x00"
    raw[at + 1] = 8
    path.write_bytes(raw)
    pages._page_cache.clear()
    decoding._open_files.files.clear()
    if whole:
        monkeypatch.setattr(decoding, "MAX_FULL_DECODE_ROWS", ROWS)
    with pytest.raises(DataError, match=r"contain 1,400 rows, but the footer claims 1,500"):
        decode_columns(str(path), 0, 800, 30, ["many"])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "no checksums"])
def test_flipped_level_bit_does_not_change_other_rows(tmp_path, version, checksums):
    """The bit is in the levels of an earlier page, where it starts or ends a list."""
    path = tmp_path / "a.parquet"
    how = {"data_page_version": version, "compression": "none", "write_page_checksum": checksums}
    write_columns(path, **how)
    form = scan(str(path), ReadPlan(make_schema(["bag"], 2000, labels=["same"]))).form

    def read(begin):
        item = LaneItem(0, 0, (Part(str(path), 0, begin, 200),), None)
        return parquet.canonical_to_dicts(read_item(item, form, ReadErrorPolicy(True)), form)

    good = read(900)
    raw, bag = bytearray(path.read_bytes()), dict(find_pages(path))["bag"]
    _, levels = read_struct(raw, bag._offsets[2])
    raw[levels + (6 if version == "1.0" else 2)] ^= 4  # skip the size of the levels and the run header
    path.write_bytes(raw)
    pages._page_cache.clear()
    decoding._open_files.files.clear()
    rows = read(900)
    assert len(rows) == 200 and all(row == right or not row["present"] for row, right in zip(rows, good, strict=True))
    assert not any(row["present"] for row in read(250)), "rows of the damaged page are skipped"
