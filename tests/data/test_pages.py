"""Row ranges read page by page match the rows that pyarrow reads from the whole row group."""

import os
import random
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrec.data import pages
from raytrec.data.pages import chunks, read_rows
from raytrec.data.pages.chunks import DamagedPageError, PageIndex, TruncatedDataError, count_rows, read_struct

ROWS = 3000


def table(rows=ROWS, seed=0):
    """Return a table of all supported column kinds: flat, with and without nulls, lists, structs."""
    rng = np.random.default_rng(seed)
    lists = [None if rng.random() < 0.1 else list(range(i, i + rng.integers(0, 9))) for i in range(rows)]
    numbers = rng.integers(0, 50, rows)
    return pa.table(
        {
            "few": pa.array(numbers),
            "many": pa.array(np.arange(rows) * 7919),
            "gaps": pa.array([None if i % 5 == 0 else i for i in range(rows)], pa.int32()),
            "real": pa.array(rng.random(rows, np.float32)),
            "text": pa.array([f"name {i}" * (i % 4) for i in numbers]),
            "same": pa.array(np.zeros(rows, bool)),
            "bag": pa.array(lists, pa.list_(pa.int64())),
            "long": pa.array([list(range(i % 700)) if i % 100 == 0 else [i] for i in range(rows)]),
            "who": pa.array([{"city": int(i), "age": i / 2, "bag": [i] * (i % 3)} for i in numbers]),
        }
    )


WRITERS = {
    "pyarrow's own": {},
    "small pages": {"data_page_size": 300, "write_batch_size": 7},
    "no dictionaries": {"data_page_size": 300, "use_dictionary": False, "write_batch_size": 10},
    "dictionaries that are given up": {"dictionary_pagesize_limit": 500, "data_page_size": 300},
    "version 2": {"data_page_version": "2.0", "data_page_size": 500},
    "checksums": {"write_page_checksum": True, "max_rows_per_page": 90},
    "an index of pages": {"write_page_index": True, "max_rows_per_page": 70},
    **{codec: {"compression": codec, "max_rows_per_page": 200} for codec in ("none", "zstd", "gzip", "brotli", "lz4")},
}


@pytest.mark.parametrize("writer", WRITERS)
def test_row_ranges_are_read_for_all_writer_options(tmp_path, writer):
    whole, path = table(), str(tmp_path / "a.parquet")
    with pq.ParquetWriter(path, whole.schema, **WRITERS[writer]) as out:
        out.write_table(whole.slice(0, 10))
        out.write_table(whole, row_group_size=ROWS)
    rng = random.Random(writer)
    spans = [(0, 1), (0, ROWS), (ROWS - 1, ROWS), (ROWS - 5, ROWS + 9)]
    spans += [sorted(rng.sample(range(ROWS + 1), 2)) for _ in range(12)]
    names = [*whole.column_names[:-1], "who.city", "who.bag"]
    for first, last in spans:
        found = read(path, 1, first, last, names)
        for name in names[:-2]:
            assert found[name].to_pylist() == whole[name][first:last].to_pylist(), (name, first, last)
        expected = [{k: who[k] for k in ("city", "bag")} for who in whole["who"][first:last].to_pylist()]
        assert found["who"].to_pylist() == expected


def read(path, group, first, last, names):
    file = pa.OSFile(path)
    return read_rows(file, (path, file.size(), 0), pq.ParquetFile(path), group, first, last, names)


def test_only_pages_of_the_requested_rows_are_read(tmp_path):
    path, rows = str(tmp_path / "a.parquet"), 200_000
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(rows)}), path, use_dictionary=False)
    with open(path, "rb") as plain:
        counted = CountingFile(plain)
        reader, version = pq.ParquetFile(path), (path, os.path.getsize(path), 0)
        found = read_rows(counted, version, reader, 0, 100_000, 120_000, ["x"])
        assert found["x"].equals(pq.read_table(path)["x"][100_000:120_000])
        size = reader.metadata.row_group(0).total_byte_size
        assert counted.bytes < 0.4 * size
        before = counted.bytes
        read_rows(counted, version, reader, 0, 40_000, 60_000, ["x"])
        assert counted.bytes - before < 0.3 * size and counted.reads < 40, "page locations are looked up once"


