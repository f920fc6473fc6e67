"""Test the driver's record of a run: messages of ranks, warnings about slow ranks, elapsed time."""

import json
import time
from socket import gethostname
from threading import enumerate as threads

import parquet
import pytest
from checkpoints import write_index_only
from recorded import rank_line

from raytrec.cluster.lifeline import RayLost
from raytrec.common.errors import RunError
from raytrec.common.messages import ENDED_EARLY, Event, Outcome, RankLine
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.driver.driver_state import hold_run_lock, read_driver_record, record_driver
from raytrec.driver.prepare import make_run_folder
from raytrec.driver.recorder import Record, Watch


def test_lost_ray_leaves_no_coordinator_thread(ray_cluster):
    """A thread that still calls Ray would crash the process when Ray shuts down."""
    import ray

    @ray.remote(num_cpus=0)
    class Silent:
        def get(self, timeout):
            time.sleep(30)

    coordinator = Silent.remote()
    ray.get(coordinator.__ray_ready__.remote())
    with pytest.raises(RayLost), Watch(console=None).reading(coordinator):
        time.sleep(1)
        began = time.monotonic()
        raise RayLost("Ray's raylet has ended")
    assert time.monotonic() - began < 20
    assert not [thread for thread in threads() if thread.name == "coordinator"]
    ray.kill(coordinator)


def test_watch_stores_the_early_stopping_step():
    watch = Watch(console=None)
    watch.receive(Event(event="asked", details={"command": "SAVE", "reason": "a-user"}))
    assert watch.ended_early_at is None
    watch.receive(Event(event=ENDED_EARLY, details={"step": 30, "reason": "no better"}))
    assert watch.ended_early_at == 30


def intervals(count, slow=False):
    """Yield intervals of 5.5 s of two ranks. If slow, rank 1 spends 2 s of each on reading data."""
    for number in range(1, count + 1):
        for rank in range(2):
            line = rank_line(["a"], rank, 2, 100 * number) | {"seconds": 5.5}
            line["phases_s"]["data" if slow and rank else "collectives"] += 2.0
            yield RankLine(**line)


def test_rank_is_reported_slow_after_one_minute(tmp_path):
    said: list[str] = []
    record = Record(tmp_path, said.append)
    *earlier, last = intervals(12, slow=True)
    for message in earlier:
        record.store_message(message)
    # The first interval is ignored; the other 11 add up to 60.5 s. Rank 1 reports last in each.
    assert said == []
    record.store_message(last)
    assert len(said) == 1 and "rank 1 is slow" in said[0]
    record = Record(tmp_path, said.append)
    for message in intervals(30):
        record.store_message(message)
    assert len(said) == 1


def test_run_duration_sums_all_drivers(tmp_path):
    with pytest.raises(RunError), record_driver(tmp_path) as before_s:
        assert before_s == 0
        time.sleep(0.2)
        raise RunError("a failure")
    first = read_driver_record(tmp_path)["seconds"]
    assert 0.2 <= first < 60
    with record_driver(tmp_path) as before_s:
        assert before_s == first == read_driver_record(tmp_path)["seconds"]
        time.sleep(0.1)
    assert read_driver_record(tmp_path)["seconds"] >= first + 0.1


def test_new_run_ignores_records_of_a_failed_start(tmp_path, tiny_data):
    config = load_config(parquet.config_values(tiny_data, tmp_path))
    record = Record(tmp_path, print)
    passed = Outcome(check="finite", step=1, passed=True, text="", figure=0.0, limit=None)
    for message in [*intervals(12), passed]:
        record.store_message(message)
    with pytest.raises(RunError), record_driver(tmp_path):
        raise RunError("a failure")
    assert Record(tmp_path, print).checks and Record(tmp_path, print).times.steps
    make_run_folder(tmp_path, config, Schema.load(tiny_data / "schema.yaml"))
    with record_driver(tmp_path) as before_s:
        assert before_s == 0
    again = Record(tmp_path, print)
    assert not again.checks and not again.times.steps


def test_checkpoints_of_another_run_cannot_be_resumed_from_a_new_folder(tmp_path, tiny_data):
    values = parquet.config_values(tiny_data, tmp_path / "run") | {"checkpoint": {"dir": str(tmp_path / "other")}}
    config = load_config(values)
    write_index_only(tmp_path / "other", 3)
    with pytest.raises(RunError, match="already contains checkpoints up to step 3") as error:
        make_run_folder(tmp_path / "run", config, Schema.load(tiny_data / "schema.yaml"))
    assert error.value.do == "choose another checkpoint.dir"


def test_error_about_a_locked_folder_names_no_earlier_driver(tmp_path):
    (tmp_path / "driver.json").write_text(json.dumps({"pid": 2**22 + 1, "host": gethostname(), "started": 1}))
    with (
        hold_run_lock(tmp_path, 0, print),
        pytest.raises(RunError, match="in use by another process"),
        hold_run_lock(tmp_path, 0, print),
    ):
        pass


@pytest.mark.parametrize(("last", "seconds"), [(40.0, 140.0), (None, 100.0), (-3600.0, 100.0)])
def test_killed_driver_counts_until_its_last_metric(tmp_path, last, seconds):
    begin = time.time() - 1000
    note = {"pid": 1, "started": 1, "host": "a", "status": "RUNNING", "unix_s": begin, "seconds": 100.0}
    (tmp_path / "driver.json").write_text(json.dumps(note))
    if last is not None:
        line = {"kind": "train", "step": 1, "unix_s": begin + last}
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"unix_s": begin + 9999}) + "\n" + json.dumps(line) + "\n")
    with record_driver(tmp_path) as before_s:
        assert before_s == pytest.approx(seconds)
