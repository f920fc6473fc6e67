"""`raytrec serve` on its own local Ray: memory of its processes, kept connections, restart on the same port."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from services import TOKEN, command_line
from urllib3 import PoolManager, Retry
from waiting import wait_for

from raytrec.verification.verify import verify

pytestmark = pytest.mark.survive
CLIENTS, SHARE_TIMEOUT_S = 12, 30


@pytest.fixture
def export(exports_and_table):
    """Return the path of the export and the rows."""
    made, table = exports_and_table
    return made["whole"].path, table.to_pylist()


def test_command_does_not_load_torch_and_replicas_are_forked(service):
    assert "libtorch" not in Path(f"/proc/{service.process.pid}/maps").read_text()
    replicas = service.replicas()
    assert len(replicas) == 2
    (controller,) = service.family("ServeController")
    for process in (*replicas, controller, *service.family("ray::Coordinator")):
        assert "forking.py" in command_line(process.parent())


def test_both_replicas_equal_the_checkpoint(service, export):
    metrics = verify(service.url, str(Path(export[0]).parent)).metrics
    assert metrics["result"] == "equal" and len(metrics["replicas"]) == 2


def count_requests(service):
    """Return the number of answered requests of each replica."""
    counts = Counter()
    for sample in service.samples():
        if sample.name == "raytrec_requests_total" and sample.labels["path"] == "/predict":
            counts[sample.labels["replica"]] += sample.value
    return counts


def list_replicas(service):
    """Return the ids of the replicas that report; empty if the service does not answer."""
    try:
        return service.ask("/versions").keys()
    except OSError:
        return set()


def test_new_replica_takes_over_kept_connections(service, export):
    """One of two replicas is killed, so that the other one has all connections when a new replica starts."""
    stop, failed = threading.Event(), []

    def run():
        http = PoolManager(retries=Retry(10, allowed_methods=None, backoff_factor=0.1, backoff_max=1))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        while not stop.is_set():
            try:
                answer = http.request("POST", f"{service.url}/predict", json={"rows": export[1]}, headers=headers)
                assert answer.status == 200
            except Exception as error:
                failed.append(error)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(CLIENTS):
            pool.submit(run)
        try:
            old = list_replicas(service)
            service.replicas()[0].kill()
            (new,) = wait_for(lambda: list_replicas(service) - old, "another replica", 180)
            began, shares = time.monotonic(), []
            while time.monotonic() - began < 2 * SHARE_TIMEOUT_S:  # metrics are those of the last report
                before = count_requests(service)
                time.sleep(10)
                gained = count_requests(service)
                gained.subtract(before)
                shares.append(round(gained[new] / gained.total(), 2))
        finally:
            stop.set()
    print("shares of the new replica, every 10 s:", shares)
    assert not failed and max(shares[: SHARE_TIMEOUT_S // 10 + 1]) >= 0.35 and min(shares[3:]) >= 0.3, (failed, shares)


def test_restart_right_after_the_end_succeeds(service, export, tmp_path):
    port = service.url.rpartition(":")[2]
    service.process.send_signal(signal.SIGTERM)
    with (tmp_path / "log").open("w+") as log:
        command = [sys.executable, "-m", "raytrec", "serve", export[0], "--port", port]
        again = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: "service      http" in (tmp_path / "log").read_text(), "the restart", 180)
            assert service.process.wait(60) == 0 and service.versions()
        finally:
            again.send_signal(signal.SIGTERM)
            again.wait(60)
