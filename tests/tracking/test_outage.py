"""A real MLflow server that comes late and is killed; many processes that write into one sqlite file."""

import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
from threading import Thread, Timer
from time import monotonic, perf_counter, sleep, time
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from raytrec.common.messages import Compared
from raytrec.tracking.journal import append_line
from raytrec.tracking.mlflow import Tracker
from raytrec.tracking.store import Store


class Server:
    """`mlflow server` on a port of its own on loopback, over one sqlite file."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.uri, self._process = folder, f"http://127.0.0.1:{self.port}", None

    def start(self):
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        if self._process:
            return
        # A copy of the first store of these tests: the server finds its tables there.
        SqlAlchemyStore(f"sqlite:///{self.folder}/mlflow.db", "mlflow-artifacts:/")
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.folder / "server.log", "a") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self):
        until = monotonic() + 120
        while monotonic() < until:
            try:
                return urlopen(f"{self.uri}/health", timeout=5).close()
            except (URLError, TimeoutError, ConnectionError):
                sleep(0.2)
        raise TimeoutError((self.folder / "server.log").read_text())

    def kill(self):
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)  # itself and the worker that it has started
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def try_again_soon(monkeypatch):
    """After 1 s, 2 s, 2 s, …, and a start waits for 2 s, to save the tests' time."""
    monkeypatch.setattr("raytrec.tracking.calls.LONGEST_S", 2.0)
    monkeypatch.setattr("raytrec.tracking.mlflow.READY_S", 2.0)


def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def add(folder, figures, step):
    """A line of the run folder, whose figures have their own names in MLflow."""
    append_line(folder, Compared(step=step, unix_s=time(), figures=figures))


def wait_until(condition, seconds=120):
    until = monotonic() + seconds
    while not condition():
        assert monotonic() < until, "in vain"
        sleep(0.05)


def history(uri, run_id, name):
    return [(m.step, m.value) for m in client(uri).get_metric_history(run_id, name)]


def test_server_that_comes_after_the_start(server, tmp_path):
    import mlflow  # noqa: F401  (so that only the server is waited for)

    said = []
    began = perf_counter()
    tracker = Tracker(server.uri, "late", "run", tmp_path, parent="grid", on_trouble=said.append)
    assert tracker.ready() is tracker.run_id is None
    assert perf_counter() - began < 30, "MLflow itself tries for 100 s"
    (tmp_path / "note.txt").write_text("early")
    tracker.file(tmp_path / "note.txt")
    for step in range(100):
        add(tmp_path, {"loss": step / 100}, step)
    assert len(said) == 1 and "Connection refused" in said[0] and "is kept in the run folder" in said[0]
    server.start()
    server.wait()
    wait_until(lambda: tracker.run_id)
    assert tracker.close("FINISHED") is None
    assert len(said) == 2 and said[1].startswith("MLflow is back")
    assert history(server.uri, tracker.run_id, "loss") == [(step, step / 100) for step in range(100)]
    assert [a.path for a in client(server.uri).list_artifacts(tracker.run_id)] == ["note.txt"]
    run = client(server.uri).get_run(tracker.run_id)
    assert client(server.uri).get_run(run.data.tags["mlflow.parentRunId"]).info.run_name == "grid"


@pytest.mark.survive
def test_server_killed_while_metrics_come_in(server, tmp_path):
    server.start()
    server.wait()
    said, took_s = [], {"up": [], "down": []}
    tracker = Tracker(server.uri, "killed", "run", tmp_path, on_trouble=said.append)
    run_id = tracker.ready()
    assert run_id and tracker.run_id == run_id
    steps = iter(range(10**6))

    def hand_over(seconds, state, until=lambda: False):
        """As a training loop does, with 20 figures a step."""
        end = monotonic() + seconds
        while monotonic() < end and not until():
            step = next(steps)
            figures = {f"m{i}": step + i for i in range(20)}
            began = perf_counter()
            add(tmp_path, figures, step)
            took_s[state].append(perf_counter() - began)
            sleep(0.02)

    hand_over(3, "up")
    wait_until(lambda: history(server.uri, run_id, "m0"))
    server.kill()
    hand_over(4, "down")
    (tmp_path / "during.txt").write_text("kept")
    tracker.file(tmp_path / "during.txt")
    assert len(said) == 1 and "does not answer" in said[0]
    server.start()
    hand_over(120, "down", until=lambda: len(said) == 2)
    assert said[1].startswith("MLflow is back")
    hand_over(1, "up")
    assert tracker.close("FINISHED") is None
    assert len(said) == 2, said

    sent = next(steps)
    for name, more in (("m0", 0), ("m19", 19)):
        assert history(server.uri, run_id, name) == [(step, float(step + more)) for step in range(sent)]
    assert [a.path for a in client(server.uri).list_artifacts(run_id)] == ["during.txt"]
    assert client(server.uri).get_run(run_id).info.status == "FINISHED"
    typical = {state: statistics.median(times) for state, times in took_s.items()}
    assert typical["up"] < 1e-3 and typical["down"] < 1e-3
    assert typical["down"] < 3 * typical["up"] + 1e-4, typical

    again = Tracker(server.uri, "killed", "run", tmp_path)
    assert again.ready() == run_id
    server.kill()
    add(tmp_path, {"after": 1.0}, sent)
    began = perf_counter()
    lost = again.close("FINISHED", patience_s=1.5)
    assert perf_counter() - began < 30
    assert "lacks 1 record and the end of the run" in lost and "Connection refused" in lost