def test_wrong_row_counts_of_old_arrow_are_ignored(tmp_path):
    """Older Arrow versions wrote value counts as row counts in v2 headers of list columns."""
    path, bag = tmp_path / "a.parquet", [list(range(i % 9)) for i in range(ROWS)]
    how = {"data_page_version": "2.0", "max_rows_per_page": 100, "compression": "none"}
    pq.write_table(pa.table({"bag": bag}), path, use_dictionary=False, **how)
    raw, at, wrong = bytearray(path.read_bytes()), 4, 0
    while at < pq.read_metadata(path).row_group(0).column(0).total_compressed_size:
        header, end = read_struct(raw, at)
        about = header[chunks.DATA_HEADER_V2]
        counts = [b"\x15" + encode_varint(about[field] * 2) for field in (1, 2, 3)]
        place = raw.index(b"".join(counts), at, end) + len(counts[0] + counts[1])
        raw[place : place + len(counts[0])] = counts[0]
        wrong += about[3] != about[1]
        at = end + header[chunks.COMPRESSED]
    path.write_bytes(raw)
    assert wrong == ROWS / 100 and pq.read_table(path)["bag"].to_pylist() == bag
    assert read(str(path), 0, 2040, 2090, ["bag"])["bag"].to_pylist() == bag[2040:2090]


@pytest.mark.parametrize("error", [KeyError, IndexError, TypeError, TruncatedDataError])
@pytest.mark.parametrize("after", [0, 20])
def test_unparsable_pages_are_read_by_pyarrow(tmp_path, monkeypatch, error, after):
    """Pages that only pyarrow can parse are not damaged: the row group is read from its start."""
    path, whole, calls = str(tmp_path / "a.parquet"), table(), []
    pq.write_table(whole, path, max_rows_per_page=100)

    def read_some(data, *within):
        if within:  # a struct in a header
            return read_struct(data, *within)
        calls.append(data)
        if len(calls) > after:
            raise error("not as expected")
        return read_struct(data)

    monkeypatch.setattr(chunks, "read_struct", read_some)
    monkeypatch.setattr(pages, "BATCH_ROWS", 500)
    names = ["few", "bag", "text"]
    assert read(path, 0, 1700, 1790, names).equals(whole.select(names).slice(1700, 90).combine_chunks())
    assert len(calls) > after


def test_invalid_page_header_raises_damaged_page_error(tmp_path):
    """pyarrow may misread the page type and shift the rows after the page."""
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, compression="none", use_dictionary=False, max_rows_per_page=100)
    raw, begin = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0).column(1).data_page_offset
    raw[begin] = 0x10  # a field of type 0
    path.write_bytes(raw)
    with pytest.raises(DamagedPageError, match="a page of column many has no valid header"):
        read(str(path), 0, 1700, 1790, ["many"])


@pytest.mark.parametrize("field", [chunks.COMPRESSED, chunks.UNCOMPRESSED, chunks.VALUES])
@pytest.mark.parametrize("lie", [-1, 1 << 40])
def test_false_page_headers_allocate_no_memory(tmp_path, monkeypatch, field, lie):
    path, whole = str(tmp_path / "a.parquet"), table()
    pq.write_table(whole, path, max_rows_per_page=100)

    def read_lies(data, *within):
        header, size = read_struct(data, *within)
        if within:  # a struct in a header
            return header, size
        about = header.get(chunks.DATA_HEADER, {}) if field == chunks.VALUES else header
        about[field] = lie
        return header, size

    monkeypatch.setattr(chunks, "read_struct", read_lies)
    if field != chunks.UNCOMPRESSED:
        with pytest.raises(DamagedPageError, match=r"column bag\S+ claims \S+ (values|bytes), but only \S+ remain"):
            read(path, 0, 1700, 1790, ["bag"])
    else:
        assert read(path, 0, 1700, 1790, ["bag"])["bag"].to_pylist() == whole["bag"][1700:1790].to_pylist()


