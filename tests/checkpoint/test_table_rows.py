"""Table rows read from a checkpoint without torch, compared with the saved tensors."""

import checkpoints
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

from raytrec.checkpoint import storage
from raytrec.checkpoint.index import CheckpointError, read_index
from raytrec.checkpoint.rows import StoredTable, list_table_names
from raytrec.checkpoint.storage import ShardWriter
from raytrec.common.errors import RunError

# Cuts of a table of 1000 x 12 into shards: (first row, first column, rows, columns).
CUTS = {
    "whole": [(0, 0, 1000, 12)],
    "rows": [(0, 0, 333, 12), (333, 0, 1, 12), (334, 0, 666, 12)],
    "columns": [(0, 0, 1000, 4), (0, 4, 1000, 8)],
    "grid": [(0, 0, 500, 4), (500, 0, 500, 4), (0, 4, 500, 8), (500, 4, 500, 8)],
}


@pytest.fixture(autouse=True)
def single_process_group(monkeypatch):
    """Create a process group of one rank, and blocks that end in the middle of rows."""
    monkeypatch.setattr(storage, "BLOCK_BYTES", 1000)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def save(folder, table, cut):
    """Save a checkpoint with one table in these shards; return its index."""
    parts = []
    for first, column, count, width in CUTS[cut]:
        place = ShardMetadata([first, column], [count, width], "rank:0/cpu")
        values = table[first : first + count, column : column + width].clone()
        parts.append(Shard(values, place))
    whole = ShardedTensorMetadata([part.metadata for part in parts], table.shape, TensorProperties(dtype=table.dtype))
    sharded = ShardedTensor._init_from_local_shards_and_global_metadata(parts, whole)
    dcp.save({"tables/item/weight": sharded}, storage_writer=ShardWriter(str(folder), "a", {}))
    return read_index(str(folder))


def make_table(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(1000, 12).to(dtype)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_stored_table_reads_every_row_of_every_cut(tmp_path, cut, dtype):
    table = make_table(dtype)
    index = save(tmp_path / "c", table, cut)
    assert list_table_names(index) == ["item"]
    with StoredTable(str(tmp_path / "c"), index, "item") as stored:
        assert (stored.rows, stored.dim) == (1000, 12)
        found = stored.read(0, 1000)
        picked = stored.take([999, 0, 333, 334, 0])
        assert stored.take([]).shape == (0, 12)
    with StoredTable(str(tmp_path / "c"), index, "item", checked=False) as stored:
        np.testing.assert_array_equal(stored.take([999, 0, 333, 334, 0]), picked)
    np.testing.assert_array_equal(found, table.float().numpy())
    np.testing.assert_array_equal(picked, table[[999, 0, 333, 334, 0]].float().numpy())


def test_stored_table_detects_damaged_blocks(tmp_path):
    index = save(tmp_path / "c", make_table(), "rows")
    checkpoints.flip_lowest_bit(tmp_path / "c" / "a-00000.bin", 20_000)
    with StoredTable(str(tmp_path / "c"), index, "item") as stored:
        with pytest.raises(CheckpointError, match="checksum"):
            stored.read(0, 1000)
        stored.take([0])


def test_missing_table_or_row_raises_run_error(tmp_path):
    index = save(tmp_path / "c", make_table(), "whole")
    with pytest.raises(RunError, match="did you mean 'item'"):
        StoredTable(str(tmp_path / "c"), index, "items")
    with StoredTable(str(tmp_path / "c"), index, "item") as stored:
        for row in (-1, 1000):
            with pytest.raises(RunError, match=f"table item has no row {row}"):
                stored.take([row])
