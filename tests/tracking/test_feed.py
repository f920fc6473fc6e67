"""Every line of a run folder is in MLflow exactly once: through drivers that die, a store that is away, a
full disk, lines that are torn."""

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
from raytrec.driver import track as track_module
from raytrec.driver.recorder import Record
from raytrec.tracking.delivery import Delivery
from raytrec.tracking.feed import NOTE, DeliveryState, RecordReader
from raytrec.tracking.journal import append_line

RANKS = 2


def message(kind, step):
    """One that no other of its kind is like."""
    if kind == "train":
        return messages.Train(step=step, unix_s=1e9 + step, figures={"loss": 1 / step})
    if kind == "check":
        found = {"passed": step % 7 != 0, "figure": step / 10, "limit": 1.0, "text": ""}
        return messages.Outcome(check="parity", step=step, unix_s=1e9 + step, **found)
    line = recorded.interval(["user"], kind, RANKS, 100 * step, unix_s=1e9 + step)
    return messages.RankLine(**line | {"seconds": float(step)})


def written_in(first, last):
    """A driver's messages of the steps first … last - 1: figures, a check, and a line of each rank."""
    kinds = ("train", "check", *range(RANKS))
    return [message(kind, step) for step in range(first, last) for kind in kinds]


def add_all(folder, first, last):
    for each in written_in(first, last):
        append_line(folder, each)


def expected(steps):
    """Metric → (step, value, ms) of all of MLflow's, for a few that stand for their lines."""
    ms = {step: round((1e9 + step) * 1000) for step in steps}
    return {
        "train/loss": [(step, 1 / step, ms[step]) for step in steps],
        "watch/check/parity": [(step, float(step % 7 != 0), ms[step]) for step in steps],
        "watch/check/parity_figure": [(step, step / 10, ms[step]) for step in steps],
        **{f"watch/rank/{r}/step_ms": [(100 * s, 10.0 * s, ms[s]) for s in steps] for r in range(RANKS)},
        "watch/table/user/lookups": [(100 * step, 200.0, ms[step]) for step in steps],
    }


