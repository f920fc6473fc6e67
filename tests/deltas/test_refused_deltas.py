"""Deltas that do not fit a consumer are refused with their number and the reason."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from checkpoints import flip_lowest_bit
from deltas import STREAM, DeltaFolder, make_row_table

from raytrec.common.errors import ConfigError, RunError
from raytrec.config.schema import Schema
from raytrec.deltas.apply import read_delta
from raytrec.deltas.chain import Position, check_gap, find_position, read_next
from raytrec.deltas.format import format_number, read_delta_manifest
from raytrec.exporting.apply_deltas import _read_chain
from raytrec.scoring.manifest import ExportSource
from raytrec.serving.command import check_is_stream

SCHEMA = Schema.parse(
    {
        "labels": ["y"],
        "dense": [],
        "sparse": {"user": {"table": "user"}, "item": {"table": "item"}},
        "tables": {"user": {"rows": 9, "dim": 4}, "item": {"rows": 7, "dim": 4, "ids": "managed"}},
    },
    "refused",
)
WEIGHTS = {"model.w": torch.zeros(2, 3), "model.b": torch.zeros(2)}
ROWS = {"user": (np.array([1, 3]), np.ones((2, 4), np.float32)), "item": (np.array([5]), np.ones((1, 4), np.float32))}
IDS = {"item": {2: 10**18, 3: None}}


@pytest.fixture
def folder(tmp_path):
    folder = DeltaFolder.of_schema(tmp_path, SCHEMA)
    folder.write(1, 10, dense=WEIGHTS)
    return folder


def read_second(folder, weights=WEIGHTS):
    start = Position("films", *read_delta_manifest(str(folder.path), 1))
    following = read_next(str(folder.path), start)
    return following and read_delta(str(folder.path), following, SCHEMA, weights)


def write_second(folder, rows=ROWS, ids=IDS, dense=WEIGHTS, **options):
    folder.write(2, 20, rows, ids, dense, **options)


def replace(operation, change):
    """Return a function that changes the Arrow table of an operation."""
    return lambda tables: tables | {operation: change(tables[operation])}


def with_row(row, table="user"):
    return {table: (np.array([row]), np.ones((1, 4), np.float32))}


def with_values(*values):
    return {"user": (np.array([1]), np.array([values], np.float32))}


def with_null(table):
    columns = [table.column(0), pa.array([None] * len(table), pa.int64()), table.column(2), table.column(3)]
    return pa.Table.from_arrays(columns, schema=table.schema)


def read_table(column, width, twice=False):
    piece = make_row_table({"user": (np.array([1] * (1 + twice)), np.ones((1 + twice, width), np.float32))})
    return piece.set_column(2, piece.schema.field(2), pa.array([column] * len(piece), pa.int32()))


INVALID = {
    "another run": ({"stream": "other"}, "it belongs to another run: stream other"),
    "another parent": ({"parent": "0" * 64}, "it does not continue delta 1: parent 00000000"),
    "a large row": ({"rows": with_row(9)}, "row 9 is not in table user"),
    "a negative row": ({"rows": with_row(-1)}, "row -1 is not in table user"),
    "NaN": ({"rows": with_values(1, np.nan, 1, 1)}, "row 1 of table user contains NaN or infinity"),
    "infinity": ({"rows": with_values(1, 1, np.inf, 1)}, "row 1 of table user contains NaN or infinity"),
    "a row twice": (
        {"change": replace("rows", lambda _: read_table(0, 4, True))},
        "a row of table user has two values for a column",
    ),
    "some columns": (
        {"change": replace("rows", lambda _: read_table(0, 3))},
        "row 1 of table user has no values for some columns",
    ),
    "other columns": (
        {"change": replace("rows", lambda _: read_table(2, 4))},
        r"columns \[2, 6\) are not columns of table user",
    ),
    "negative columns": (
        {"change": replace("rows", lambda _: read_table(-1, 4))},
        r"columns \[-1, 3\) are not columns of table",
    ),
    "no columns": (
        {"change": replace("rows", lambda _: read_table(0, 0))},
        r"columns \[0, 0\) are not columns of table user",
    ),
    "null rows": ({"change": replace("rows", with_null)}, "a column other than id contains null"),
    "another operation": ({"change": lambda tables: tables | {"rows": tables["ids"]}}, "the Arrow schema or its meta"),
    "another version": (
        {"change": replace("rows", lambda table: table.replace_schema_metadata({"raytrec.version": "2"}))},
        "the Arrow schema or its metadata differs",
    ),
    "an id of a fallback row": ({"ids": {"item": {6: 3}}}, "row 6 is not in table item, which has 6"),
    "an id of a static table": ({"ids": {"user": {1: 3}}}, "table user has no managed ids"),
    "a missing weight": ({"dense": {"model.w": WEIGHTS["model.w"]}}, "weight model.b is missing"),
    "an unknown weight": ({"dense": WEIGHTS | {"model.x": torch.zeros(1)}}, "weight 'model.x' is not in the export"),
    "another shape": ({"dense": WEIGHTS | {"model.w": torch.zeros(3, 2)}}, r"weight model.w is float32 \[3, 2\]"),
    "another dtype": ({"dense": WEIGHTS | {"model.b": torch.zeros(2).double()}}, "weight model.b is float64"),
    "a weight that is NaN": (
        {"dense": WEIGHTS | {"model.b": torch.tensor([1, np.nan])}},
        "weight model.b contains NaN",
    ),
    "a larger table": ({"tables": {"user": {"rows": 10, "dim": 4}}}, "table user has 10 rows of dim 4 instead of 9"),
    "a missing table": ({"tables": {"user": {"rows": 9, "dim": 4}}}, "table item is missing in the manifest"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_invalid_delta_is_refused(folder, fault):
    options, reason = INVALID[fault]
    write_second(folder, **options)
    with pytest.raises(RunError, match=f"delta 2 cannot be applied: .*{reason}") as error:
        read_second(folder)
    assert error.value.where == str(folder.manifest(2)) and "full export" in error.value.do


def test_valid_delta_is_read(folder):
    write_second(folder, column_parts=2)
    delta = read_second(folder)
    assert delta.rows["user"].rows.tolist() == [1, 3] and delta.rows["user"].values.eq(1).all()
    assert [each.tolist() for each in delta.ids["item"]] == [[2, 3], [10**18], [2]]
    assert delta.dense.keys() == WEIGHTS.keys()


def test_tables_that_the_export_lacks_are_ignored(folder):
    folder.tables |= {"other": {"rows": 3, "dim": 2}}
    write_second(folder, ROWS | {"other": (np.array([1]), np.ones((1, 2), np.float32))}, IDS | {"other": {1: 5}})
    assert read_second(folder).rows.keys() == {"user", "item"}


@pytest.mark.parametrize("operation", ["rows", "ids", "dense"])
def test_damaged_files_are_refused(folder, operation):
    write_second(folder)
    file = folder.file(2, operation)
    content = file.read_bytes()
    for damage, words in (
        (lambda: flip_lowest_bit(file, len(content) // 2), "the file differs from its checksum"),
        (lambda: file.write_bytes(content[:-9]), f"the path is not a file of {len(content):,} bytes"),
    ):
        damage()
        with pytest.raises(RunError, match=f"delta 2 cannot be applied: .*{operation}.arrow: {words}"):
            read_second(folder)
        file.write_bytes(content)
    assert read_second(folder)
    file.unlink()
    with pytest.raises(RunError, match=f"{operation}.arrow: the file is missing"):
        read_second(folder)


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"ARROW1\0\0" + bytes(64), bytes(range(256)) * 9])
def test_files_that_are_not_arrow_are_refused(folder, content):
    write_second(folder)
    folder.file(2, "rows").write_bytes(content)
    rewrite_manifest(folder)
    with pytest.raises(RunError, match=r"delta 2 cannot be applied: .*rows.arrow: "):
        read_second(folder)


def rewrite_manifest(folder):
    """Write the manifest of delta 2 again with the checksums of its files."""
    manifest = json.loads(folder.manifest(2).read_text())
    for files in manifest["files"].values():
        for name, entry in files.items():
            content = (folder.manifest(2).parent / name).read_bytes()
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    folder.manifest(2).write_text(json.dumps(manifest))


def test_compressed_files_are_refused(folder):
    write_second(folder)
    table = pa.ipc.open_file(str(folder.file(2, "rows"))).read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(folder.file(2, "rows")), table.schema, options=options) as writer:
        writer.write_table(table)
    rewrite_manifest(folder)
    with pytest.raises(RunError, match="the buffers are compressed"):
        read_second(folder)


def test_weights_may_keep_infinity(folder):
    weights = WEIGHTS | {"model.mask": torch.tensor([0.0, -torch.inf])}
    write_second(folder, dense=weights)
    assert read_second(folder, weights).dense["model.mask"].tolist() == [0.0, -torch.inf]


@pytest.mark.parametrize("manifest", [b"{", b"[]", b"{}", b"\xff" * 9])
def test_damaged_manifest_is_refused(folder, manifest):
    write_second(folder)
    folder.manifest(2).write_bytes(manifest)
    with pytest.raises(RunError, match="delta 2 cannot be applied: the manifest cannot be read"):
        read_second(folder)


def test_files_outside_of_the_folder_are_refused(folder):
    write_second(folder)
    for name in ("../x", "000000000002-a/../../x", "/etc/passwd", "000000000001-a/rows.arrow"):
        content = folder.manifest(2).read_text().replace(f"{format_number(2)}-a/rows.arrow", name)
        folder.manifest(2).write_text(content)
        with pytest.raises(RunError, match="is not a file of delta 2"):
            read_second(folder)
        write_second(folder)


def test_repeated_delta_is_refused(folder):
    folder.manifest(2).write_bytes(folder.manifest(1).read_bytes())
    with pytest.raises(RunError, match=r"delta 2 cannot be applied: .*the file contains delta 1"):
        read_second(folder)


def test_gaps_are_refused(folder):
    start = Position("films", *read_delta_manifest(str(folder.path), 1))
    assert read_second(folder) is None
    check_gap(str(folder.path), start)
    write_second(folder)
    folder.write(3, 30, dense=WEIGHTS)
    check_gap(str(folder.path), start)
    folder.manifest(2).unlink()
    with pytest.raises(RunError, match="delta 2 cannot be applied: it is missing, but delta 3 exists"):
        check_gap(str(folder.path), start)
    folder.manifest(3).unlink()
    folder.manifest(1).unlink()
    with pytest.raises(RunError, match="it is missing, and delta 1 has been removed"):
        check_gap(str(folder.path), start)

    (folder.path / "stream.json").unlink()
    with pytest.raises(RunError, match="the folder no longer contains the deltas of the run"):
        check_gap(str(folder.path), start)


def test_only_folders_of_deltas_are_followed(folder, tmp_path):
    check_is_stream(str(folder.path))
    check_is_stream(str(tmp_path / "missing"))
    for name in (".hidden", "lost+found", "stream.json.owner.tmp"):
        (tmp_path / "empty" / name).mkdir(parents=True)
    check_is_stream(str(tmp_path / "empty"))
    for name, content, message in (
        ("export", "manifest.json", "contains an export, not deltas"),
        ("data", "part-0.parquet", "contains other files, but no deltas"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / content).touch()
        with pytest.raises(RunError, match=message):
            check_is_stream(str(tmp_path / name))
    for wrong in (folder.path / "deltas", tmp_path / "data" / "part-0.parquet"):
        with pytest.raises(RunError, match=r"contains other files|the path is a file"):
            check_is_stream(str(wrong))


def test_position_names_run_step_and_delta(folder):
    found = Position("my films", *read_delta_manifest(str(folder.path), 1))
    assert found.version == f"my_films-10-{folder.checksums[1][:8]}" and found.manifest.stream == STREAM


def test_export_must_belong_to_one_delta(folder):
    folder.write(2, 10, dense=WEIGHTS)
    folder.write(3, 30, dense=WEIGHTS)
    source = ExportSource(run="films", step=10, checkpoint="", checkpoint_id="", raytrec="", torch="")
    place, third = str(folder.path), source.model_copy(update={"step": 30})
    assert find_position(place, "films-export", third).number == 3
    assert find_position(place, f"{place}/exports/{format_number(2)}", source).number == 2
    for wrong, found in ((source, "deltas 1, 2 lead"), (source.model_copy(update={"step": 20}), "no readable")):
        with pytest.raises(RunError, match=f"{found}.* to step {wrong.step} of the export"):
            find_position(place, "films-export", wrong)
    start = find_position(place, f"{place}/exports/{format_number(1)}", source)
    assert [each.number for each in _read_chain(place, start, None)] == [1, 2, 3]
    assert [each.number for each in _read_chain(place, start, 2)] == [1, 2]
    for number in (4, 0):
        with pytest.raises(ConfigError, match=f"there is no delta {number} after delta 1"):
            _read_chain(place, start, number)
