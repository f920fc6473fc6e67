"""Files of an export's tables: mapped blocks, refused files, and prefetched rows."""

import ctypes
import gc
import mmap
import os
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from waiting import wait_for

from raytrec.common.errors import RunError
from raytrec.config.schema import Schema
from raytrec.scoring import stored_tables as table_rows
from raytrec.scoring.load import read_ids
from raytrec.scoring.manifest import Manifest, StackEntry
from raytrec.scoring.stored_tables import ALIGNMENT, PRECISIONS, choose_block_rows, make_header, open_tables

ROWS, DIM, BLOCK_ROWS = {"a": 3000, "b": 1, "c": 9000}, 8, 4096  # int8: 16 bytes per row, three blocks
PRECISION = PRECISIONS["int8"]
SCHEMA = Schema.parse(
    {
        "labels": ["y"],
        "dense": [],
        "sparse": {name: {"table": name} for name in ROWS},
        "tables": {name: {"rows": rows, "dim": DIM} for name, rows in ROWS.items()},
    },
    "the test",
)


@pytest.fixture
def stored():
    torch.manual_seed(0)
    return PRECISION.encode(torch.randn(sum(ROWS.values()), DIM))


@pytest.fixture
def manifest(stored, tmp_path):
    """Return the manifest of tables whose files are in tmp_path."""
    files = []
    for number, block in enumerate(stored.split(BLOCK_ROWS)):
        files.append(f"{number}.safetensors")
        content = make_header(len(block), PRECISION, DIM) + block.numpy().tobytes()
        (tmp_path / files[-1]).write_bytes(content)
    stack = StackEntry(tables=list(ROWS), precision="int8", block_rows=BLOCK_ROWS, files=files)
    return Manifest.model_construct(data_schema=SCHEMA, stacks=[stack])


def test_rows_of_several_blocks_equal_the_stored_rows(manifest, stored, tmp_path):
    tables, first_row = open_tables(tmp_path, manifest), 0
    for name, rows in ROWS.items():
        assert tables[name].first_row == first_row
        rows_N = torch.randint(rows, (2000,)) + first_row
        assert torch.equal(tables[name].stack.vectors(rows_N), PRECISION.decode(stored[rows_N]))
        first_row += rows
    assert tables["a"].stack.vectors(torch.empty(0, dtype=torch.int64)).shape == (0, DIM)


def test_files_are_readable_with_safetensors(manifest, stored, tmp_path):
    blocks = []
    for name in manifest.stacks[0].files:
        with safe_open(tmp_path / name, framework="pt") as file:
            blocks.append(file.get_tensor("rows"))
    assert torch.equal(torch.cat(blocks), stored)


def test_rows_stay_readable_without_files_until_unused(manifest, stored, tmp_path):
    tables = open_tables(tmp_path, manifest)
    for name in manifest.stacks[0].files:
        (tmp_path / name).unlink()
    rows = tables["c"].stack._stored[5:]
    del tables
    gc.collect()
    assert torch.equal(rows, stored[5:]) and count_mappings(tmp_path) == 3
    del rows
    gc.collect()
    assert count_mappings(tmp_path) == 0


def count_mappings(folder):
    with open("/proc/self/maps") as file:
        return sum(str(folder) in line for line in file)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", [1, 2, 10, 64, 100, 3000])
def test_blocks_end_at_page_boundaries(precision, dim):
    if precision == "int4" and dim % 2:
        pytest.skip("int4 stores pairs of values")
    size = choose_block_rows(PRECISIONS[precision], dim) * PRECISIONS[precision].row_bytes(dim)
    assert size % ALIGNMENT == 0 and 0.9 * (4 << 30) < size <= 4 << 30
    assert len(make_header(1 << 40, PRECISIONS[precision], dim)) == ALIGNMENT


def resize(number, size):
    return lambda stack, folder: os.truncate(folder / stack.files[number], size)


def replace_text(number, old, new):
    def edit(stack, folder):
        content = (folder / stack.files[number]).read_bytes()
        assert content.count(old) == 1 and len(old) == len(new)
        (folder / stack.files[number]).write_bytes(content.replace(old, new))

    return edit


