"""Test runs on several hosts, one of which is cut off and reconnected."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoints
import planted
import pytest
import recorder
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hosts import HostCluster, NamespaceHost, why_hosts_unavailable
from watched import Run

from raytrec.checkpoint.files import find_newest_checkpoint
from raytrec.checkpoint.storage import ShardWriter
from raytrec.common.errors import RunError, get_root_cause
from raytrec.driver.coordinator import Coordinator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

WORKERS, HANG_S, STEPS = 3, 20, 300


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    if why := why_hosts_unavailable(folder):
        pytest.skip(why)
    records = str(folder / "records")
    environment = {"PYTHONPATH": str(BENCHMARKS), recorder.RECORDS: records}
    with pytest.MonkeyPatch.context() as patch, HostCluster(folder, WORKERS, environment=environment) as cluster:
        patch.setenv(recorder.RECORDS, records)
        (cluster.root / "data").mkdir()
        cluster.rows = planted.prepare(cluster.root / "data", STEPS)
        yield cluster


class HostRun(Run):
    """`raytrec train` on the head, with a record of every step.

    Args:
        name: name of the run.
        workers: scaling.num_workers.
    """

    def __init__(self, hosts: HostCluster, name: str, workers: int | dict[str, int], **train):
        config = planted.configure(hosts.root, hosts.root / "data", workers)
        values = yaml.safe_load(config.read_text())
        values["scaling"] |= {"hang_timeout_s": HANG_S}
        values["train"] |= train
        config = hosts.root / f"{name}.yaml"
        config.write_text(yaml.safe_dump(values))
        folder = hosts.root / name
        super().__init__(folder, folder / "checkpoints", config, hosts, time.monotonic() + 800)

    def start(self, *arguments: str) -> None:
        command = [sys.executable, str(BENCHMARKS / "recorder.py"), "train", *arguments]
        environment = self.nodes.env | {"RAY_ADDRESS": self.nodes.address}
        environment[recorder.RECORDS] = os.environ[recorder.RECORDS]
        command = self.nodes.all[0].command(*command)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def trained(self, step: int) -> bool:
        attempts = self.record.look()
        return bool(attempts) and attempts[-1].last >= step

    def host_of(self, rank: int) -> tuple[int, int]:
        """Return (host number, process id on that host) of a rank, identified by its open record file."""
        attempt = self.attempt()
        pid = attempt.ranks[rank]
        name = f"{attempt.name}-{rank}-{pid}.jsonl"
        for number, host in enumerate(self.nodes.all, 1):
            if any(name in opened for opened in _open_files(host, pid)):
                return number, pid
        raise AssertionError(f"no host has rank {rank}, process {pid}")


def _open_files(host: NamespaceHost, pid: int) -> list[str]:
    place = Path(f"/proc/{host.pid}/root/proc/{pid}/fd")
    try:
        return [os.readlink(entry) for entry in place.iterdir()]
    except FileNotFoundError:
        return []


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_run_survives_a_host_that_is_cut_off(hosts):
    calm, run = HostRun(hosts, "calm", WORKERS), HostRun(hosts, "cut", {"min": 1, "max": WORKERS})
    with calm.begun():
        calm.finish()
    with run.begun():
        run.wait("training", lambda: run.trained(5))
        run.pace(0.25)
        run.wait("a checkpoint", lambda: run.trained(30) and run.saved())
        number, pid = run.host_of(0)

        run.say("rank 0's host is cut off for a moment")
        hosts.cut_off(number)
        time.sleep(5)
        step = run.attempt().last
        hosts.heal(number)
        run.wait("the same group training on", lambda: run.trained(step + 5))
        assert len(run.record.look()) == 1, "a short outage must not restart the group"

        run.say("rank 0's host is cut off")
        cut = time.time()
        hosts.cut_off(number)
        run.wait("fewer workers", lambda: run.since(cut))
        again = run.since(cut)[0]
        assert again.world == WORKERS - 1
        left = hosts.all[number - 1]
        run.wait("the end of the process that was cut off", lambda: not _open_files(left, pid), 60)
        assert hosts.alive() <= len(hosts.all)

        run.say("it comes back")
        healed = time.time()
        hosts.heal(number)
        run.wait("all workers", lambda: run.attempt().world == WORKERS and run.since(healed))
        run.pace(0)
        run.finish()
    outcome = recorder.compare(run.record.trained(), calm.record.trained(), hosts.rows, planted.EPOCHS)
    assert outcome == {"rows_lost": 0, "rows_doubled": 0, "steps_with_other_rows": 0}
    auc, expected = run.result()["eval.auc"], calm.result()["eval.auc"]
    assert abs(auc - expected) < 1e-3
    # The coordinator has attributed the hang to rank 0.
    hang = next(event for event in run.events(cut) if event["event"] == "hang")["cause"]
    assert f"rank 0 (pid {pid} on 10.77.0.{number}) hangs or has ended: no heartbeat" in hang


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_run_starts_without_an_unreachable_host(hosts):
    """Ray may still place a worker on the host; this start times out and is repeated."""
    run = HostRun(hosts, "begin", {"min": 1, "max": WORKERS}, max_steps=60)
    hosts.cut_off(WORKERS + 1)  # Ray still counts the host
    try:
        with run.begun():
            run.wait("training", lambda: run.trained(1))
            assert run.attempt().world < WORKERS
            hosts.heal(WORKERS + 1)
            run.finish()
    finally:
        hosts.heal(WORKERS + 1)


SILENT_DRIVER_PROGRAM = """
import os, signal, sys, time
import ray
from raytrec.cluster.session import ray_session
from raytrec.driver.coordinator import start_coordinator
from raytrec.worker.heartbeat import Heartbeat
with ray_session(num_cpus=1):
    here = ray.get_runtime_context().get_node_id()
    coordinator = start_coordinator(5, 60)
    ray.get(coordinator.enter.remote("a", 0, 1, os.getpid(), "127.0.0.1", here))
    pid = ray.get(coordinator.__ray_call__.remote(lambda self: os.getpid()))
    heartbeat = Heartbeat(coordinator, "a", 0, lease_s=5)
    time.sleep(15)
    print(pid, flush=True)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(60)