@pytest.fixture
def ctrl_c():
    """SIGINT does what it does by default; where tests run side by side, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_waiting(server, tmp_path, ctrl_c):
    server.kill()
    tracker = Tracker(server.uri, "late", "run", tmp_path)
    assert tracker.ready() is None
    add(tmp_path, {"loss": 1.0}, 1)
    Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = perf_counter()
    assert "lacks 1 record" in tracker.close("KILLED", patience_s=60)
    assert perf_counter() - began < 40


WRITERS, STEPS, FIGURES = 8, 6, 100


def write_a_run(uri, artifacts, writer, gate, results):
    """One of several processes that begin at the same time with a store that does not exist yet."""
    said, folder = [], artifacts.parent / f"run-{writer}"
    folder.mkdir()
    gate.wait()
    tracker = Tracker(
        uri, "many", f"run-{writer}", folder, artifacts=artifacts, parent="grid", on_trouble=said.append
    )
    run_id = tracker.ready()
    for step in range(STEPS):
        add(folder, {f"m{i}": writer * 1000 + i + step / 100 for i in range(FIGURES)}, step)
        sleep(0.3)
    results.put((writer, run_id, tracker.close("FINISHED", patience_s=60), said))


def test_eight_processes_write_into_one_new_sqlite_file(tmp_path):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    processes = multiprocessing.get_context("forkserver")  # its children have imported MLflow already
    processes.set_forkserver_preload(["raytrec.tracking.mlflow", "mlflow.store.tracking.sqlalchemy_store"])
    gate, results = processes.Barrier(WRITERS), processes.Queue()
    for writer in range(WRITERS):
        args = (uri, tmp_path / "artifacts", writer, gate, results)
        processes.Process(target=write_a_run, args=args, daemon=True).start()
    found = sorted(results.get(timeout=120) for _ in range(WRITERS))
    assert [(lost, said) for _, _, lost, said in found] == [(None, [])] * WRITERS

    parents = set()
    for writer, run_id, _, _ in found:
        run = client(uri).get_run(run_id)
        parents.add(run.data.tags["mlflow.parentRunId"])
        assert len(run.data.metrics) == FIGURES
        for i in (0, FIGURES - 1):
            expected = [(step, writer * 1000 + i + step / 100) for step in range(STEPS)]
            assert history(uri, run_id, f"m{i}") == expected
    experiment = client(uri).get_experiment_by_name("many")
    runs = client(uri).search_runs([experiment.experiment_id])
    left = {run.info.run_id for run in runs if run.info.run_name == "grid"}
    assert left == parents and len(parents) == 1, "one parent for all, the others removed"
    assert len(runs) == WRITERS + 1


def test_eight_threads_feed_one_tracker(server, tmp_path, monkeypatch):
    tracker = Tracker(f"sqlite:///{server.folder}/mlflow.db", "many", "run", tmp_path)
    tracker.ready()
    calls, write = [], Store.write_metrics
    monkeypatch.setattr(Store, "write_metrics", lambda *args: (calls.append(monotonic()), write(*args)))

    def feed(rank):
        for step in range(100):
            add(tmp_path, {f"rank_{rank}/m{i}": step for i in range(5)}, step)
            sleep(0.03)

    began = monotonic()
    threads = [Thread(target=feed, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = monotonic() - began
    assert tracker.close("FINISHED") is None
    # A few a second, not one for each of 800 lines; at first, what came while the store was opened.
    assert len(calls) <= 4 * seconds + 40
    for rank in range(8):
        for i in range(5):
            found = history(tracker.uri, tracker.run_id, f"rank_{rank}/m{i}")
            assert found == [(step, float(step)) for step in range(100)]