@pytest.mark.parametrize(
    "edit, message",
    [
        (resize(0, ALIGNMENT), "0.safetensors does not contain the rows of a, b, c"),
        (resize(2, ALIGNMENT + 3808 * 16), "2.safetensors does not contain"),
        (resize(2, ALIGNMENT + 3810 * 16), "2.safetensors does not contain"),
        (lambda stack, folder: (folder / stack.files[1]).unlink(), "No such file"),
        (replace_text(1, b"[4096, 16]", b"[1024, 64]"), "1.safetensors does not contain"),
        (replace_text(1, b"[0, 65536]", b"[8, 65536]"), "1.safetensors does not contain"),
        (lambda stack, folder: stack.files.reverse(), "2.safetensors does not contain"),
        (lambda stack, folder: setattr(stack, "precision", "fp32"), "0.safetensors does not contain"),
        (lambda stack, folder: setattr(stack, "block_rows", 4000), "0.safetensors does not contain"),
        (lambda stack, folder: stack.tables.reverse() or setattr(stack, "block_rows", 2**63), "does not contain"),
    ],
)
def test_files_that_do_not_match_the_manifest_are_refused(manifest, tmp_path, edit, message):
    edit(manifest.stacks[0], tmp_path)
    with pytest.raises(RunError, match=message):
        open_tables(tmp_path, manifest)


def test_blocks_that_end_within_a_page_are_refused(tmp_path):
    files = ["0.safetensors", "1.safetensors"]
    for name in files:
        (tmp_path / name).write_bytes(make_header(6000, PRECISION, DIM) + bytes(6000 * 16))
    stack = StackEntry(tables=list(ROWS), precision="int8", block_rows=6000, files=files)
    schema = SCHEMA.model_copy(
        update={"tables": {n: SCHEMA.tables["a"].model_copy(update={"rows": 4000}) for n in ROWS}}
    )
    with pytest.raises(RunError, match="cannot be mapped: Invalid argument"):
        open_tables(tmp_path, Manifest.model_construct(data_schema=schema, stacks=[stack]))
    assert count_mappings(tmp_path) == 0


@pytest.mark.parametrize("rows", [[0, 10], [-1, 2], [0.0, 1.0], [None, 1]])
def test_managed_ids_with_rows_of_another_table_are_refused(rows, tmp_path):
    pq.write_table(pa.table({"id": [3, 4], "row": rows}), tmp_path / "ids.parquet")
    table = {"rows": 10, "dim": 4, "ids": "managed"}
    schema = {"labels": ["y"], "dense": [], "sparse": {"t": {"table": "t"}}, "tables": {"t": table}}
    manifest = SimpleNamespace(data_schema=Schema.parse(schema, "the test"))
    with pytest.raises(RunError, match="table t"):
        read_ids(tmp_path / "ids.parquet", manifest, "t")


def count_resident_pages(values):
    pages = (ctypes.c_ubyte * -(-values.nbytes // mmap.PAGESIZE))()
    ctypes.CDLL(None).mincore(ctypes.c_void_p(values.data_ptr()), ctypes.c_size_t(values.nbytes), pages)
    return sum(page & 1 for page in pages)


def drop_pages(folder, stack):
    """Remove a stack's pages from memory."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(stack.data_ptr()), ctypes.c_size_t(stack.nbytes), mmap.MADV_DONTNEED)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_cold_rows_are_prefetched_before_they_are_read(manifest, tmp_path, monkeypatch):
    stack = open_tables(tmp_path, manifest)["a"].stack
    drop_pages(tmp_path, stack._stored)
    if count_resident_pages(stack._stored):
        pytest.skip("this system does not drop pages on request")
    monkeypatch.setattr(stack.precision.__class__, "decode", lambda precision, stored: stored)
    stack._stored, values = (
        SimpleNamespace(
            data_ptr=stack._stored.data_ptr,
            stride=stack._stored.stride,
            itemsize=stack._stored.itemsize,
            index_select=lambda dim, rows: rows,  # reads nothing
        ),
        stack._stored,
    )
    few, many = torch.arange(10), torch.arange(0, 4096, 8)
    stack.vectors(few)
    assert count_resident_pages(values) == 0 and len(many) >= table_rows.MIN_PREFETCHED_ROWS
    stack.vectors(many)
    wait_for(lambda: count_resident_pages(values) >= 16, "prefetched pages", 60)
    assert count_resident_pages(values) < 48  # the rows of the first block only
