"""Malformed Criteo values that Python or Arrow may parse as numbers, and truncated downloads."""

import gzip

import numpy as np
import pyarrow as pa
import pytest
from raytrec_datasets.criteo import lines
from raytrec_datasets.criteo.lines import Chunk, chunks, hex_values, read

from raytrec.common.errors import DataError

GOOD = "\t".join(["1", *["3"] * 13, *["0a1b2c3d"] * 26])


def replace_field(field, value):
    fields = GOOD.split("\t")
    fields[field] = value
    return "\t".join(fields)


def count_rows_and_skipped(path, skip_bad):
    found = [(len(table), bad) for chunk in chunks(path) for table, bad in read(chunk, skip_bad)]
    return tuple(map(sum, zip(*found, strict=True)))


@pytest.mark.parametrize(
    "field,value,message",
    [
        (20, "1_0", "C7 is '1_0'"),  # int('1_0', 16) is a number to Python
        (20, "0x1f", "C7 is '0x1f'"),
        (20, "+1f", "C7 is '+1f'"),
        (20, "0a1b2c3d4", "C7 is '0a1b2c3d4'"),
        (3, "1_0", "I3 is '1_0'"),
        (3, "9" * 25, "I3 is '99999"),  # beyond int64
        (3, "5.0", "I3 is '5.0'"),
        (20, "zz", "C7 is 'zz'"),
        (0, "", "the label is ''"),
        (0, "7", "the label is '7'"),
        (3, "3\t3", "41 fields"),
    ],
)
def test_malformed_values_are_reported_or_counted(tmp_path, field, value, message):
    path = tmp_path / "train.txt"
    path.write_text("\n".join([GOOD, "", GOOD, replace_field(field, value), GOOD]) + "\n")
    with pytest.raises(DataError) as error:
        count_rows_and_skipped(path, skip_bad=False)
    assert message in str(error.value) and "line 4" in str(error.value)
    assert count_rows_and_skipped(path, skip_bad=True) == (3, 1)


def test_block_of_only_malformed_lines_is_skipped(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("no\nno\n")
    assert count_rows_and_skipped(path, skip_bad=True) == (0, 2)


@pytest.mark.slow
def test_every_line_is_in_one_chunk(tmp_path, monkeypatch):
    text = [f"line {i} {'x' * (i % 50)}" for i in range(1000)]
    path = tmp_path / "file"
    path.write_text("\n".join(text))
    for size in (1, 7, 64, 1000, 10**6):
        monkeypatch.setattr(lines, "CHUNK_BYTES", size)
        found = [line for c in chunks(path) for block in lines._blocks(c) for line in block.splitlines()]
        assert found == [line.encode() for line in text]


def test_truncated_gzip_file_is_reported(tmp_path):
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress(f"{GOOD}\n".encode() * 5000)[:-20])
    with pytest.raises(DataError, match="cannot decompress"):
        list(read(Chunk(str(path), 0, None), True))


def test_hex_values_parses_any_length_case_and_slice():
    words = ["0", None, "ff", "FFFFFFFF", "0a1b2c3d", None, "7"]
    column = pa.chunked_array([words[:3], words[3:]], pa.string())
    expected = [-1 if word is None else int(word, 16) for word in words]
    assert hex_values(column).tolist() == expected
    assert hex_values(column.slice(2, 4)).tolist() == expected[2:6]
    assert hex_values(pa.chunked_array([], pa.string())).dtype == np.int64
