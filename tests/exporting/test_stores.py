"""Exports and request logs on object stores: s3:// and gs://, over HTTP on loopback."""

import gc
import shutil
import tempfile
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import object_stores
import pyarrow.parquet as pq
import pytest
from exports import train_for_export
from test_models import ModelCase

import raytrec
from raytrec.common.errors import RunError
from raytrec.common.output_folder import OutputFolder
from raytrec.common.processes import get_owner_name
from raytrec.common.storage import open_filesystem
from raytrec.serving.batching import VersionedScores
from raytrec.serving.bodies import Query
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.serving.request_log import RequestLog
from raytrec.skew.compare import skew

pytestmark = [pytest.mark.survive, pytest.mark.processes]


@pytest.fixture(scope="module")
def local_export(tmp_path_factory):
    """Return a checkpoint, its export on disk and the rows."""
    root = tmp_path_factory.mktemp("stores")
    folder, table, _, _ = train_for_export(ModelCase("two_tower", (1, 1)), root)
    return folder, Path(raytrec.export(folder, str(root / "export")).path), table


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request):
    with {"s3": object_stores.run_s3_store, "gs": object_stores.run_gcs_store}[request.param]() as uri:
        yield uri


@pytest.fixture
def copy_folder(tmp_path, monkeypatch):
    """Return the folder that receives local copies."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def read_stored_files(uri):
    """Return the bytes of every file by name."""
    filesystem, path = open_filesystem(uri)
    return {name: filesystem.open_input_stream(f"{path}/{name}").read() for name in OutputFolder(uri).list_names()}


def test_interrupted_store_export_continues_where_it_stopped(bucket, local_export, monkeypatch):
    folder, local, _ = local_export
    left, stream, out = [0], OutputFolder.stream, f"{bucket}/interrupted"

    @contextmanager
    def breaking(self, name, partial):
        left[0] -= 1
        if left[0] < 0 and name.endswith(".json"):  # small files are sent at once
            raise OSError("the connection broke")
        with stream(self, name, partial) as file:
            if left[0] < 0:
                file.write(b"the beginning")
                raise OSError("the connection broke")
            yield file

    monkeypatch.setattr(OutputFolder, "stream", breaking)
    tries = 0
    while "manifest.json" not in OutputFolder(out).list_names():
        left[0], tries = 3, tries + 1
        assert tries < 20, "complete files were not kept"
        try:
            raytrec.export(folder, out)
        except RunError as error:
            assert "the connection broke" in error.what
            with pytest.raises(RunError, match="no export in this folder"):
                raytrec.load(out)
    assert tries > 3
    gc.collect()  # closes the interrupted stream
    found, expected = read_stored_files(out), read_stored_files(str(local))
    assert found.keys() == expected.keys()
    tables = [name for name in found if name.startswith("tables/")]
    assert tables and all(found[name] == expected[name] for name in tables)


def test_store_export_scores_like_disk_and_leaves_no_copy(bucket, local_export, copy_folder):
    folder, local, table = local_export
    uri = raytrec.export(folder, f"{bucket}/whole").path
    model, expected = raytrec.load(uri, check_tables=True), raytrec.load(local).predict(table)
    (copy,) = copy_folder.iterdir()
    left = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert "predict.pt2" in left and not any(name.startswith("tables") for name in left)
    for name in expected.column_names:
        np.testing.assert_allclose(model.predict(table)[name], expected[name], rtol=1e-6, atol=1e-6)
    del model
    gc.collect()
    assert not list(copy_folder.iterdir())
    assert read_stored_files(uri).keys() == read_stored_files(str(local)).keys()  # the store's own files stay


def test_failed_copy_names_the_cause_and_leaves_no_files(bucket, local_export, copy_folder, monkeypatch):
    uri = raytrec.export(local_export[0], f"{bucket}/damaged").path
    OutputFolder(uri).delete("predict.pt2")
    with pytest.raises(RunError, match=r"predict.pt2 cannot be copied"):
        raytrec.load(uri)
    usage = namedtuple("usage", ["total", "used", "free"])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(10_000, 0, 10_000))
        with pytest.raises(RunError, match=r"needs .*, but only 9.77 KiB are free") as caught:
            raytrec.load(uri)
    assert caught.value.where == str(copy_folder) and "TMPDIR" in caught.value.do
    assert not list(copy_folder.iterdir())
    with pytest.raises(RunError, match="no export in this folder"):
        raytrec.load(f"{bucket}/nowhere")


def test_copies_of_killed_processes_are_removed(bucket, local_export, copy_folder):
    uri = raytrec.export(local_export[0], f"{bucket}/again").path
    host = get_owner_name().rpartition("-")[0]
    for name in (
        f"raytrec-export-{host}-999999999-abc",
        f"raytrec-export-{get_owner_name()}-abc",
        "raytrec-export-other",
    ):
        (copy_folder / name).mkdir()
    model = raytrec.load(uri)
    names = {path.name for path in copy_folder.iterdir()}
    assert f"raytrec-export-{get_owner_name()}-abc" in names and "raytrec-export-other" in names
    assert len(names) == 3 and model


def test_request_log_is_written_to_and_read_from_a_store(bucket, local_export):
    _, local, table = local_export
    model, figures = raytrec.load(local), ReplicaMetrics()
    query = Query(model, "predict", table)
    log = RequestLog(f"{bucket}/log", 1.0, "writer", figures)
    log.offer("/predict", query, VersionedScores(query.score([table]), model.version))
    log.close()
    assert [each._value.get() for each in (figures.logged, figures.not_logged)] == [len(table), 0]
    filesystem, path = open_filesystem(f"{bucket}/data")
    pq.write_table(table, f"{path}/rows.parquet", filesystem=filesystem)
    found = skew(f"{bucket}/log", str(local), data=f"{bucket}/data").metrics
    assert found["rows"] == found["data_rows"] == len(table) and not found["differs"]


def test_unreachable_export_store_raises_a_clear_error(local_export, monkeypatch):
    for name, value in (object_stores.S3_CREDENTIALS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=r"manifest.json of the export cannot be read: .*onnect"):
        raytrec.load("s3://bucket/export")
    with pytest.raises(RunError, match=r"the export cannot be written: .*onnect"):
        raytrec.export(local_export[0], "s3://bucket/export")


def test_paths_keep_the_query_of_their_uri(local_export, copy_folder, tmp_path):
    """Training data, a run's checkpoints and exports whose URI names a region."""
    from raytrec.checkpoint.files import find_newest_checkpoint, get_step_folder
    from raytrec.common.storage import find_sibling_parts, find_train_folder

    folder, _, rows = local_export
    with object_stores.run_s3_store() as bucket:
        query = "?region=us-east-1"
        filesystem, path = open_filesystem(bucket)
        for name in ("data/train/a.parquet", "data/test/a.parquet", "run/checkpoints/step-0000000001/part"):
            filesystem.open_output_stream(f"{path}/{name}").close()
        assert find_train_folder(f"{bucket}/data{query}") == f"{bucket}/data/train{query}"
        assert find_sibling_parts(f"{bucket}/data/train{query}") == {"test": f"{bucket}/data/test{query}"}
        assert get_step_folder(f"{bucket}/run{query}", 1) == f"{bucket}/run/step-0000000001{query}"
        assert find_newest_checkpoint(f"{bucket}/run/checkpoints{query}")[0] is None
        out = f"{bucket}/export{query}"
        raytrec.export(folder, out)
        assert "manifest.json" in OutputFolder(out).list_names()
        assert raytrec.load(out).predict(rows).num_rows == rows.num_rows
