"""Test that disturbed runs end like undisturbed ones. Real processes receive real signals."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import checkpoints
import disks
import parquet
import pytest
import torch
import yaml
from json_lines import read_json_lines
from rays import alive_worker_pids
from waiting import wait_for

from raytrec.checkpoint.index import read_index
from raytrec.common.errors import ConfigError, DataError, RunError
from raytrec.driver import run as driver

pytestmark = pytest.mark.slow

STEPS = 240  # 15 epochs of 16 steps
BRIEF_STEPS = 160  # 2 epochs of 80 steps


def settings(folder, place, **changes):
    """Return settings with Adam and dropout, whose state a restart could lose."""
    changes = {"train__epochs": 15, "checkpoint__every_steps": 20} | changes
    values = parquet.config_values(folder, place, **changes)
    values["model"] = {"dropout": 0.1} | values["model"] | {"top_mlp": [256, 256]}
    return values


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, tiny_data, tmp_path_factory):
    return driver.train(settings(tiny_data, tmp_path_factory.mktemp("undisturbed") / "run"))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Larger dataset for `make test`: the start and end of an epoch cost as much as many steps."""
    return parquet.write_dataset(tmp_path_factory.mktemp("brief") / "d", train=10_200)


@pytest.fixture(scope="module")
def brief(ray_cluster, large, tmp_path_factory):
    return driver.train(settings(large, tmp_path_factory.mktemp("whole") / "run", train__epochs=2))


def events(run, kind=None):
    """Return the events of a run so far, optionally of one kind."""
    path = Path(run) / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [e for e in map(json.loads, lines) if kind in (None, e["event"])]


def disturb(run, number):
    """Send a signal to a worker shortly after the first checkpoint, from a thread."""

    def go():
        wait_for(lambda: events(run, "saved"), "checkpoint", 120)
        time.sleep(random.Random(7).uniform(0.2, 1.0))
        os.kill(random.Random(8).choice(alive_worker_pids()), number)

    thread = Thread(target=go, daemon=True)
    thread.start()
    return thread


def test_killed_worker_does_not_change_the_result(brief, large, tmp_path):
    killer = disturb(tmp_path / "run", signal.SIGKILL)
    disturbed = driver.train(settings(large, tmp_path / "run", train__epochs=2))
    killer.join()
    (failed,) = events(tmp_path / "run", "failed")
    assert "died" in failed["cause"] and failed["cause"].startswith("rank ") and failed["again"]
    assert [e["step"] for e in events(tmp_path / "run", "start")][1] >= 20
    assert_same_result(brief, disturbed)


def assert_same_result(one, other):
    """Assert that two runs have bitwise identical weights, state and metrics."""
    newest, other_newest = (checkpoints.newest_checkpoint(run.path) for run in (one, other))
    assert checkpoints.differing_tensors(newest, other_newest) == []
    for name, value in one.metrics.items():
        if name.startswith("eval.") or name in ("train.rows", "train.steps"):
            assert other.metrics[name] == value, name


@pytest.mark.survive
def test_hanging_worker_is_detected_and_named(undisturbed, tiny_data, tmp_path):
    stopper = disturb(tmp_path / "run", signal.SIGSTOP)
    disturbed = driver.train(settings(tiny_data, tmp_path / "run", scaling__hang_timeout_s=6))
    stopper.join()
    (hang,) = events(tmp_path / "run", "hang")
    assert "hangs or has ended: no heartbeat" in hang["cause"] and "at step" in hang["cause"]
    assert "; rank " in hang["cause"]
    assert_same_result(undisturbed, disturbed)


def start_command(*arguments):
    """Start the raytrec command in a subprocess."""
    log = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", "raytrec", *map(str, arguments)], stdout=log, stderr=log, text=True)


def mlflow_run(run):
    from mlflow import MlflowClient

    run_id = json.loads((run / "mlflow.json").read_text())["run_id"]
    return MlflowClient(f"sqlite:///{run.parent}/mlflow.db").get_run(run_id)


def run_file(folder, tmp_path, **changes):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings(folder, tmp_path / "run", **changes)))
    return path


@pytest.mark.survive
def test_ctrl_c_saves_a_run_that_can_be_resumed(brief, large, tmp_path, capfd):
    """The process is already connected to Ray, as in a notebook."""
    run = tmp_path / "run"

    def interrupt():
        wait_for(lambda: events(run, "saved"), "checkpoint", 240)
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        driver.train(settings(large, run, train__epochs=2))
    thread.join()
    assert_saved(run, " ".join(capfd.readouterr().err.split()))
    assert mlflow_run(run).info.status == "KILLED"
    assert_resumes_like(run, brief)


