"""Test complete runs with Ray Train, gloo, Parquet and MLflow on one local Ray."""

import json
import os
import shutil
import threading
from contextlib import contextmanager, nullcontext
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import parquet
import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pynvml
import pytest
from json_lines import read_json_lines

from raytrec.common import machine
from raytrec.common.errors import ConfigError, DataError, GpuFailedError, RunError
from raytrec.common.machine import check_gpu, find_needed_recovery, list_usable_gpus
from raytrec.config.run_config import load_config
from raytrec.driver import run as driver
from raytrec.driver.datasets import open_data
from raytrec.driver.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def open_addresses():
    """Non-loopback addresses that were listened on during the run with 2 workers."""
    return set()


class Runs(dict):
    """Results by number of workers, trained on first access; the run with 2 workers has a report."""

    def __init__(self, folder, place, heard):
        super().__init__()
        self._folder, self._place, self._heard = folder, place, heard

    def __missing__(self, workers):
        values = parquet.config_values(
            self._folder,
            self._place / f"w{workers}",
            scaling__num_workers=workers,
            train__epochs=3,
            train__eval_every_steps=20,
            tracking__every_steps=20,
            tracking__report=workers == 2,
            checks__every_steps=20,
        )
        with record_open_addresses(self._heard) if workers == 2 else nullcontext():
            self[workers] = driver.train(values)
        return self[workers]


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory, open_addresses):
    return Runs(tiny_data, tmp_path_factory.mktemp("runs"), open_addresses)


WORKER_COUNTS = [1, 2, pytest.param(3, marks=pytest.mark.survive)]


@pytest.mark.parametrize("workers", WORKER_COUNTS)
def test_result_json_contains_the_metrics(runs, workers):
    result = json.loads((runs[workers].path / "result.json").read_text())
    assert result == runs[workers].metrics
    assert result["eval.rows"] == 1003
    assert result["train.rows"] == 3 * 2000
    assert result["train.steps"] == 3 * 16  # 15 full batches and one of 80 rows
    assert result["world_size"] == workers
    assert result["train.samples_per_s"] > 0
    assert result["seconds"] > 0
    assert result["eval.auc"] > 0.85
    assert result["eval.ne"] < 0.8
    assert 0.8 < result["eval.calibration"] < 1.2
    assert result["bound.sentence"].startswith(f"bound by {result['bound.by']}: ")
    parts = result["bound.parts"].values()
    assert sum(part["share"] for part in parts) == pytest.approx(1) and result["bound.share"] > 0.2


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.survive)])
def test_worker_count_does_not_change_metrics(runs, workers):
    one, more = runs[1].metrics, runs[workers].metrics
    for name in ("eval.auc", "eval.ne", "eval.logloss", "eval.calibration"):
        assert more[name] == pytest.approx(one[name], abs=1e-4)


