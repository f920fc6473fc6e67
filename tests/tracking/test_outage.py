"""The delivery process of a run with late and killed servers and a killed driver, and concurrent
writers of one sqlite file."""

import multiprocessing
import os
import signal
import subprocess
import sys
from itertools import count
from threading import Timer
from time import monotonic, perf_counter, sleep
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest
import tracked
from heads import find_free_ports
from tracked import add_compared_line, mlflow_client
from waiting import wait_for

from raytrec.common.errors import ConfigError
from raytrec.driver.track import DeliveryProcess
from raytrec.tracking.delivery import Delivery
from raytrec.tracking.store import Store


class MlflowServer:
    """`mlflow server` on a separate port on loopback, over one sqlite file."""

    def __init__(self, folder):
        (self.port,) = find_free_ports(1)
        self.folder, self.uri, self._process = folder, f"http://127.0.0.1:{self.port}", None

    def start(self):
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        if self._process:
            return
        # A copy of the template store, so that the server need not create tables.
        SqlAlchemyStore(f"sqlite:///{self.folder}/mlflow.db", "mlflow-artifacts:/")
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.folder / "server.log", "a") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self._answers, "MLflow's server", 120)

    def _answers(self):
        try:
            urlopen(f"{self.uri}/health", timeout=5).close()
        except (URLError, TimeoutError, ConnectionError):
            return False
        return True

    def kill(self):
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)  # the server and its worker
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def outage_server(tmp_path_factory):
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


def read_history(uri, run_id, name):
    return [(step, value) for step, value, _ in tracked.metric_history(uri, run_id, name)]


def start_delivery_process(uri, folder, **tracking):
    """Start the delivery process of a run; return it with the list of its messages."""
    values = {"run": {"name": "run"}, "tracking": {"uri": uri, "experiment": "outage", **tracking}}
    said = []
    return DeliveryProcess(tracked.write_tracked_config(folder, values), said.append), said


def wait_for_run_id(follower):
    return wait_for(lambda: (follower.check(), follower.run_id)[1], "a run in MLflow", 120)


@pytest.mark.survive
def test_delivery_survives_a_late_and_a_killed_server(outage_server, tmp_path):
    outage_server.kill()
    follower, said = start_delivery_process(outage_server.uri, tmp_path, parent_run="grid")
    steps = iter(range(10**6))

    def hand_over(seconds, until=lambda: False):
        """Add 20 figures per step, as a training loop does."""
        end = monotonic() + seconds
        while monotonic() < end and not until():
            step = next(steps)
            add_compared_line(tmp_path, {f"m{i}": step + i for i in range(20)}, step)
            sleep(0.02)
            follower.check()

    hand_over(60, until=lambda: said)
    assert follower.ready() is follower.run_id is None
    assert len(said) == 1 and "Connection refused" in said[0] and "stay in the run folder" in said[0]
    outage_server.start()
    run_id = wait_for_run_id(follower)
    hand_over(120, until=lambda: len(said) == 2)
    wait_for(lambda: read_history(outage_server.uri, run_id, "m0"), "figures in MLflow")
    outage_server.kill()
    hand_over(60, until=lambda: len(said) == 3)
    (tmp_path / "plan.json").write_text("kept")
    outage_server.start()
    hand_over(120, until=lambda: len(said) == 4)
    hand_over(1)
    assert follower.close("FINISHED") is None
    assert ["MLflow accepts records again" in text for text in said] == [False, True] * 2
    assert "cannot write to MLflow" in said[2]

    sent, client = next(steps), mlflow_client(outage_server.uri)
    for name, more in (("m0", 0), ("m19", 19)):
        assert read_history(outage_server.uri, run_id, name) == [(step, float(step + more)) for step in range(sent)]
    assert {each.path for each in client.list_artifacts(run_id)} == {"config.yaml", "plan.json"}
    run = client.get_run(run_id)
    assert client.get_run(run.data.tags["mlflow.parentRunId"]).info.run_name == "grid"
    assert run.info.status == "FINISHED"

    again, _ = start_delivery_process(outage_server.uri, tmp_path)
    assert wait_for_run_id(again) == run_id
    outage_server.kill()
    add_compared_line(tmp_path, {"after": 1.0}, sent)
    began = perf_counter()
    lost = again.close("FINISHED", patience_s=1.5)
    assert perf_counter() - began < 30
    assert lost.startswith("MLflow lacks the end of the run (not written within 1.5 s)")
    assert f"raytrec track {tmp_path}" in lost