def assert_saved(run, said):
    """Assert that the stopped run saved a checkpoint and printed how to resume."""
    assert f"to resume: raytrec train --resume {run}" in said and "Traceback" not in said
    (stopped,) = events(run, "stopped")
    assert checkpoints.read_about(checkpoints.newest_checkpoint(run))["progress"]["step"] == stopped["step"]


def assert_resumes_like(run, whole):
    """Resume an interrupted run and assert that it ends like the undisturbed one."""
    assert not (run / "result.json").exists()
    resumed = driver.train(None, resume=run)
    assert 0 < events(run, "start")[-1]["step"] < BRIEF_STEPS
    assert_same_result(whole, resumed)
    assert resumed.metrics["mlflow_run_id"] == json.loads((run / "mlflow.json").read_text())["run_id"]


@pytest.mark.survive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_run_can_be_resumed_after_a_signal_to_the_driver(brief, large, tmp_path, number):
    """Ctrl-C and SIGTERM save first; after SIGKILL the run resumes from its last checkpoint."""
    run, process = tmp_path / "run", start_command("train", run_file(large, tmp_path, train__epochs=2))
    try:
        wait_for(lambda: events(run, "saved"), "checkpoint", 240)
        time.sleep(0.3)
        process.send_signal(number)
        _, said = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert_saved(run, said)
    if number == signal.SIGINT:
        assert mlflow_run(run).info.status == "KILLED"
    assert_resumes_like(run, brief)


@pytest.fixture(scope="module")
def no_dropout(ray_cluster, tiny_data, tmp_path_factory):
    """Run without dropout, which would depend on the number of workers."""
    return driver.train(settings(tiny_data, tmp_path_factory.mktemp("plain") / "run", model__dropout=0.0))


def copy_interrupted_run(result, run):
    """Copy a run in its state at the second-to-last checkpoint."""
    shutil.copytree(result.path, run)
    (run / "result.json").unlink()
    shutil.rmtree(checkpoints.newest_checkpoint(run))
    return run


