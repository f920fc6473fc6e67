"""Measurements of this very process; gauges on a real Ray's Prometheus page."""

import time
from mmap import PAGESIZE, mmap
from urllib.request import urlopen

import psutil
import pytest

from raytrec.cluster.session import ray_session
from raytrec.tracking.gauges import Gauges
from raytrec.tracking.tags import run_tags
from raytrec.tracking.translate import system_metrics
from raytrec.worker.system import System

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


def test_sample_is_of_this_process_since_the_last_call():
    system = System()
    time.sleep(0.3)
    idle = system.sample()
    began, cpu = time.perf_counter(), time.process_time()
    spin(0.3)
    share = 100 * (time.process_time() - cpu) / (time.perf_counter() - began)
    busy = system.sample()
    assert idle.keys() == KEYS
    assert idle["cpu_percent"] < 50 < share + 40
    assert busy["cpu_percent"] == pytest.approx(share, rel=0.25)
    block = mmap(-1, 200_000_000)  # not what Python has kept of what was freed
    for page in range(0, len(block), PAGESIZE):
        block[page] = 1
    assert system.sample()["rss_bytes"] - busy["rss_bytes"] == pytest.approx(len(block), rel=0.1)
    assert idle["host_memory_percent"] == pytest.approx(psutil.virtual_memory().percent, abs=15)
    assert idle["network_sent_bytes_per_s"] >= 0 and idle["network_received_bytes_per_s"] >= 0
    assert idle["gpu_percent"] is idle["gpu_memory_bytes"] is None


def test_network_is_what_the_hosts_counters_say(monkeypatch):
    counter = psutil.net_io_counters()
    now = {"lo": counter._replace(bytes_sent=10**9), "eth0": counter._replace(bytes_sent=0, bytes_recv=0)}
    monkeypatch.setattr("psutil.net_io_counters", lambda pernic: now)
    system = System()
    time.sleep(0.2)
    now = {
        "lo": counter._replace(bytes_sent=10**10),
        "eth0": counter._replace(bytes_sent=2000, bytes_recv=500),
    }
    sample = system.sample()
    assert 2000 / 60 < sample["network_sent_bytes_per_s"] <= 2000 / 0.2
    assert sample["network_sent_bytes_per_s"] == pytest.approx(4 * sample["network_received_bytes_per_s"])


def test_what_cannot_be_read_is_none(monkeypatch):
    def fails(*_, **__):
        raise PermissionError("/proc")

    system = System()
    for name in ("virtual_memory", "net_io_counters"):
        monkeypatch.setattr(psutil, name, fails)
    monkeypatch.setattr(psutil.Process, "cpu_percent", fails)
    sample = system.sample()
    assert sample.keys() == KEYS and sample.pop("rss_bytes") > 0
    assert set(sample.values()) == {None}


@pytest.mark.skipif(has_gpu(), reason="a machine with a GPU")
def test_cuda_without_a_gpu_is_none():
    sample = System("cuda:0").sample()
    assert sample["gpu_percent"] is sample["gpu_memory_bytes"] is None


@pytest.mark.skipif(not has_gpu(), reason="a GPU and its driver are not here")
def test_gpu_is_read_over_nvml():
    system = System("cuda:0")
    time.sleep(2.5)
    sample = system.sample()
    system.close()
    assert 0 <= sample["gpu_percent"] <= 100
    assert sample["gpu_memory_bytes"] > 0


def test_names_are_those_of_mlflows_page():
    sample = {"cpu_percent": 98.0, "rss_bytes": 5e8, "network_sent_bytes_per_s": 2e6, "gpu_percent": None}
    assert system_metrics(3, sample) == {
        "system/rank_3/cpu_utilization_percentage": 98.0,
        "system/rank_3/process_memory_usage_megabytes": pytest.approx(500.0),
        "system/rank_3/network_transmit_megabytes_per_s": pytest.approx(2.0),
    }
    assert len(system_metrics(0, dict.fromkeys(KEYS, 1.0))) == len(KEYS)


def test_gauges_without_ray_do_nothing():
    gauges = Gauges("run-1")
    gauges.set({"step": 20})
    assert gauges._gauges == {}


@pytest.fixture(scope="module")
def ray_that_reports_soon():
    """A local Ray whose node has a Prometheus page, and updates it every second instead of every 10."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        patch.setenv("RAY_enable_metrics_collection", "1")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # it needs no workers
        with ray_session(num_cpus=2):
            yield


def exported(run):
    """Our gauges of a run on the node's Prometheus page."""
    import ray

    address = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    lines = urlopen(address, timeout=60).read().decode().splitlines()
    ours = [line for line in lines if line.startswith("ray_raytrec_") and f'run="{run}"' in line]
    return {line.partition("{")[0]: float(line.split()[-1]) for line in ours}


def wait_until_exported(run, expected):
    until = time.monotonic() + 120
    while exported(run) != expected and time.monotonic() < until:
        time.sleep(0.3)
    assert exported(run) == expected


def test_gauges_arrive_at_the_nodes_prometheus_page_and_stay(ray_that_reports_soon, monkeypatch):
    monkeypatch.setattr("raytrec.tracking.gauges.REPEAT_S", 0.5)
    gauges = Gauges("run-1")
    gauges.set({"step": 20, "rows_per_s": 25.5, "auc": None, "eval.ne": 0.75})
    gauges.set({"step": 40, "rows_per_s": float("nan")})
    expected = {"ray_raytrec_step": 40.0, "ray_raytrec_rows_per_s": 25.5, "ray_raytrec_eval_ne": 0.75}
    wait_until_exported("run-1", expected)
    time.sleep(3)  # Ray forgets a gauge after two reports
    assert exported("run-1") == expected
    gauges.close()
    wait_until_exported("run-1", {})


def test_tags_say_the_clusters_shape(ray_that_reports_soon):
    tags = run_tags()
    assert (tags["cluster.nodes"], tags["cluster.cpus"], tags["cluster.gpus"]) == ("1", "2", "0")
    assert "cluster.gpu_types" not in tags
