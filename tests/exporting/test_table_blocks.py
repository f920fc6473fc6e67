"""Exports whose tables are stored in several blocks."""

from pathlib import Path

import numpy as np
import pytest
import small
from exports import SmallModelCase, train_for_export

import raytrec
from raytrec.checkpoint.index import read_index
from raytrec.checkpoint.rows import StoredTable
from raytrec.common.errors import RunError
from raytrec.common.output_folder import OutputFolder
from raytrec.exporting import trained_model
from raytrec.scoring import stored_tables as table_files


class LargeTables(SmallModelCase):
    """A model whose table `user` takes one and a half blocks of the smallest size; `tag` is in the second."""

    def schema(self):
        tables = {"user": {"rows": 3000, "dim": 8}, "tag": {"rows": 5, "dim": 8}, "wide": {"rows": 7, "dim": 16}}
        sparse = small.SMALL_SCHEMA_PARTS["sparse"] | {"wide": {"table": "wide"}}
        return small.make_small_schema(tables=tables, sparse=sparse)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    model = {"name": "wide_deep", "top_mlp": [6]}
    return train_for_export(LargeTables(model), tmp_path_factory.mktemp("blocks"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(table_files, "MAX_FILE_BYTES", table_files.ALIGNMENT)
    monkeypatch.setattr(trained_model, "PIECE_BYTES", 700 * 32)  # pieces end within blocks


@pytest.mark.slow
def test_interrupted_export_keeps_complete_blocks(trained, tmp_path, monkeypatch):
    folder, *_ = trained
    out, stream = tmp_path / "out", OutputFolder.stream

    def breaking(self, name, partial):
        if name.endswith("dim8-00001.safetensors"):
            raise OSError(28, "No space left on device")
        return stream(self, name, partial)

    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left"):
        patch.setattr(OutputFolder, "stream", breaking)
        raytrec.export(folder, str(out))
    with pytest.raises(RunError, match="no export in this folder"):
        raytrec.load(out)
    block = out / "tables/dim8-00000.safetensors"
    first = block.stat()
    raytrec.export(folder, str(out))
    assert (block.stat().st_ino, block.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    model = raytrec.load(out, check_tables=True)
    (eight,) = [stack for stack in model.manifest.stacks if stack.tables == ["user", "tag"]]
    assert eight.files == ["tables/dim8-00000.safetensors", "tables/dim8-00001.safetensors"]
    assert sorted(path.name for path in Path(out, "tables").iterdir()) == [
        "dim16-00000.safetensors",
        "dim8-00000.safetensors",
        "dim8-00001.safetensors",
    ]
    for name, table in model.manifest.data_schema.tables.items():
        stacked = model.lookups.tables[name]
        with StoredTable(folder, read_index(folder), name) as stored:
            expected = stored.read(0, table.rows)
        rows = stacked.stack._stored[stacked.first_row :][: table.rows]
        assert np.array_equal(rows.numpy(), expected), name