@pytest.mark.survive
def test_resume_skips_damaged_and_incomplete_checkpoints(undisturbed, tiny_data, tmp_path, capfd):
    """Of four checkpoints, the newest has damaged data, the next a damaged index, the third no index."""
    run = tmp_path / "run"
    first = driver.train(settings(tiny_data, run, train__max_steps=120, checkpoint__keep_last=5))
    (run / "result.json").unlink()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["train"]["max_steps"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    newest = checkpoints.newest_checkpoint(run)
    step = {n: run / f"checkpoints/step-{n:010d}" for n in (120, 100, 80, 60)}
    assert newest == step[120]
    largest = max(step[120].glob("*.bin"), key=lambda p: p.stat().st_size)
    checkpoints.flip_lowest_bit(largest, largest.stat().st_size // 2)
    checkpoints.flip_lowest_bit(step[100] / "checkpoint.json", 100)
    (step[80] / "checkpoint.json").unlink()
    capfd.readouterr()
    resumed = driver.train(None, resume=run)
    said = " ".join(capfd.readouterr().err.split())
    assert events(run, "start")[-1]["step"] == 60
    for place in (step[120], step[100], step[80]):
        assert str(place) in said
    assert resumed.metrics["train.steps"] == STEPS and first.metrics["train.steps"] == 120
    assert_same_result(undisturbed, resumed)


@pytest.mark.survive
def test_resume_without_a_readable_checkpoint_fails(undisturbed, tmp_path):
    interrupted = copy_interrupted_run(undisturbed, tmp_path / "run")
    for index in interrupted.glob("checkpoints/step-*/*.bin"):
        index.unlink()
    with pytest.raises(RunError, match=r"no checkpoint can be restored \(1 tried\)"):
        driver.train(None, resume=interrupted)


@pytest.mark.survive
@pytest.mark.parametrize("workers", [1, 3])
def test_resume_with_another_worker_count_gives_same_model(no_dropout, tmp_path, workers):
    """The batches are identical; the model is equal up to the summation order of float32."""
    interrupted = copy_interrupted_run(no_dropout, tmp_path / "run")
    resumed = driver.train(None, [f"scaling.num_workers={workers}"], resume=interrupted)
    assert resumed.metrics["world_size"] == workers
    assert resumed.metrics["train.rows"] == no_dropout.metrics["train.rows"]
    one, other = (checkpoints.read_tensors(checkpoints.newest_checkpoint(r.path)) for r in (no_dropout, resumed))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4, msg=name)
    assert resumed.metrics["eval.auc"] == pytest.approx(no_dropout.metrics["eval.auc"], abs=1e-4)


def test_resume_rejects_finished_and_changed_runs(brief, large, tmp_path):
    interrupted = copy_interrupted_run(brief, tmp_path / "run")

    def refused(kind, *says, overrides=(), resume=interrupted, source=None):
        with pytest.raises(kind) as error:
            driver.train(source, list(overrides), resume=resume)
        for text in says:
            assert text in str(error.value)

    refused(RunError, "the run has already finished", "--warm-start", resume=brief.path)
    refused(RunError, "does not contain a run", resume=tmp_path / "nowhere")
    changes = ["optim.embeddings.lr=0.5", "run.seed=4", "train.log_every_steps=7"]
    refused(ConfigError, "optim.embeddings.lr: 0.1 → 0.5", "run.seed: 0 → 4", overrides=changes)
    refused(ConfigError, "train.epochs: 2 → 3", source=settings(large, tmp_path) | {"train": {"epochs": 3}})
    other = parquet.write_dataset(tmp_path / "other", train=1999)
    refused(DataError, "data.train has changed since", overrides=[f"data.train={other / 'train'}"])
    (other / "schema.yaml").write_text(parquet.SCHEMA_YAML.replace("rows: 40", "rows: 50"))
    refused(ConfigError, "schema has changed", overrides=[f"data.schema={other / 'schema.yaml'}"])
    with pytest.raises(RunError, match="--resume"):
        driver.train(settings(large, interrupted))
    assert not (interrupted / "result.json").exists()


@pytest.mark.survive
def test_run_keeps_the_last_and_the_best_checkpoints(tiny_data, tmp_path):
    values = settings(tiny_data, tmp_path / "run", train__eval_every_steps=20, checkpoint__keep_best=2)
    values["checkpoint"]["keep_last"] = 1
    values["optim"] = {"embeddings": {"lr": 0.5}, "dense": {"lr": 0.02}}  # overfits: the best are early
    driver.train(values)
    root = tmp_path / "run/checkpoints"
    kept = {int(p.parent.name[5:]): read_index(str(p.parent))["about"] for p in root.glob("*/checkpoint.json")}
    assert sorted(p.name for p in root.glob("step-*")) == [f"step-{s:010d}" for s in sorted(kept)]
    lines = read_json_lines(tmp_path / "run/metrics.jsonl", "eval")
    best = sorted((line["ne"], line["step"]) for line in lines if line["step"] < STEPS)[:2]
    assert max(kept) == STEPS and len(kept) == 3
    assert sorted((kept[step]["evaluation"]["ne"], step) for step in kept if step < STEPS) == best


@pytest.mark.survive
def test_a_full_disk_does_not_stop_training(undisturbed, tiny_data, tmp_path, capfd):
    """The file system of the checkpoints is full at first and has room later."""
    size = sum(p.stat().st_size for p in checkpoints.newest_checkpoint(undisturbed.path).iterdir())
    with disks.small_disk(tmp_path / "small", 6 * size) as place:
        (place / "ballast").write_bytes(bytes(int(5.2 * size)))
        values = settings(tiny_data, tmp_path / "run", checkpoint__dir=str(place / "checkpoints"))

        def make_room():
            wait_for(lambda: any(e["error"] for e in events(tmp_path / "run", "saved")), "failed save", 120)
            (place / "ballast").unlink()

        Thread(target=make_room, daemon=True).start()
        result = driver.train(values)
        said = " ".join(capfd.readouterr().err.split())
        saved = events(tmp_path / "run", "saved")
        failed = [e["step"] for e in saved if e["error"]]
        assert failed and f"the checkpoint of step {failed[0]} was not saved" in said
        assert not saved[-1]["error"] and saved[-1]["step"] == STEPS
        end = place / f"checkpoints/step-{STEPS:010d}"
        assert checkpoints.differing_tensors(checkpoints.newest_checkpoint(undisturbed.path), end) == []
        assert result.metrics["eval.auc"] == undisturbed.metrics["eval.auc"]