def test_mlflow_records_the_run(runs):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{runs[2].path.parent}/mlflow.db")
    run = client.get_run(runs[2].metrics["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["data.global_batch_size"] == "128"
    assert run.data.metrics["eval/auc"] == pytest.approx(runs[2].metrics["eval.auc"])
    for name in ("train/loss", "train/logloss", "eval/ne", "watch/table/tag/dead_share"):
        assert [m.step for m in client.get_metric_history(run.info.run_id, name)] == [20, 40, 48], name
    assert run.data.metrics["watch/rank/1/backward_ms"] > 0 and run.data.metrics["watch/check/parity"] == 1
    assert run.data.metrics["system/rank_0/process_memory_usage_megabytes"] > 100
    assert run.data.tags["version.torchrec"] and run.data.tags["cluster.nodes"] == "1"
    names = {a.path for a in client.list_artifacts(run.info.run_id)}
    assert names == {"config.yaml", "schema.yaml", "plan.json", "result.json", "report.html", "pictures"}
    assert len(client.list_artifacts(run.info.run_id, "pictures")) > 3


def test_a_new_run_restores_nothing(runs):
    log = (runs[2].path / "run.log").read_text()
    assert "restoring" not in log and "setting initial values" in log


def test_report_shows_the_training_loss_once(runs):
    lines = read_json_lines(runs[2].path / "metrics.jsonl", "train")
    assert [line["step"] for line in lines] == [20, 40, 48]
    assert [line["loss"] for line in lines] == pytest.approx([line["logloss"] for line in lines], rel=1e-5)
    page = (runs[2].path / "report.html").read_text()
    assert "log loss<" in page and ">loss<" not in page, "the loss of bce is the log loss"


@pytest.mark.parametrize("workers", WORKER_COUNTS)
def test_ranks_look_up_each_id_once_per_epoch(runs, tiny_data, workers):
    """Each id of an epoch is looked up once, on any rank, and all checks pass."""
    lines = read_json_lines(runs[workers].path / "ranks.jsonl")
    assert sorted((line["step"], line["rank"]) for line in lines) == [
        (step, rank) for step in (20, 40, 48) for rank in range(workers)
    ]
    data = pq.read_table(tiny_data / "train")
    ids = {"user": data.num_rows, "tag": pc.sum(pc.list_value_length(data["tags"])).as_py()}
    for name, count in ids.items():
        looked_up = sum(line["tables"][name]["lookups"] for line in lines if name in line["tables"])
        assert looked_up == 3 * count
    checks = read_json_lines(runs[workers].path / "checks.jsonl")
    names = {"same_environment", "shards", "replicas", "parity", "conservation", "finite", "numerics"}
    assert {c["check"] for c in checks} == names and [c for c in checks if not c["passed"]] == []
    assert runs[workers].metrics["train.checks_passed"] == len(checks)


def test_final_evaluation_records_curves(runs):
    (final,) = read_json_lines(runs[2].path / "metrics.jsonl", "final")
    roc, reliability = final["curves"]["roc"], final["curves"]["reliability"]
    steps = zip(roc["fpr"], roc["fpr"][1:], roc["tpr"], roc["tpr"][1:], strict=False)
    area = sum((x2 - x1) * (y1 + y2) / 2 for x1, x2, y1, y2 in steps)
    assert area == pytest.approx(final["auc"], abs=2e-3)
    assert sum(reliability["rows"]) == 1003


@pytest.mark.survive
def test_evaluate_accepts_checkpoint_folder_and_single_file(runs, tiny_data):
    again = evaluate(runs[1].path / "checkpoints", str(tiny_data / "valid/part-1.parquet"), workers=1)
    assert again.metrics["eval.rows"] == 250


@pytest.mark.survive
def test_metrics_undefined_for_one_class_are_null(runs, tiny_data, tmp_path):
    table = pq.read_table(tiny_data / "test")
    pq.write_table(table.filter(pc.equal(table["label"], 1)).slice(0, 50), tmp_path / "ones.parquet")
    figures = evaluate(runs[1].path, str(tmp_path / "ones.parquet"), workers=1).metrics
    assert figures["eval.auc"] is None and figures["eval.ne"] is None
    assert figures["eval.rows"] == 50 and figures["eval.logloss"] > 0
    json.dumps(figures, allow_nan=False)


@pytest.mark.survive
def test_a_run_can_be_moved(runs, tiny_data, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(runs[1].path, moved)
    config = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(config.replace(str(runs[1].path), "/nowhere/run"))
    again = evaluate(moved, str(tiny_data / "test"), workers=1)
    assert again.metrics["eval.auc"] == pytest.approx(runs[1].metrics["eval.auc"], abs=1e-6)
    assert not Path("/nowhere").exists()


def test_a_finished_run_is_not_overwritten(runs, tiny_data):
    with pytest.raises(RunError, match="already contains a finished run"):
        driver.train(parquet.config_values(tiny_data, runs[1].path))


def is_loopback(address):
    return ip_address(address.removeprefix("::ffff:")).is_loopback


@contextmanager
def record_open_addresses(heard):
    """Record non-loopback addresses on which this process or a child listens during the block."""
    over, this = threading.Event(), psutil.Process()

    def look():
        while not over.wait(0.1):
            ours = {this.pid, *(child.pid for child in this.children(recursive=True))}
            listening = (c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in ours)
            heard.update(c.laddr for c in listening if not is_loopback(c.laddr.ip))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_run_listens_only_on_loopback(runs, open_addresses):
    assert runs[2].metrics["world_size"] == 2
    assert not open_addresses


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="names Linux's interfaces")
def test_gloo_and_nccl_use_the_interface_of_ray(monkeypatch, tmp_path):
    """A worker sets the interface before it joins a group; existing settings are kept."""
    import ray

    from raytrec.cluster.session import get_loopback_environment

    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

    def told(env):
        """Return the interfaces that a worker with these variables would use."""
        import os

        from raytrec.worker.rendezvous import listen_on_own_address

        for name in (*names, "NCCL_CONF_FILE"):  # a local cluster's processes have inherited them
            os.environ.pop(name, None)
        os.environ |= env
        listen_on_own_address()
        return {name: os.environ.get(name) for name in names}

    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=ib0\n")
    environments = {}, {"NCCL_SOCKET_IFNAME": "eth7"}, {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}
    ask = ray.remote(num_cpus=0, max_calls=1)(told).remote
    plain, own, conf = ray.get([ask(env) for env in environments], timeout=120)
    assert plain == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}, (
        "= means this exact name, not names with this prefix"
    )
    assert own["NCCL_SOCKET_IFNAME"] == "eth7"
    assert conf == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": None}, "NCCL's file sets it"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert get_loopback_environment().items() >= {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}.items()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert get_loopback_environment()["NCCL_SOCKET_IFNAME"] == "eth7"


def test_check_gpu_explains_missing_cuda_support(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"GPU of 127.0.0.1: this build of torch is for CPUs") as error:
        check_gpu("127.0.0.1")
    assert "make install DEVICE=cuda" in error.value.do
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"cannot use the GPU of 127.0.0.1\n") as error:
        check_gpu("127.0.0.1")
    assert "driver for CUDA 13.0" in error.value.expected


EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_expandable_segments_respect_existing_settings(monkeypatch):
    from raytrec.worker.rendezvous import enable_expandable_segments

    for given, set_for_it in (({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}), ({}, EXPANDABLE_SEGMENTS)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", dict(given))
            enable_expandable_segments()
            assert os.environ == given | set_for_it


@pytest.fixture
def nvml(monkeypatch):
    """NVML of a host with two GPUs, without a limit to visible GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)


@pytest.fixture
def two_gpus(monkeypatch):
    """Fake host with two GPUs, which every rank can see; the tests change the second one."""
    import torch

    kinds = [("Good GPU", (8, 9)), ("Some GPU", (8, 0))]
    monkeypatch.setattr(machine, "get_installed_version", lambda package: "1.8.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: kinds[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: kinds[index][1])
    return kinds


def test_check_gpu_rejects_gpu_unsupported_by_fbgemm(two_gpus):
    check_gpu("127.0.0.1")
    two_gpus[1] = ("Some GPU", (7, 5))
    with pytest.raises(ConfigError, match=r"no code for Some GPU \(.* 7\.5\)"):
        check_gpu("127.0.0.1")


@pytest.mark.parametrize(
    "action,status,asks", [(0, 0, None), (1, 0, "a reset"), (2, 0, "a reboot"), (3, 0, None), (1, 3, None)]
)
def test_check_gpu_rejects_failed_gpu(two_gpus, nvml, monkeypatch, action, status, asks):
    """NVML reports the required recovery if the driver is recent enough."""
    field = SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=action))
    healthy = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda gpu, _: [field if gpu else healthy])
    with pytest.raises(GpuFailedError, match=f"GPU 1 of .* requires {asks}") if asks else nullcontext() as error:
        check_gpu("127.0.0.1")
    assert not asks or error.value.place[1] == "1"


def test_recovery_of_an_invisible_gpu_is_unknown(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert find_needed_recovery("cuda:1") is None


def test_no_gpu_is_visible_with_an_empty_variable(nvml, monkeypatch):
    assert list_usable_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list_usable_gpus() == []


def list_modification_times(folder):
    """Return the modification times of a folder and everything in it."""
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


@pytest.mark.survive
def test_bad_test_rows_do_not_lose_the_trained_model(tiny_data, tmp_path, monkeypatch):
    """The model is saved before the evaluation and can be evaluated without the bad rows."""
    bad, run = parquet.write_dataset(tmp_path / "bad"), tmp_path / "run"
    parquet.change_column_values(bad / "test/part-0.parquet", "user", {3: 40}, write_statistics=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="id 40 of feature 'user' is out of range for table 'user'") as error:
        driver.train(parquet.config_values(bad, run, scaling__num_workers=1, train__max_steps=3))
    assert "the trained model is saved" in error.value.do
    assert "`raytrec evaluate run --set data.on_error=skip`" in error.value.do
    assert "raytrec train --resume run" in error.value.do

    before = list_modification_times(run)
    for change, rows in (("data.on_error=skip", 1002), ("tables.us*.out_of_range=hash", 1003)):
        figures = evaluate("run", overrides=[change]).metrics
        assert (figures["eval.rows"], figures["eval.skipped_rows"]) == (rows, 1003 - rows)
    assert list_modification_times(run) == before, "evaluation must not write to the run folder"

    shutil.copytree(tiny_data / "test", bad / "test", dirs_exist_ok=True)
    assert driver.train(None, resume="run").metrics["eval.rows"] == 1003


def test_bad_values_in_footers_are_reported_before_start(tmp_path):
    bad = parquet.write_dataset(tmp_path / "bad", train=200, valid=50, test=50)
    parquet.change_column_values(bad / "test/part-1.parquet", "label", {3: 7})
    settings = parquet.config_values(bad, tmp_path / "run")
    with pytest.raises(DataError, match="label 'label' is 7") as error:
        driver.train(settings)
    assert "part-1.parquet, row group 0, column label, row 3" in error.value.where
    assert not (tmp_path / "run").exists()
    assert open_data(load_config(settings, ["data.on_error=skip"]))[1]["test"].rows == 50


@pytest.mark.slow
def test_run_rejects_more_workers_than_cpus(tiny_data, tmp_path):
    with pytest.raises(ConfigError, match=r"no room for 6 workers with readers \(\d+ CPUs"):
        driver.train(parquet.config_values(tiny_data, tmp_path / "run", scaling__num_workers=6))


@pytest.mark.survive
def test_unusable_mlflow_store_is_reported(tiny_data, tmp_path):
    (tmp_path / "file").write_text("")
    values = parquet.config_values(tiny_data, tmp_path / "run", tracking__uri=f"sqlite:///{tmp_path}/file/mlflow.db")
    with pytest.raises((ConfigError, driver.Unfinished), match="cannot open the MLflow store") as error:
        driver.train(values)  # depends on whether MLflow or training finishes first
    if isinstance(error.value, driver.Unfinished):
        assert "raytrec track" in str(error.value) and (tmp_path / "run/result.json").exists()