def stored(uri, run_id, names):
    return {name: tracked.history(uri, run_id, name) for name in names}


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A store that has its tables."""
    place = tmp_path_factory.mktemp("feed")
    uri = f"sqlite:///{place}/mlflow.db"
    track(uri, place / "first").finish("FINISHED", 60)
    return uri


def track(uri, folder):
    values = {"run": {"name": folder.name}, "tracking": {"uri": uri, "experiment": "feed"}}
    return Delivery(folder, tracked.config(folder, values), print)


def check(uri, folder, steps):
    """The next delivery: it writes what was missing, and then all is there, once."""
    delivery = track(uri, folder)
    assert delivery.finish("FINISHED", 60) is None
    wanted = expected(steps)
    assert stored(uri, delivery.run_id, wanted) == wanted
    return delivery.run_id


def drive(uri, folder, first, last, dies_after, told):
    """A process that is killed: after so many writes of training figures, before it can note the last one."""
    from raytrec.tracking.store import Store

    writes, write = [], Store.write_metrics

    def counted(self, records):
        write(self, records)
        writes.extend(["train"] * any("train/loss" in record.figures for record in records))
        if dies_after and len(writes) == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    Store.write_metrics = counted
    delivery = track(uri, folder)
    delivery.deliver()
    told.put(delivery.run_id)
    for step in range(first, last):
        add_all(folder, step, step + 1)
        sleep(0.05)
        if step % 10 == 0:
            delivery.deliver()
    delivery.finish("FINISHED", 60)


def begin(processes, *args):
    """A process that adds lines and delivers them, and the id of the MLflow run that it has."""
    told = processes.Queue()
    process = processes.Process(target=drive, args=(*args, told), daemon=True)
    process.start()
    return process, told.get(timeout=120)


def test_a_driver_that_dies_between_the_store_and_its_note(uri, tmp_path, processes):
    folder = tmp_path / "between"
    folder.mkdir()
    process, run_id = begin(processes, uri, folder, 1, 200, 2)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    noted = DeliveryState.read(folder)
    last = mend(folder)
    written = {step for step, _, _ in stored(uri, run_id, ["train/loss"])["train/loss"]}
    lines = (folder / messages.METRICS).read_bytes()[: noted.offsets[messages.METRICS]].count(b"\n")
    assert 0 < lines < len(written), "the store has more than is noted"
    assert noted.run_id == run_id and last < 200
    add_all(folder, last + 1, last + 20)  # what the run does when it is resumed
    assert check(uri, folder, range(1, last + 20)) == run_id


@pytest.mark.survive
def test_drivers_that_are_killed_anywhere_and_a_store_that_is_away(uri, tmp_path, processes):
    """The sqlite file is locked for 2 s, in which the driver is killed; then there is a driver of 1 s."""
    folder, random = tmp_path / "anywhere", Random(0)
    folder.mkdir()
    process, run_id = begin(processes, uri, folder, 1, 400, 0)
    sleep(1 + random.random())
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"), isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        sleep(2)
        process.kill()
        process.join(30)
    done = mend(folder)
    assert lines_behind(folder) > 8, "the store has been away for a while"
    process, again = begin(processes, uri, folder, done + 1, 400, 0)
    sleep(1 + random.random())
    process.kill()
    process.join(30)
    done = mend(folder)
    assert check(uri, folder, range(1, done + 1)) == run_id == again


def mend(folder):
    """Completes the step in whose middle a driver was killed; the last step."""
    counts = [len((folder / name).read_text().splitlines()) for name in ("metrics.jsonl", "checks.jsonl")]
    of_ranks = len((folder / "ranks.jsonl").read_text().splitlines())
    done = counts[0]
    missing = ["check"] * (done - counts[1]) + list(range(of_ranks - RANKS * (done - 1), RANKS))
    for kind in missing:
        append_line(folder, message(kind, done))
    return done


def lines_behind(folder):
    noted = DeliveryState.read(folder).offsets
    return sum(
        (folder / name).read_bytes()[noted.get(name, 0) :].count(b"\n")
        for name in ("metrics.jsonl", "checks.jsonl", "ranks.jsonl")
    )


def records(feed):
    """All that a store would be given now."""
    found = []
    while batch := feed.next_batch():
        found += batch.records
        feed.written()
    return found


def test_lines_of_a_group_that_was_lost_wait_for_nobody(tmp_path):
    """A rank's line without the other's; then another driver, whose attempts are counted from 0 again."""
    add_all(tmp_path, 1, 3)
    append_line(tmp_path, message(0, 3))
    feed = RecordReader(tmp_path)
    assert len([r for r in records(feed) if "watch/rank/0/step_ms" in r.figures]) == 2
    size = (tmp_path / "ranks.jsonl").stat().st_size
    assert feed.delivered.offsets[messages.RANKS] < size, "it may yet be complete"
    append_line(tmp_path, message(1, 3))
    resumed = RecordReader(tmp_path)
    assert [r.step for r in records(resumed)] == [300], "with the line that waited"
    assert resumed.delivered.offsets[messages.RANKS] > size

    append_line(tmp_path, message(0, 4))
    assert records(resumed) == []  # and rank 1 never reports more: steps 300 and on are trained once more
    again = [
        messages.RankLine(**message(rank, step).line() | {"attempt": 1}) for step in (4, 5) for rank in (1, 0)
    ]
    for line in again:
        append_line(tmp_path, line)
    assert [r.step for r in records(resumed)] == [400, 500]
    assert resumed.delivered.offsets[messages.RANKS] == (tmp_path / "ranks.jsonl").stat().st_size


def test_torn_lines_and_others_are_passed_over(tmp_path):
    one, two, three = (json.dumps(message("train", step).line()) + "\n" for step in (1, 2, 3))
    feed = RecordReader(tmp_path)

    def add(text):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(text)
        return [r.step for r in records(feed)]

    assert add(one + two[:20]) == [1]
    assert add(two[20:] + three[:20]) == [2], "once it is whole"
    assert add("\n" + three + "[]\n{}\n") == [3], "as the next driver does"
    assert feed.dropped == 2, "a line that is not a message; what is torn never was one"


@pytest.mark.parametrize(
    "note", ["", "{", "[]", '{"key": 1}', '{"key": "a", "run_id": "b", "params": 1, "offsets": 3}']
)
def test_a_note_that_cannot_be_read_has_all_written_once_more(tmp_path, note):
    add_all(tmp_path, 1, 4)
    (tmp_path / NOTE).write_text(note)
    feed = RecordReader(tmp_path)
    assert feed.delivered.offsets == {} and len(records(feed)) == 9


def test_a_disk_that_is_full(uri, tmp_path):
    """Lines wait in the driver for room in the run folder, and MLflow gets them once, when there is room."""
    with disks.small_disk(tmp_path / "disk", "1m") as folder:
        delivery = track(uri, folder)
        delivery.deliver()
        record = Record(folder)
        add_all(folder, 1, 2)
        disks.fill(folder)
        wide = {f"wide/{i}": float(i) for i in range(300)}  # more than is left of the file's last page
        record.keep(messages.Train(step=1, unix_s=1e9, figures=wide))
        for each in written_in(2, 30):
            record.keep(each)
        assert delivery.deliver(), "a note that cannot be written stops nothing"
        wanted = expected(range(1, 2))
        assert stored(uri, delivery.run_id, wanted) == wanted
        (folder / "ballast").unlink()
        for each in written_in(30, 31):
            record.keep(each)
        assert [text for text in record.close() if "lacks" in text] == []
        assert delivery.finish("FINISHED", 60) is None
        wanted = expected(range(1, 31))
        assert stored(uri, delivery.run_id, wanted) == wanted
        assert (folder / "checks.jsonl").read_text().count("\n") == 30


@pytest.mark.survive
def test_what_is_missing_at_the_end_is_written_later(uri, tmp_path, monkeypatch, capsys):
    """`raytrec track`: of a run that has ended while the server was away."""
    folder = tmp_path / "later"
    folder.mkdir()
    add_all(folder, 1, 4)
    values = {"run": {"name": "later"}, "data": {"train": "d"}, "tracking": {"uri": "http://127.0.0.1:9"}}
    (folder / "config.yaml").write_text(json.dumps(values))  # JSON is YAML
    (folder / "result.json").write_text("{}")
    import mlflow  # noqa: F401  (so that only the server is waited for)

    began = perf_counter()
    with pytest.raises(
        RunError, match=r"MLflow lacks 1[0-9] records and the end of the run \(.*refused"
    ) as error:
        track_module.track(folder, allow_code=True)
    assert perf_counter() - began < 30, "not a minute"
    assert (
        "tracking.uri=http://127.0.0.1:9" in error.value.where and "training" not in capsys.readouterr().err
    )
    values["tracking"]["uri"] = uri
    (folder / "config.yaml").write_text(json.dumps(values))
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            main(["track", str(folder), "--allow-code"])
        assert "contains all records of later" in capsys.readouterr().out
        run_id = json.loads((folder / NOTE).read_text())["run_id"]
        wanted = expected(range(1, 4))
        assert stored(uri, run_id, wanted) == wanted
    client = tracked.client(uri)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(run_id)} == {"config.yaml", "result.json"}