"""


@pytest.mark.cluster
@pytest.mark.timeout(200)
def test_worker_exits_if_the_driver_does_not_respond():
    done = subprocess.run([sys.executable, "-c", SILENT_DRIVER_PROGRAM], capture_output=True, text=True, timeout=180)
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == 70, done.stderr
    assert "rank 0: the driver has not responded for" in done.stderr


STORE_PROGRAM = """
import sys
from datetime import timedelta
from importlib import import_module
from raytrec.cluster.session import find_interface
from raytrec.compat.torch_ import bind_store
address, port = sys.argv[1], int(sys.argv[2])
print(find_interface(address), find_interface("10.99.0.1"))
bind_store(address)
TCPStore = import_module("torch.distributed.rendezvous").TCPStore
store = TCPStore(address, port, 1, is_master=True, timeout=timedelta(seconds=30))
store.set("a", "b")
print(store.get("a").decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_store_listens_on_one_address_only(tmp_path):
    if why := why_hosts_unavailable(tmp_path):
        pytest.skip(why)
    host = NamespaceHost("alone", tmp_path)
    try:
        host.net("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        host.net("ip", "link", "set", "eth1", "up")
        host.net("ip", "address", "add", "10.77.0.9/24", "dev", "eth0")
        host.net("ip", "link", "set", "eth0", "up")
        command = host.command(sys.executable, "-c", STORE_PROGRAM, "10.77.0.9", "4711")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline().split() == ["eth0", "None"]
            assert process.stdout.readline().strip() == "b"
            assert host.listens() == {("09004D0A", 4711)}
            process.stdin.close()
    finally:
        host.end()


def test_abandoned_worker_group_commits_no_checkpoint(tmp_path):
    coordinator = Coordinator(5, 60)

    async def given_up():
        coordinator._watch_ranks = lambda: asyncio.sleep(0)
        await coordinator.enter("old", 0, 1, 1, "10.0.0.1", "")
        before = await coordinator.current("old")
        await coordinator.failed(0, "rank 0 lost its node", True, True)
        between = await coordinator.current("old")
        await coordinator.enter("new", 0, 1, 2, "10.0.0.2", "")
        return before, between, await coordinator.current("old"), await coordinator.current("new")

    assert asyncio.run(given_up()) == (True, False, False, True)

    def refuse():
        raise RunError("the driver has abandoned this worker group")

    folder = str(tmp_path / "step-0000000025")
    about = {"config": {}, "schema": "", "data": "", "progress": checkpoints.progress_values(25)}
    with pytest.raises(BaseException) as failure:
        writer = ShardWriter(folder, "a", about, confirm=refuse)
        dcp.save({"t": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert "abandoned" in get_root_cause(failure.value).what
    assert find_newest_checkpoint(str(tmp_path))[0] is None
    dcp.save({"t": torch.ones(3)}, storage_writer=ShardWriter(folder, "b", about), no_dist=True)
    assert find_newest_checkpoint(str(tmp_path))[0] == folder
