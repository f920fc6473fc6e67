"""Test that runs on full disks train to the end, report missing files, and can be resumed."""

import json
from contextlib import contextmanager, suppress
from threading import Event, Thread

import checkpoints
import disks
import parquet
import pytest
from json_lines import read_json_lines
from test_survive import events
from waiting import wait_for

from raytrec.cli import main
from raytrec.driver import run as driver

pytestmark = [pytest.mark.survive, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, tiny_data, tmp_path_factory):
    return driver.train(settings(tiny_data, tmp_path_factory.mktemp("undisturbed") / "run"))


@pytest.fixture
def disk(tmp_path):
    """A file system of 3 MiB."""
    with disks.small_disk(tmp_path / "disk", "3m", busy=True) as place:
        yield place


def settings(folder, place, **changes):
    changes |= {"train__epochs": 6, "checkpoint__every_steps": 8, "tracking__every_steps": 8}
    return parquet.config_values(folder, place, **changes)


@contextmanager
def keep_disk_full(disk, run):
    """Keep the disk full from the first checkpoint of the run until the block ends."""
    over = Event()

    def fill():
        wait_for(lambda: over.is_set() or events(run, "saved"), "checkpoint", 300)
        while not over.wait(0.01):  # refill space that deleted files free
            with suppress(OSError), open(disk / "ballast", "ab", buffering=0) as file:
                while not over.is_set():
                    file.write(bytes(512))

    thread = Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        (disk / "ballast").unlink(missing_ok=True)


def assert_same_checkpoint(one, other):
    assert checkpoints.differing_tensors(checkpoints.newest_checkpoint(one.path), other) == []


def test_run_completes_if_the_run_folder_disk_stays_full(undisturbed, tiny_data, disk, tmp_path, capfd):
    """The MLflow store is on the same disk; the checkpoints are on another one."""
    run = disk / "runs/one"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings(tiny_data, run, checkpoint__dir=str(tmp_path / "checkpoints"))))
    with keep_disk_full(disk, run), pytest.raises(SystemExit) as exit:
        main(["train", str(config), "--json"])
    assert exit.value.code == 1
    out, said = capfd.readouterr()
    assert json.loads(out)["eval.auc"] == undisturbed.metrics["eval.auc"], "the result must still be printed"
    assert said.count("cannot write to the run folder (No space left on device)") == 1
    assert "error: cannot write the result: No space left on device" in said
    assert f"raytrec train --resume {run}" in said and "Traceback" not in said
    assert not (run / "result.json").exists()
    assert events(run, "failed") == []
    resumed = driver.train(None, resume=run)
    for figure in ("eval.auc", "eval.logloss", "train.rows", "train.steps"):
        assert resumed.metrics[figure] == undisturbed.metrics[figure]
    assert_same_checkpoint(undisturbed, tmp_path / "checkpoints/step-0000000096")


def test_run_writes_missing_files_once_the_disk_has_room(undisturbed, tiny_data, disk, tmp_path, capfd):
    run, elsewhere = disk / "runs/two", tmp_path / "checkpoints"
    values = settings(tiny_data, run, checkpoint__dir=str(elsewhere), train__log_every_steps=4)

    def free():
        with keep_disk_full(disk, run):
            wait_for((elsewhere / "step-0000000040/checkpoint.json").exists, "checkpoint of step 40", 300)

    thread = Thread(target=free, daemon=True)
    thread.start()
    result = driver.train(values)
    thread.join()
    said = capfd.readouterr().err
    assert said.count("cannot write to the run folder") == said.count("is writable again") == 1
    assert [e["step"] for e in events(run, "saved")] == list(range(8, 97, 8))
    assert {"full", "room"} <= {e["event"] for e in events(run)}
    assert [m["step"] for m in read_json_lines(run / "metrics.jsonl", "train")] == list(range(4, 97, 4))
    assert result.metrics["eval.auc"] == undisturbed.metrics["eval.auc"]
    assert json.loads((run / "result.json").read_text())["train.steps"] == 96


def test_failed_last_save_still_reports_metrics(undisturbed, tiny_data, disk, tmp_path, capfd):
    run = tmp_path / "run"
    values = settings(tiny_data, run, checkpoint__dir=str(disk / "c"))
    with keep_disk_full(disk, run), pytest.raises(driver.Unfinished) as error:
        driver.train(values)
    result = error.value.result.metrics
    assert result["eval.auc"] == undisturbed.metrics["eval.auc"], "the model must still be evaluated"
    assert "the trained model is not saved: the checkpoint cannot be written" in error.value.what
    kept = max(int(p.parent.name[5:]) for p in (disk / "c").glob("*/checkpoint.json"))
    assert f"from the checkpoint of step {kept}: raytrec train --resume {run}" in error.value.do
    assert not (run / "result.json").exists() and kept < 96
    resumed = driver.train(None, resume=run)
    assert resumed.metrics["eval.auc"] == undisturbed.metrics["eval.auc"]
    assert_same_checkpoint(undisturbed, disk / "c/step-0000000096")
