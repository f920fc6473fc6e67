"""Output folders of recipes: complete or absent, reused if unchanged, and never overwritten by mistake."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raytrec_datasets.writing import Output, SplitWriter
from recipes import run_recipe

from raytrec.common.errors import ConfigError


def run(out, *arguments):
    return run_recipe("synthetic", "--rows", 500, "--out", out, *arguments)


def test_prepared_dataset_is_reused_or_replaced_by_force(tmp_path):
    out, other = tmp_path / "out", ("--seed", 1, "--dim", 8)
    assert run(out).exit_code == 0
    before = (out / "schema.yaml").stat().st_mtime_ns
    assert run(out).exit_code == 0
    assert (out / "schema.yaml").stat().st_mtime_ns == before, "the dataset was written again"
    error = run(out, *other).exception
    assert isinstance(error, ConfigError)
    assert "dim was 16, now 8, seed was 0, now 1" in str(error) and "--force" in str(error)
    assert run(out, *other, "--force").exit_code == 0
    assert "dim: 8" in (out / "schema.yaml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("width", [0, 6, 2**17])
def test_unsupported_width_is_refused_before_writing(tmp_path, width):
    result = run(tmp_path / "out", "--dim", width)
    assert result.exit_code == 2 and "'--dim'" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("marker", [None, "not json", "[]", "{}"])
def test_force_keeps_folders_not_created_by_a_recipe(tmp_path, marker):
    (tmp_path / "thesis.txt").write_text("years of work")
    if marker:
        (tmp_path / "prepared.json").write_text(marker)
    for force in ([], ["--force"]):
        result = run(tmp_path, *force)
        assert isinstance(result.exception, ConfigError) and "is not a prepared dataset" in str(result.exception)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_source_inside_the_output_folder_is_rejected(tmp_path):
    output = Output(tmp_path, "criteo", {"source": str(tmp_path / "raw")}, force=True)
    with pytest.raises(ConfigError, match="--source is inside"):
        output.is_ready()
    output = Output(tmp_path, "interactions", {"source": "/x", "item_features": str(tmp_path / "i.csv")}, force=True)
    with pytest.raises(ConfigError, match="--item-features is inside"):
        output.is_ready()


def test_interrupted_recipe_leaves_no_files(tmp_path):
    output = Output(tmp_path / "out", "any", {}, force=False)
    with pytest.raises(KeyboardInterrupt), output:
        (output.partial / "half").write_text("written")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_row_group_sizes_do_not_depend_on_write_calls(tmp_path):
    table = pa.table({"x": pa.array(range(1050))})
    writer = SplitWriter(tmp_path, table.schema, group_rows=100, file_rows=400)
    for start, stop in ((0, 30), (30, 430), (430, 431), (431, 1050)):
        writer.write(table.slice(start, stop - start))
    writer.close()
    files = sorted(tmp_path.glob("part-*.parquet"))
    groups = [[meta.row_group(i).num_rows for i in range(meta.num_row_groups)] for meta in map(pq.read_metadata, files)]
    assert groups == [[100] * 4, [100] * 4, [100, 100, 50]]
    assert pq.read_metadata(files[0]).row_group(0).column(0).compression == "ZSTD"
    assert pa.concat_tables(map(pq.read_table, files))["x"].to_pylist() == list(range(1050))
    assert writer.rows == 1050
