"""System metrics of the current process, and run tags from a real Ray cluster."""

import time
from mmap import PAGESIZE, mmap

import psutil
import pytest

from raytrec.tracking.mlflow_records import collect_run_tags, system_metrics
from raytrec.worker.process import SystemMonitor

KEYS = {
    "cpu_percent",
    "rss_bytes",
    "host_memory_percent",
    "network_sent_bytes_per_s",
    "network_received_bytes_per_s",
    "gpu_percent",
    "gpu_memory_bytes",
}


def has_gpu():
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def spin(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_sample_covers_this_process_since_the_last_call():
    system = SystemMonitor()
    time.sleep(0.3)
    idle = system.sample()
    began, cpu = time.perf_counter(), time.process_time()
    spin(0.3)
    share = 100 * (time.process_time() - cpu) / (time.perf_counter() - began)
    busy = system.sample()
    assert idle.keys() == KEYS
    assert idle["cpu_percent"] < 50 < share + 40
    assert busy["cpu_percent"] == pytest.approx(share, rel=0.25)
    block = mmap(-1, 200_000_000)  # new pages, not memory cached by Python's allocator
    for page in range(0, len(block), PAGESIZE):
        block[page] = 1
    assert system.sample()["rss_bytes"] - busy["rss_bytes"] == pytest.approx(len(block), rel=0.1)
    assert idle["host_memory_percent"] == pytest.approx(psutil.virtual_memory().percent, abs=15)
    assert idle["network_sent_bytes_per_s"] >= 0 and idle["network_received_bytes_per_s"] >= 0
    assert idle["gpu_percent"] is idle["gpu_memory_bytes"] is None


def test_network_rates_match_host_counters(monkeypatch):
    counter = psutil.net_io_counters()
    now = {"lo": counter._replace(bytes_sent=10**9), "eth0": counter._replace(bytes_sent=0, bytes_recv=0)}
    monkeypatch.setattr("psutil.net_io_counters", lambda pernic: now)
    system = SystemMonitor()
    time.sleep(0.2)
    now = {"lo": counter._replace(bytes_sent=10**10), "eth0": counter._replace(bytes_sent=2000, bytes_recv=500)}
    sample = system.sample()
    assert 2000 / 60 < sample["network_sent_bytes_per_s"] <= 2000 / 0.2
    assert sample["network_sent_bytes_per_s"] == pytest.approx(4 * sample["network_received_bytes_per_s"])


def test_unreadable_metrics_are_none(monkeypatch):
    def fails(*_, **__):
        raise PermissionError("/proc")

    system = SystemMonitor()
    for name in ("virtual_memory", "net_io_counters"):
        monkeypatch.setattr(psutil, name, fails)
    monkeypatch.setattr(psutil.Process, "cpu_percent", fails)
    sample = system.sample()
    assert sample.keys() == KEYS and sample.pop("rss_bytes") > 0
    assert set(sample.values()) == {None}


@pytest.mark.skipif(has_gpu(), reason="the machine has a GPU")
def test_gpu_metrics_are_none_without_a_gpu():
    sample = SystemMonitor("cuda:0").sample()
    assert sample["gpu_percent"] is sample["gpu_memory_bytes"] is None


@pytest.mark.skipif(not has_gpu(), reason="needs a GPU and its driver")
def test_gpu_metrics_are_read_from_nvml():
    system = SystemMonitor("cuda:0")
    time.sleep(2.5)
    sample = system.sample()
    system.close()
    assert 0 <= sample["gpu_percent"] <= 100
    assert sample["gpu_memory_bytes"] > 0


def test_system_metric_names_match_mlflow():
    sample = {"cpu_percent": 98.0, "rss_bytes": 5e8, "network_sent_bytes_per_s": 2e6, "gpu_percent": None}
    assert system_metrics(3, sample) == {
        "system/rank_3/cpu_utilization_percentage": 98.0,
        "system/rank_3/process_memory_usage_megabytes": pytest.approx(500.0),
        "system/rank_3/network_transmit_megabytes_per_s": pytest.approx(2.0),
    }
    assert len(system_metrics(0, dict.fromkeys(KEYS, 1.0))) == len(KEYS)


def test_run_tags_describe_the_cluster(ray_cluster):
    tags = collect_run_tags()
    assert (tags["cluster.nodes"], tags["cluster.cpus"], tags["cluster.gpus"]) == ("1", "6", "0")
    assert "cluster.gpu_types" not in tags