@pytest.fixture
def default_sigint():
    """Restore the default SIGINT handler, because parallel test runs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_stops_waiting_for_delivery(outage_server, tmp_path, default_sigint):
    outage_server.kill()
    follower, said = start_delivery_process(outage_server.uri, tmp_path)
    wait_for(lambda: (follower.check(), said)[1], "a warning")
    Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = perf_counter()
    assert "(interrupted)" in follower.close("KILLED", patience_s=60)
    assert perf_counter() - began < 20


def run_driver_until_killed(uri, folder, told):
    """Add lines until the process is killed."""
    follower, _ = start_delivery_process(uri, folder)
    run_id = wait_for_run_id(follower)
    told.put((run_id, follower._process.pid))
    for step in range(10**6):
        add_compared_line(folder, {"loss": float(step)}, step)
        sleep(0.05)


@pytest.mark.survive
def test_delivery_process_finishes_after_its_driver_dies(outage_server, tmp_path):
    uri = f"sqlite:///{outage_server.folder}/other.db"
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    driver = context.Process(target=run_driver_until_killed, args=(uri, tmp_path, told), daemon=True)
    driver.start()
    run_id, process = told.get(timeout=120)
    assert os.getpriority(os.PRIO_PROCESS, process) == 19
    sleep(1)
    driver.kill()
    driver.join(30)
    wait_for(lambda: not psutil.pid_exists(process) or psutil.Process(process).status() == "zombie", "end")
    assert mlflow_client(uri).get_run(run_id).info.status == "FAILED"
    lines = (tmp_path / "metrics.jsonl").read_text().count("\n")
    assert len(read_history(uri, run_id, "loss")) == lines, "lines of the killed driver are missing"

    resumed, _ = start_delivery_process(uri, tmp_path)
    assert wait_for_run_id(resumed) == run_id
    assert mlflow_client(uri).get_run(run_id).info.status == "RUNNING"
    assert resumed.close("KILLED") is None
    assert mlflow_client(uri).get_run(run_id).info.status == "KILLED"


def test_killed_delivery_process_error_names_the_track_command(outage_server, tmp_path):
    follower, _ = start_delivery_process(f"sqlite:///{outage_server.folder}/other.db", tmp_path)
    follower._process.kill()
    follower._process.wait()
    follower.check()
    assert follower.ready() is None
    lost = follower.close("FINISHED")
    assert "has exited" in lost and f"raytrec track {tmp_path}" in lost


@pytest.mark.slow
def test_delivery_process_reports_an_invalid_store(tmp_path):
    (tmp_path / "file").write_text("")
    follower, _ = start_delivery_process(f"sqlite:///{tmp_path}/file/mlflow.db", tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot open the MLflow store"):
        follower.ready()
    assert follower.close("FINISHED") is None


def open_and_die(store, upgrade):
    """Open a store, and kill this process at the end of an upgrade by which MLflow creates its tables."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    upgrades = count(1)

    @event.listens_for(Engine, "before_cursor_execute")
    def die(connection, cursor, statement, *_):
        if statement.startswith("UPDATE alembic_version") and next(upgrades) == upgrade:
            os.kill(os.getpid(), signal.SIGKILL)

    store.open()


@pytest.mark.slow
@pytest.mark.parametrize("upgrade", [3, 12])
def test_process_killed_while_it_creates_tables_leaves_a_usable_store(tmp_path, preloaded_processes, upgrade):
    config = tracked.write_tracked_config(tmp_path / "run", {"tracking": {"uri": f"sqlite:///{tmp_path}/mlflow.db"}})
    creator = preloaded_processes.Process(target=open_and_die, args=(Store(config, tmp_path / "run"), upgrade))
    creator.start()
    creator.join()
    assert creator.exitcode == -signal.SIGKILL
    store = Store(config, tmp_path / "run")
    store.open()
    assert mlflow_client(store.uri).get_run(store.run_id)
    assert [path.name for path in tmp_path.glob("mlflow.db*")] == ["mlflow.db"]


WRITERS, STEPS, FIGURES = 8, 6, 100


def write_concurrent_run(uri, folder, writer, gate, results):
    """Write a run at the same time as other processes into a store that does not exist yet."""
    said, name = [], f"run-{writer}"
    tracking = {"uri": uri, "experiment": "many", "parent_run": "grid"}
    config = tracked.write_tracked_config(folder / name, {"run": {"name": name}, "tracking": tracking})
    gate.wait()
    delivery = Delivery(folder / name, config, said.append)
    for step in range(STEPS):
        add_compared_line(folder / name, {f"m{i}": writer * 1000 + i + step / 100 for i in range(FIGURES)}, step)
        delivery.deliver()
    lost = delivery.finish("FINISHED", 60)
    results.put((writer, delivery.run_id, lost, said))


@pytest.mark.survive
def test_eight_processes_can_write_to_one_new_sqlite_file(tmp_path, preloaded_processes):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    gate, results = preloaded_processes.Barrier(WRITERS), preloaded_processes.Queue()
    for writer in range(WRITERS):
        args = uri, tmp_path, writer, gate, results
        preloaded_processes.Process(target=write_concurrent_run, args=args, daemon=True).start()
    found = sorted(results.get(timeout=120) for _ in range(WRITERS))
    assert [(lost, said) for _, _, lost, said in found] == [(None, [])] * WRITERS

    parents = set()
    for writer, run_id, _, _ in found:
        run = mlflow_client(uri).get_run(run_id)
        parents.add(run.data.tags["mlflow.parentRunId"])
        assert len(run.data.metrics) == FIGURES
        for i in (0, FIGURES - 1):
            expected = [(step, writer * 1000 + i + step / 100) for step in range(STEPS)]
            assert read_history(uri, run_id, f"m{i}") == expected
    experiment = mlflow_client(uri).get_experiment_by_name("many")
    runs = mlflow_client(uri).search_runs([experiment.experiment_id])
    left = {run.info.run_id for run in runs if run.info.run_name == "grid"}
    assert left == parents and len(parents) == 1, "the runs do not share exactly one parent"
    assert len(runs) == WRITERS + 1
