"""Streams on a real Ray cluster, compared with a direct read of the files, for one to three ranks."""

import threading
import time

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.data._internal.execution.streaming_executor import StreamingExecutor
from waiting import wait_for

from raytrec.common.errors import DataError
from raytrec.config.transforms import Cast
from raytrec.data import stream as stream_module
from raytrec.data.fragments import scan
from raytrec.data.ids import compute_group_keys
from raytrec.data.order import Order
from raytrec.data.read_plans import ReadPlan, ReservedColumnSet, TaskRows
from raytrec.data.stream import Stream

pytestmark = pytest.mark.usefixtures("ray_cluster")
# The row number is also a feature; it identifies the rows of a batch.
ROW = {"row": {"table": "row"}}, {"row": {"rows": 10_000, "dim": 8}}
SCHEMA = parquet.tiny_schema(*ROW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return parquet.write_split(tmp_path_factory.mktemp("stream") / "d", 1003, 0, row_group=90)


@pytest.fixture(scope="module")
def expected_rows(folder):
    """Return (label, price, user, tags) by row number; `row` is numbered across files."""
    rows = pq.read_table(folder).to_pylist()
    return {r["row"]: (r["label"], r["price"], r["user"], r["tags"]) for r in rows}


def list_unpadded_rows(batch):
    """Return the rows of a batch without padding as (row, (label, price, user, tags)), read from the KJT."""
    out = []
    jagged = {key: batch.sparse[key].to_dense() for key in SCHEMA.sparse}
    for i in range(int(batch.weights.sum())):
        user, tags, row = (jagged[key][i].tolist() for key in ("user", "tags", "row"))
        out.append((row[0], (int(batch.labels[i, 0]), float(batch.dense[i, 0]), user[0], tags)))
    for i in range(int(batch.weights.sum()), len(batch.weights)):
        assert batch.weights[i] == 0 and not any(len(jagged[key][i]) for key in jagged)
    return out


def collect_global_batches(folder, order, world, start_step=0, readers=1):
    data = scan(str(folder), ReadPlan(SCHEMA))
    ranks = []
    for rank in range(world):
        stream = Stream(data, order, rank=rank, world=world, readers=readers)
        ranks.append(list(stream.batches(0, start_step)))
    assert len({len(batches) for batches in ranks}) == 1, "ranks take different numbers of steps"
    for batches in zip(*ranks, strict=True):
        assert len({len(b.weights) for b in batches}) == 1, "local sizes differ"
        assert len({b.global_rows for b in batches}) == 1
        assert sum(int(b.weights.sum()) for b in batches) == batches[0].global_rows
    return [[row for b in batches for row in list_unpadded_rows(b)] for batches in zip(*ranks, strict=True)]


def test_weights_keys_and_reserved_stay_with_their_rows(folder, expected_rows):
    """Read on two ranks through Ray's object store; the text column is cast from row numbers."""
    made = Cast(do="cast", columns=["row"], to="string", into=["name"])
    tasks = (TaskRows("label", "a", mask="label"), TaskRows("label", "b", sample_weight="user"))
    reserved = ReservedColumnSet(keys=("row", "name"), columns=("name",))
    data = scan(str(folder), ReadPlan(SCHEMA, transforms=(made,), tasks=tasks, reserved=reserved))
    order, seen = Order(128, 6, "window", 2, seed=3), []
    for rank in range(2):
        for batch in Stream(data, order, rank=rank, world=2).batches():
            here = batch.weights == 1
            rows = batch.keys[here, 0].tolist()
            assert rows == [number for number, _ in list_unpadded_rows(batch)]
            assert batch.reserved.to_pydict() == {"name": [str(number) for number in rows]}
            texts = pa.array([str(number) for number in rows])
            assert batch.keys[here, 1].tolist() == compute_group_keys(texts).tolist()
            expected = [[expected_rows[number][0], expected_rows[number][2]] for number in rows]
            assert batch.task_weights[here].tolist() == expected
            assert not batch.task_weights[~here].any() and not batch.keys[~here].any()
            seen += rows
    assert sorted(seen) == sorted(expected_rows)


def test_every_row_is_read_once_with_its_values(folder, expected_rows):
    order = Order(128, 6, "window", 2, seed=3)
    one = collect_global_batches(folder, order, 1)
    rows = dict(row for batch in one for row in batch)
    assert sum(map(len, one)) == len(rows) == 1003
    for row, (label, price, user, tags) in rows.items():
        assert (label, user, tags) == (expected_rows[row][0], expected_rows[row][2], expected_rows[row][3])
        assert price == pytest.approx(expected_rows[row][1])
    for world in (2, 3):
        others = collect_global_batches(folder, order, world)
        assert [{row for row, _ in b} for b in others] == [{row for row, _ in b} for b in one]
    resumed = collect_global_batches(folder, order, 2, start_step=5)
    assert [{row for row, _ in b} for b in resumed] == [{row for row, _ in b} for b in one[5:]]


@pytest.mark.slow
def test_several_readers_keep_the_order(folder, tmp_path):
    uneven = tmp_path / "d"
    uneven.mkdir()
    table = parquet.make_tiny_table(3000, 0)
    for i, (first, rows) in enumerate([(0, 2900), *((2900 + k, 1) for k in range(100))]):
        pq.write_table(table.slice(first, rows), uneven / f"part-{i:03d}.parquet")  # one slow, many fast
    batches = collect_global_batches(uneven, Order(100, 6, "none"), 1, readers=4)
    assert [row for batch in batches for row, _ in batch] == list(range(3000))


def test_evaluation_handles_fewer_rows_than_ranks(tmp_path):
    folder = parquet.write_split(tmp_path / "d", 2, 0, files=1)
    batches = collect_global_batches(folder, Order.evaluation(64, 6), 3)
    assert [sorted(row for row, _ in batch) for batch in batches] == [[0, 1]]


def test_closing_a_stream_stops_its_thread(folder):
    stream = Stream(scan(str(folder), ReadPlan(SCHEMA)), Order(64, 6), rank=0, world=1, prefetch=1)
    batches = stream.batches()
    next(batches)
    batches.close()
    wait_for(lambda: all(t.name != "stream" for t in threading.enumerate()), "the stream's thread ends")


def test_waiting_stream_does_not_poll(folder, monkeypatch):
    monkeypatch.setattr(stream_module, "BLOCK_BYTES", 1000)
    stream = Stream(scan(str(folder), ReadPlan(SCHEMA)), Order(8, 6), rank=0, world=1, prefetch=1, buffer_bytes=10_000)
    batches, rounds = stream.batches(), []
    next(batches)
    time.sleep(1)  # until the read-ahead buffer is full
    monkeypatch.setattr(StreamingExecutor, "update_metrics", lambda *_: rounds.append(time.monotonic()))
    time.sleep(1)
    assert 1 <= len(rounds) <= 12, "Ray Data's executor polls its tasks without a pause"
    rows = [row for batch in batches for row in batch.sparse["row"].values().tolist()]
    assert len(set(rows)) == 1003 - 8


def test_stream_raises_data_error_for_an_invalid_value(folder):
    schema = parquet.tiny_schema(ROW[0], {"row": {"rows": 900, "dim": 8}})
    stream = Stream(scan(str(folder), ReadPlan(schema)), Order(64, 6), rank=0, world=1)
    with pytest.raises(DataError, match="of feature 'row' is out of range for table 'row'") as error:
        list(stream.batches())
    assert "File " not in str(error.value) and "ray::" not in str(error.value), "Ray's traceback is shown"
