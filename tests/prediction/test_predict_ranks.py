"""Predictions of real ranks without Ray: every row once, in order, and bitwise reproducible."""

import math
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loop import FakeHeartbeat, RecordedMessages
from ranks import run_on_ranks

from raytrec.prediction.folder import PredictionFolder

BATCH = 40  # rows per rank and batch


def read_items_locally(stream, items):
    """Replace Stream._tables and read without Ray."""
    from raytrec.data.item_reader import read_item

    yield from (read_item(item, stream.dataset.form, stream.faults) for item in items)


def make_prediction_task(folder, dataset, out):
    """Return the task that the driver would send to the workers."""
    from raytrec.prediction.folder import Manifest, PredictionTask
    from raytrec.prediction.inputs import CarriedColumns

    rows = Counter()
    for group in dataset.groups:
        rows[group.path] += group.rows
    about = {"run": "r", "checkpoint": "c", "checkpoint_id": "1", "data": "in", "input": "2", "rules": {}}
    manifest = Manifest(scores=["score"], columns=["row"], **about)
    return PredictionTask(str(out), str(folder), rows, CarriedColumns(("row",)), manifest, BATCH, 200)


def predict(rank, world, folder, out, fail_after=math.inf, restart_after=None):
    """Run predict_worker on one rank with the initial weights of a new run; return the messages of rank 0.

    Args:
        fail_after: Number of spans that all ranks together write before they fail.
        restart_after: Number of batches after which rank 1 receives the restart command.
    """
    import torch

    from raytrec.common.messages import Command
    from raytrec.config.run_config import load_config
    from raytrec.config.schema import Schema
    from raytrec.data.fragments import scan
    from raytrec.data.read_plans import ReadPlan
    from raytrec.data.stream import Stream
    from raytrec.prediction import worker
    from raytrec.worker import build
    from raytrec.worker.build import build_step
    from raytrec.worker.context import WorkerContext, WorkerTask

    config = load_config(parquet.config_values(folder, folder / "run"))
    schema = Schema.load(folder / "schema.yaml")
    dataset = scan(str(folder / "test"), ReadPlan(schema, read_labels=False))
    said = RecordedMessages()
    task = WorkerTask(config, schema, {"predict": dataset}, said, "")
    context = WorkerContext(rank, world, torch.device("cpu"), task, FakeHeartbeat(), 0)
    context.heartbeat.close = lambda: None

    def counted(batches, after="step"):
        for number, batch in enumerate(batches):
            if number == restart_after and rank == 1:
                context.heartbeat.command = Command.RESTART
            yield batch

    context.heartbeat.count_batches = counted

    def fresh(context, objective):
        return build_step(config, schema, context.device, objective=objective)[0]

    writing = PredictionFolder.open_parquet_writer

    def failing(self, *what):
        if len(list_parquet_files(out)) >= fail_after:
            raise OSError(28, "no space")
        return writing(self, *what)

    with (
        patch.object(WorkerContext, "enter", lambda task: context),
        patch.object(Stream, "_tables", read_items_locally),
        patch.object(build, "load_step", fresh),
        patch.object(PredictionFolder, "open_parquet_writer", failing),
    ):
        worker.predict_worker(make_prediction_task(folder / "test", dataset, out), task)
    return list(said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write files with one span, several spans, one row, and large row groups."""
    base = tmp_path_factory.mktemp("predict")
    (base / "test" / "day=1").mkdir(parents=True)
    (base / "schema.yaml").write_text(parquet.SCHEMA_YAML)
    whole = parquet.make_tiny_table(1300, 5)
    for name, first, rows, group in (
        ("a.parquet", 0, 120, 120),
        ("b.parquet", 120, 700, 90),
        ("day=1/c.parquet", 820, 1, 1),
        ("day=1/d.parquet", 821, 479, 300),
    ):
        pq.write_table(whole.slice(first, rows).drop(["label"]), base / "test" / name, row_group_size=group)
    return base


def list_parquet_files(out):
    return {str(path.relative_to(out)): path for path in sorted(Path(out).rglob("*.parquet"))}


def read_parquet_bytes(out):
    """Return the bytes of every Parquet file by name."""
    return {name: path.read_bytes() for name, path in list_parquet_files(out).items()}


@pytest.fixture(scope="module")
def undisturbed_outputs(folder, tmp_path_factory):
    """Return the outputs of one rank without failures, whose scores test_scores.py checks."""
    out = tmp_path_factory.mktemp("whole")
    run_on_ranks(1, predict, folder, out)
    return read_parquet_bytes(out)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_predict_every_row_once_and_in_order(folder, undisturbed_outputs, tmp_path, world):
    said = run_on_ranks(world, predict, folder, tmp_path)[0]
    names = ["a.parquet", "b.parquet", "day=1/c.parquet", "day=1/d.parquet"]
    assert read_parquet_bytes(tmp_path) == undisturbed_outputs and [*undisturbed_outputs] == names
    rows = pa.concat_tables([pq.ParquetFile(tmp_path / name).read() for name in names])
    assert rows.column_names == ["row", "score"]
    assert rows["row"].to_pylist() == list(range(1300))
    (result,) = [m for m in said if m["kind"] == "result"]
    assert result["predicted"] == 1300 and result["world_size"] == world


def assert_continued(folder, out, world, expected):
    """Predict into a folder again, and assert that complete files are kept and the outputs are as expected."""
    before = {name: path.stat().st_mtime_ns for name, path in list_parquet_files(out).items()}
    run_on_ranks(world, predict, folder, out)
    PredictionFolder(str(out)).sweep()  # as the driver does; a killed rank may leave files
    assert read_parquet_bytes(out) == expected and not list(out.rglob("*.tmp"))
    complete = {name for name in before if not name.startswith("_")}
    assert all((out / name).stat().st_mtime_ns == before[name] for name in complete)


@pytest.mark.slow
@pytest.mark.parametrize("fail_after", [0, 2, 4])
def test_continued_predictions_are_bitwise_equal(folder, undisturbed_outputs, tmp_path, fail_after):
    with pytest.raises(RuntimeError, match="predictions cannot be written"):
        run_on_ranks(2, predict, folder, tmp_path, fail_after)
    assert len(list_parquet_files(tmp_path)) >= fail_after and not list(tmp_path.rglob("*.tmp"))
    assert_continued(folder, tmp_path, 2, undisturbed_outputs)


@pytest.mark.slow
def test_restarted_group_keeps_written_spans(folder, undisturbed_outputs, tmp_path):
    """Only one rank receives the restart command. The next group has another number of ranks."""
    with pytest.raises(RuntimeError, match=r"Restart: after 1\d of \d+ batches"):
        run_on_ranks(2, predict, folder, tmp_path, math.inf, 12)
    assert list_parquet_files(tmp_path)
    assert_continued(folder, tmp_path, 3, undisturbed_outputs)
