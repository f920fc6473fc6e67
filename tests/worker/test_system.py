"""System metrics of the current process, and run tags from a real Ray cluster."""

import os
import time
from contextlib import suppress
from mmap import PAGESIZE, mmap
from threading import Event, Thread

import psutil
import pynvml
import pytest

from raytrec.common.machine import bind_to_gpu_node
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
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def spin(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.slow
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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_all_threads_are_bound_to_the_cpus_of_the_gpus_node(monkeypatch):
    before, stop = os.sched_getaffinity(0), Event()
    gpu_cpus = {70, max(before)}  # CPU 70 does not exist, or is another CPU of the node
    words = [sum(1 << cpu % 64 for cpu in gpu_cpus if cpu // 64 == number) for number in range(2)]
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCpuAffinity", lambda gpu, count: words if gpu == 3 else [0, 0])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    thread = Thread(target=stop.wait)
    thread.start()
    try:
        bind_to_gpu_node("cuda:1")
        assert os.sched_getaffinity(0) == before, "a node without usable CPUs must change nothing"
        bind_to_gpu_node("cuda:3")
        assert os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) == gpu_cpus & before
    finally:
        stop.set()
        for native_id in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(native_id), before)


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
