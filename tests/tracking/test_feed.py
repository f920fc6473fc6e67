"""Every line of a run folder is delivered to MLflow exactly once, despite killed drivers, store outages,
a full disk and torn lines."""

import json
import os
import signal
import sqlite3
from contextlib import closing
from random import Random
from time import perf_counter, sleep

import disks
import pytest
import recorded
import tracked

from raytrec.cli import main
from raytrec.common import messages
from raytrec.common.errors import RunError
from raytrec.driver.recorder import Record
from raytrec.driver.track import track
from raytrec.tracking.delivery import Delivery
from raytrec.tracking.journal import append_line
from raytrec.tracking.mlflow_records import DELIVERY_STATE_FILE, DeliveryState, RecordReader

RANKS = 2


def make_message(kind, step):
    """Return a message that differs from all others of its kind."""
    if kind == "train":
        return messages.Train(step=step, unix_s=1e9 + step, figures={"loss": 1 / step})
    if kind == "check":
        found = {"passed": step % 7 != 0, "figure": step / 10, "limit": 1.0, "text": ""}
        return messages.Outcome(check="parity", step=step, unix_s=1e9 + step, **found)
    line = recorded.rank_line(["user"], kind, RANKS, 100 * step, unix_s=1e9 + step)
    return messages.RankLine(**line | {"seconds": float(step)})


def make_messages(first, last):
    """Return the messages of steps first … last - 1: figures, a check, and a line of each rank."""
    kinds = ("train", "check", *range(RANKS))
    return [make_message(kind, step) for step in range(first, last) for kind in kinds]


def append_messages(folder, first, last):
    for each in make_messages(first, last):
        append_line(folder, each)


def list_expected_metrics(steps):
    """Return the expected (step, value, ms) of one or more metrics per kind of line."""
    ms = {step: round((1e9 + step) * 1000) for step in steps}
    return {
        "train/loss": [(step, 1 / step, ms[step]) for step in steps],
        "watch/check/parity": [(step, float(step % 7 != 0), ms[step]) for step in steps],
        "watch/check/parity_figure": [(step, step / 10, ms[step]) for step in steps],
        **{f"watch/rank/{r}/step_ms": [(100 * s, 10.0 * s, ms[s]) for s in steps] for r in range(RANKS)},
        "watch/table/user/lookups": [(100 * step, 200.0, ms[step]) for step in steps],
    }


def assert_delivered_once(uri, run_id, steps):
    """Assert that every line of these steps is stored exactly once."""
    expected = list_expected_metrics(steps)
    assert {name: tracked.metric_history(uri, run_id, name) for name in expected} == expected


@pytest.fixture(scope="module")
def feed_store_uri(tmp_path_factory):
    """Return the URI of a store whose tables exist."""
    place = tmp_path_factory.mktemp("feed")
    uri = f"sqlite:///{place}/mlflow.db"
    make_feed_delivery(uri, place / "first").finish("FINISHED", 60)
    return uri


def make_feed_delivery(uri, folder):
    values = {"run": {"name": folder.name}, "tracking": {"uri": uri, "experiment": "feed"}}
    return Delivery(folder, tracked.write_tracked_config(folder, values), print)


def check_next_delivery(uri, folder, steps):
    """Deliver the missing lines and check that every line is stored exactly once."""
    delivery = make_feed_delivery(uri, folder)
    assert delivery.finish("FINISHED", 60) is None
    assert_delivered_once(uri, delivery.run_id, steps)
    return delivery.run_id


def run_killed_driver(uri, folder, first, last, dies_after, told):
    """Run a driver that is killed after `dies_after` writes, before it records the last write."""
    from raytrec.tracking.store import Store

    writes, write = [], Store.write_metrics

    def counted(self, records):
        write(self, records)
        writes.extend(["train"] * any("train/loss" in record.figures for record in records))
        if dies_after and len(writes) == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    Store.write_metrics = counted
    delivery = make_feed_delivery(uri, folder)
    delivery.deliver()
    told.put(delivery.run_id)
    for step in range(first, last):
        append_messages(folder, step, step + 1)
        sleep(0.05)
        if step % 10 == 0:
            delivery.deliver()
    delivery.finish("FINISHED", 60)