def test_chunks_longer_than_stated_in_the_footer_are_read(tmp_path):
    """Early Java writers stated a too small chunk size in the footer."""
    path, whole = str(tmp_path / "a.parquet"), table()
    pq.write_table(whole, path, max_rows_per_page=100)
    chunk = pq.read_metadata(path).row_group(0).column(1)
    walk = PageIndex(chunk, pq.read_metadata(path).schema.column(1), ROWS)
    walk._end -= 20
    file = pa.OSFile(path)
    pages._page_cache[(path, file.size(), 0), 0, 1] = walk
    assert read(path, 0, 2900, 3000, ["many"])["many"].to_pylist() == whole["many"][2900:].to_pylist()


def test_missing_values_are_not_reported_as_missing_rows(tmp_path):
    path = str(tmp_path / "a.parquet")
    pq.write_table(table(), path, max_rows_per_page=100)
    metadata = pq.read_metadata(path)
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    i = next(i for i, name in enumerate(names) if name.startswith("bag."))
    index, file = PageIndex(metadata.row_group(0).column(i), metadata.schema.column(i), ROWS), pa.OSFile(path)
    index._left += 1
    with pytest.raises(DamagedPageError, match=r"column bag\S+ contain 1 value fewer than the footer claims"):
        index.look_up(lambda at, size: file.read_at(size, at))


def test_storage_errors_are_not_reported_as_damage(tmp_path):
    """Storage errors are re-raised so that the read is retried."""
    path = str(tmp_path / "a.parquet")
    pq.write_table(table(), path)

    class Failing(CountingFile):
        def read_at(self, size, at):
            raise OSError(5, "no answer")

    with open(path, "rb") as plain, pytest.raises(OSError, match="no answer"):
        read_rows(Failing(plain), (path, 1, 0), pq.ParquetFile(path), 0, 5, 9, ["few"])


class CountingFile:
    def __init__(self, file):
        self.file, self.bytes, self.reads = file, 0, 0

    def read_at(self, size, at):
        self.file.seek(at)
        data = self.file.read(size)
        self.bytes, self.reads = self.bytes + len(data), self.reads + 1
        return data


def test_page_cache_size_is_limited(tmp_path, monkeypatch):
    path = str(tmp_path / "a.parquet")
    pq.write_table(table(), path, max_rows_per_page=20)
    monkeypatch.setattr(pages, "MAX_PAGE_CACHE_BYTES", 20_000)
    for name in ("few", "many", "gaps", "real"):
        read(path, 0, 2000, 2010, [name])
        assert sum(known.nbytes for known in pages._page_cache.values()) <= 20_000


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 3)), max_size=8), st.integers(1, 3))
def test_count_rows_handles_runs_and_packed_groups(runs, width):
    """Encode levels as Parquet does: as runs and as packed groups of eight."""
    data, expected = b"", []
    for packed, count, level in runs:
        level %= 1 << width
        if packed:
            levels = [(level + i) % (1 << width) for i in range(8 * count)]
            bits = "".join(format(v, f"0{width}b")[::-1] for v in levels)
            data += encode_varint(count << 1 | 1) + bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
            expected += levels
        else:
            data, expected = data + encode_varint(count << 1) + bytes([level]), expected + [level] * count
    assert count_rows(data, width, len(expected)) == (expected.count(0), expected[:1] == [0])
    with pytest.raises(ValueError, match="levels of a page are truncated"):
        count_rows(data, width, len(expected) + 1)


def encode_varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_parsing_random_headers_takes_little_memory(data):
    tracemalloc.start()
    try:
        read_struct(data)
    except (TruncatedDataError, ValueError):
        pass
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 1 << 20
