"""The seconds of a run through all its drivers."""

import json
from time import sleep, time

import pytest

from raytrec.common.errors import RunError
from raytrec.driver.driver_state import driver_of, record_driver


def test_the_seconds_of_a_run_are_those_of_all_its_drivers(tmp_path):
    with pytest.raises(RunError), record_driver(tmp_path) as before_s:
        assert before_s == 0
        sleep(0.2)
        raise RunError("a failure")
    first = driver_of(tmp_path)["seconds"]
    assert 0.2 <= first < 60
    with record_driver(tmp_path) as before_s:
        assert before_s == first == driver_of(tmp_path)["seconds"]
        sleep(0.1)
    assert driver_of(tmp_path)["seconds"] >= first + 0.1


@pytest.mark.parametrize(("last", "seconds"), [(40.0, 140.0), (None, 100.0), (-3600.0, 100.0)])
def test_a_driver_that_was_killed_counts_up_to_its_last_line(tmp_path, last, seconds):
    begin = time() - 1000
    note = {"pid": 1, "started": 1, "host": "a", "status": "RUNNING", "unix_s": begin, "seconds": 100.0}
    (tmp_path / "driver.json").write_text(json.dumps(note))
    if last is not None:
        line = {"kind": "train", "step": 1, "unix_s": begin + last}
        (tmp_path / "metrics.jsonl").write_text(
            json.dumps({"unix_s": begin + 9999}) + "\n" + json.dumps(line) + "\n"
        )
    with record_driver(tmp_path) as before_s:
        assert before_s == pytest.approx(seconds)