def start_driver(processes, *args):
    """Start a driver process that adds and delivers lines; return it with its MLflow run id."""
    told = processes.Queue()
    process = processes.Process(target=run_killed_driver, args=(*args, told), daemon=True)
    process.start()
    return process, told.get(timeout=120)


@pytest.mark.survive
def test_driver_killed_before_its_note_delivers_lines_once(feed_store_uri, tmp_path, preloaded_processes):
    folder = tmp_path / "between"
    folder.mkdir()
    process, run_id = start_driver(preloaded_processes, feed_store_uri, folder, 1, 200, 2)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    noted = DeliveryState.read(folder)
    last = complete_last_step(folder)
    written = {step for step, _, _ in tracked.metric_history(feed_store_uri, run_id, "train/loss")}
    lines = (folder / messages.METRICS).read_bytes()[: noted.offsets[messages.METRICS]].count(b"\n")
    assert 0 < lines < len(written), "the store has no more lines than the note"
    assert noted.run_id == run_id and last < 200
    append_messages(folder, last + 1, last + 20)  # as a resumed run does
    assert check_next_delivery(feed_store_uri, folder, range(1, last + 20)) == run_id


@pytest.mark.survive
def test_killed_drivers_and_locked_store_deliver_lines_once(feed_store_uri, tmp_path, preloaded_processes):
    """Kill a driver while the sqlite file is locked for 2 s, then run another driver for 1 s."""
    folder, random = tmp_path / "anywhere", Random(0)
    folder.mkdir()
    process, run_id = start_driver(preloaded_processes, feed_store_uri, folder, 1, 400, 0)
    sleep(1 + random.random())
    with closing(sqlite3.connect(feed_store_uri.removeprefix("sqlite:///"), isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        sleep(2)
        process.kill()
        process.join(30)
    done = complete_last_step(folder)
    assert count_undelivered_lines(folder) > 8, "the driver was not behind while the store was locked"
    process, again = start_driver(preloaded_processes, feed_store_uri, folder, done + 1, 400, 0)
    sleep(1 + random.random())
    process.kill()
    process.join(30)
    done = complete_last_step(folder)
    assert check_next_delivery(feed_store_uri, folder, range(1, done + 1)) == run_id == again


def complete_last_step(folder):
    """Append the missing lines of the step in which a driver was killed and return that step."""
    counts = [len((folder / name).read_text().splitlines()) for name in ("metrics.jsonl", "checks.jsonl")]
    of_ranks = len((folder / "ranks.jsonl").read_text().splitlines())
    done = counts[0]
    missing = ["check"] * (done - counts[1]) + list(range(of_ranks - RANKS * (done - 1), RANKS))
    for kind in missing:
        append_line(folder, make_message(kind, done))
    return done


def count_undelivered_lines(folder):
    noted = DeliveryState.read(folder).offsets
    return sum(
        (folder / name).read_bytes()[noted.get(name, 0) :].count(b"\n")
        for name in ("metrics.jsonl", "checks.jsonl", "ranks.jsonl")
    )


def read_records(feed):
    """Return all records that are ready for delivery."""
    found = []
    while batch := feed.next_batch():
        found += batch.records
        feed.mark_batch_written()
    return found


@pytest.mark.slow
def test_reader_skips_incomplete_lines_of_a_lost_group(tmp_path):
    """One rank's line is missing, then another driver starts and counts attempts from 0 again."""
    append_messages(tmp_path, 1, 3)
    append_line(tmp_path, make_message(0, 3))
    feed = RecordReader(tmp_path)
    assert len([r for r in read_records(feed) if "watch/rank/0/step_ms" in r.figures]) == 2
    size = (tmp_path / "ranks.jsonl").stat().st_size
    assert feed.delivered.offsets[messages.RANKS] < size, "an interval that may still be completed is lost"
    append_line(tmp_path, make_message(1, 3))
    resumed = RecordReader(tmp_path)
    assert [r.step for r in read_records(resumed)] == [300], "the line that waited is missing"
    assert resumed.delivered.offsets[messages.RANKS] > size

    append_line(tmp_path, make_message(0, 4))
    assert read_records(resumed) == []  # rank 1 stops reporting, and training resumes at step 300
    again = [
        messages.RankLine(**make_message(rank, step).line() | {"attempt": 1}) for step in (4, 5) for rank in (1, 0)
    ]
    for line in again:
        append_line(tmp_path, line)
    assert [r.step for r in read_records(resumed)] == [400, 500]
    assert resumed.delivered.offsets[messages.RANKS] == (tmp_path / "ranks.jsonl").stat().st_size


def test_reader_skips_torn_and_invalid_lines(tmp_path):
    one, two, three = (json.dumps(make_message("train", step).line()) + "\n" for step in (1, 2, 3))
    feed = RecordReader(tmp_path)

    def add(text):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(text)
        return [r.step for r in read_records(feed)]

    assert add(one + two[:20]) == [1]
    assert add(two[20:] + three[:20]) == [2], "the completed line is missing"
    assert add("\n" + three + "[]\n{}\n") == [3], "the next driver begins a new line after a torn one"
    assert feed.dropped == 2, "only complete invalid lines count as dropped"


@pytest.mark.parametrize(
    "note", ["", "{", "[]", '{"key": 1}', '{"key": "a", "run_id": "b", "params": 1, "offsets": 3}']
)
def test_unreadable_note_delivers_all_lines_again(tmp_path, note):
    append_messages(tmp_path, 1, 4)
    (tmp_path / DELIVERY_STATE_FILE).write_text(note)
    feed = RecordReader(tmp_path)
    assert feed.delivered.offsets == {} and len(read_records(feed)) == 9


@pytest.mark.slow
def test_lines_reach_mlflow_once_after_a_full_disk(feed_store_uri, tmp_path):
    """The driver buffers lines while the disk is full. MLflow receives each line once afterwards."""
    with disks.small_disk(tmp_path / "disk", "1m") as folder:
        delivery = make_feed_delivery(feed_store_uri, folder)
        delivery.deliver()
        said: list[str] = []
        record = Record(folder, said.append)
        append_messages(folder, 1, 2)
        disks.fill_disk(folder)
        wide = {f"wide/{i}": float(i) for i in range(300)}  # does not fit into the last page of the file
        record.store_message(messages.Train(step=1, unix_s=1e9, figures=wide))
        for each in make_messages(2, 30):
            record.store_message(each)
        assert delivery.deliver(), "an unwritable note stopped the delivery"
        assert_delivered_once(feed_store_uri, delivery.run_id, range(1, 2))
        (folder / "ballast").unlink()
        for each in make_messages(30, 31):
            record.store_message(each)
        record.close()
        assert not [text for text in said if "lacks" in text]
        assert delivery.finish("FINISHED", 60) is None
        assert_delivered_once(feed_store_uri, delivery.run_id, range(1, 31))
        assert (folder / "checks.jsonl").read_text().count("\n") == 30


@pytest.mark.survive
def test_track_command_delivers_missing_records(feed_store_uri, tmp_path, monkeypatch, capsys):
    """Run `raytrec track` for a run that ended during a server outage."""
    folder = tmp_path / "later"
    folder.mkdir()
    append_messages(folder, 1, 4)
    values = {"run": {"name": "later"}, "data": {"train": "d"}, "tracking": {"uri": "http://127.0.0.1:9"}}
    (folder / "config.yaml").write_text(json.dumps(values))  # JSON is YAML
    (folder / "result.json").write_text("{}")
    import mlflow  # noqa: F401  (excludes the import from the time limit)

    began = perf_counter()
    with pytest.raises(RunError, match=r"MLflow lacks 1[0-9] records and the end of the run \(.*refused") as error:
        track(folder, allow_code=True)
    assert perf_counter() - began < 30, "the delivery waited for too long"
    assert "tracking.uri=http://127.0.0.1:9" in error.value.where and "training" not in capsys.readouterr().err
    values["tracking"]["uri"] = feed_store_uri
    (folder / "config.yaml").write_text(json.dumps(values))
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            main(["track", str(folder), "--allow-code"])
        assert "contains all records of later" in capsys.readouterr().out
        run_id = json.loads((folder / DELIVERY_STATE_FILE).read_text())["run_id"]
        assert_delivered_once(feed_store_uri, run_id, range(1, 4))
    client = tracked.mlflow_client(feed_store_uri)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(run_id)} == {"config.yaml", "result.json"}
