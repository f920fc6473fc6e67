"""Test folders and processes of a local Ray, without Ray and with the shared Ray of the tests."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from heads import RayHead
from ray.train import ScalingConfig
from waiting import wait_for

from raytrec.cluster import lifeline, local_ray, session
from raytrec.cluster.local_ray import RAY_TMPDIR_VARIABLE, check_ports, create_private_folder, end_sessions, sweep
from raytrec.cluster.session import describe_connection, ray_session
from raytrec.common.errors import RunError
from raytrec.compat import ray_train
from raytrec.compat.ray_core import JOB_CONFIG_VARIABLE
from raytrec.compat.ray_start import STARTUP_TIMEOUT_TEXT
from raytrec.driver.launch import DUPLICATE_SIGNAL_WINDOW_S, StopSignalHandler
from raytrec.driver.policies import NodeCapacityPolicy


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A short path for RAY_TMPDIR, as Ray needs it."""
    link = Path(f"/tmp/rt{os.getpid()}")
    link.symlink_to(tmp_path)
    monkeypatch.setenv(RAY_TMPDIR_VARIABLE, str(link))
    yield link
    link.unlink()


def test_ray_folder_is_private_and_removed_at_exit(base):
    with create_private_folder() as folder:
        assert folder.parent == base and folder.stat().st_mode & 0o777 == 0o700
        (folder / "ray").mkdir(0o777)
        (folder / "ray" / "log").write_text("x")
        assert len(f"{folder}{local_ray.LONGEST_SOCKET_PATH}") <= local_ray.MAX_SOCKET_PATH_BYTES
    assert not folder.exists()


@pytest.fixture
def spaced_python(tmp_path):
    """Return the path of this Python through a folder with a space in its name."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "python").symlink_to(sys.prefix)
    return str(tmp_path / "a b" / "python" / "bin" / "python")


@pytest.mark.parametrize(
    ("error", "text"),
    [(TimeoutError(), "does not respond, so all workers"), (ConnectionRefusedError(), "has exited, which ended")],
)
def test_lost_raylet_is_reported_as_observed(monkeypatch, error, text):
    monkeypatch.setattr(lifeline, "_places", lambda: {lifeline.RAYLET: ("10.0.0.1", 1)})
    monkeypatch.setattr(lifeline.socket, "create_connection", Mock(side_effect=error))
    monkeypatch.setattr(lifeline, "REFUSED_TIMEOUT_S", -1)
    with pytest.raises(lifeline.RayLost, match=text):
        lifeline.RayMonitor(-1, is_own_ray=True).check()


@pytest.mark.parametrize(
    ("where", "error", "text", "do"),
    [
        ("a new local cluster", "no permission", "cannot start Ray: no permission", None),
        ("a new local cluster", f"node {STARTUP_TIMEOUT_TEXT}", "cannot start Ray", "try again when"),
        ("scaling.address=auto", "no permission", "cannot connect to Ray", "start the cluster"),
    ],
)
def test_failed_start_of_ray_blames_load_only_after_a_timeout(monkeypatch, where, error, text, do):
    monkeypatch.setattr(session.ray_start, "disable_auto_connect", lambda: None)
    monkeypatch.setattr("ray.init", Mock(side_effect=Exception(error)))
    with pytest.raises(RunError, match=text) as raised:
        session._connect(where)
    assert raised.value.do is None if do is None else raised.value.do.startswith(do)


def test_commands_name_the_cluster_to_which_they_connect(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(JOB_CONFIG_VARIABLE, raising=False)
    assert describe_connection(None) == "starting Ray"
    assert describe_connection("auto") == "connecting to the Ray cluster"
    assert describe_connection("10.0.0.1:6379") == "connecting to the Ray cluster at 10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert describe_connection(None) == "connecting to the Ray cluster at 10.0.0.2:6379"


SHOW_PYTHON_OF_WORKERS = """
import ray, sys
from raytrec.cluster.session import ray_session
with ray_session(sys.argv[1], None if sys.argv[1] else 1):
    remote = ray.remote(lambda: sys.executable).options(runtime_env={"env_vars": {"A": "b"}})
    print(ray.get(remote.remote(), timeout=60))
"""


@pytest.mark.cluster
def test_local_workers_start_if_the_path_of_python_has_a_space(base, spaced_python):
    """Ray writes this path without quotes into the shell command of a worker with a runtime environment."""
    command = [spaced_python, "-c", SHOW_PYTHON_OF_WORKERS, ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{spaced_python}\n", done.stderr


@pytest.mark.cluster
def test_workers_of_a_head_start_if_the_path_of_python_has_a_space(tmp_path, spaced_python):
    with RayHead(tmp_path / "head", 1, program=(spaced_python, "-m", "raytrec")) as head:
        for address in (head.address, head.client):
            done = head.run(spaced_python, "-c", SHOW_PYTHON_OF_WORKERS, address, timeout=100)
            assert done.stdout.endswith("/python/bin/python\n") and " " not in done.stdout, done.stderr


OWNER_CODE = "from raytrec.cluster.local_ray import make_folder; print(make_folder()[0], flush=True); input()"


def test_sweep_removes_only_folders_of_dead_owners(base):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", OWNER_CODE], **pipes)
    left = Path(process.stdout.readline().strip())
    other = base / "raytrec-of-nobody"
    other.mkdir()
    sweep(base)
    assert left.exists(), "the owner is still alive"
    process.kill()
    process.communicate()
    with create_private_folder() as folder:
        assert not left.exists() and folder.exists() and other.exists(), "other folders stay"
        sweep(base)
        assert folder.exists()


def test_sweep_keeps_folders_on_a_file_system_without_locks(base, monkeypatch):
    monkeypatch.setattr(local_ray, "lock_file", lambda file: False)
    with create_private_folder() as folder:
        os.utime(folder, (0, 0))
        sweep(base)
        assert folder.exists()


def test_stderr_tails_of_ray_processes_are_kept(tmp_path):
    (tmp_path / "worker-1.err").write_text("x" * 20_000 + "Fatal Python error: Segmentation fault")
    (tmp_path / "raylet.err").write_text("")
    said = local_ray.read_stderr_tails(tmp_path)
    assert said.startswith("\nworker-1.err:\nxxx") and said.endswith("Segmentation fault\n")
    assert len(said) < 9_000 and "raylet" not in said


def test_too_long_ray_path_is_reported(base, monkeypatch):
    long = base / ("x" * 60)
    monkeypatch.setenv(RAY_TMPDIR_VARIABLE, str(long))
    with pytest.raises(RunError, match="too long") as error, create_private_folder():
        pass
    assert f"{RAY_TMPDIR_VARIABLE}={long}" in error.value.where and not long.exists()
    monkeypatch.delenv(RAY_TMPDIR_VARIABLE)
    monkeypatch.setenv("TMPDIR", str(long))  # set by a batch system, not for Ray
    with create_private_folder() as folder:
        assert folder.parent == Path("/tmp")


def test_unusable_ray_path_is_reported(base, monkeypatch):
    (base / "file").touch()
    monkeypatch.setenv(RAY_TMPDIR_VARIABLE, str(base / "file" / "ray"))
    with pytest.raises(RunError, match="cannot create Ray's folder") as error, create_private_folder():
        pass
    assert f"{RAY_TMPDIR_VARIABLE}={base}/file/ray" in error.value.where and "local disk" in error.value.do


def test_auto_address_finds_heads_of_this_user(base):
    """Ray itself would pick any GCS process on the machine, including that of a local run."""
    from raytrec.cluster.session import _require_single_address

    assert local_ray.list_local_heads() == []
    with create_private_folder() as one, create_private_folder() as other, create_private_folder() as ended:
        addresses = []
        with socket.socket() as first, socket.socket() as second:
            for listener, folder in ((first, one), (second, other)):
                listener.bind(("127.0.0.1", 0))
                listener.listen()
                addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
                (folder / "ray").mkdir()
                (folder / "ray/ray_current_cluster").write_text(addresses[-1])
            (ended / "ray").mkdir()
            (ended / "ray/ray_current_cluster").write_text("127.0.0.1:9")
            assert sorted(local_ray.list_local_heads()) == sorted(addresses)
            with pytest.raises(RunError, match="there are 2 clusters on this machine"):
                _require_single_address(addresses, "scaling.address=auto")
        assert _require_single_address(addresses[:1], "") == addresses[0] and local_ray.list_local_heads() == []


def test_nested_ray_folder_is_a_sibling(base, monkeypatch):
    with create_private_folder() as outer:
        monkeypatch.setenv(RAY_TMPDIR_VARIABLE, str(outer))
        with create_private_folder() as inner:
            assert inner.parent == outer.parent


def test_end_sessions_kills_all_members():
    """The session leader has ended; children that ignore SIGTERM are killed."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(100)"
    script = f"'{sys.executable}' -c '{code}' &"
    leader = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    leader.stdout.readline()
    leader.wait()
    (child,) = local_ray._members({leader.pid})
    began = time.monotonic()
    end_sessions([leader.pid, os.getsid(0)], linger_s=0.2)
    assert not local_ray._members({leader.pid}) and time.monotonic() - began < 5
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_check_ports_rejects_unusable_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port} cannot be used: Address already in use"):
            check_ports({"--port": port})
    check_ports({"--port": port, "--dashboard-port": port - 1})
    with pytest.raises(RunError, match="is used twice") as error:
        check_ports({"--port": port, "--client-port": port})
    assert error.value.where == "--port, --client-port"
    with pytest.raises(RunError, match="port 80 cannot be used"):
        check_ports({"--port": 80})


@pytest.mark.parametrize("way", ["scaling.address", "RAY_ADDRESS"])
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_unreachable_cluster_is_reported_soon(monkeypatch, way, scheme):
    monkeypatch.setattr("raytrec.cluster.access.STARTUP_TIMEOUT_S", 0.5)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{probe.getsockname()[1]}"
        if way == "RAY_ADDRESS":
            monkeypatch.setenv(way, address)
        began, given = time.monotonic(), address if way == "scaling.address" else None
        with pytest.raises(RunError, match="cannot connect to a Ray cluster at 127") as error, ray_session(given):
            pass
    option = " (or --address)" if way == "scaling.address" else ""
    assert error.value.where == f"{way}={address}{option}" and time.monotonic() - began < 10


def test_server_that_is_not_a_cluster_is_reported(monkeypatch):
    monkeypatch.setattr("raytrec.cluster.access.ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.socket() as web:
        web.bind(("127.0.0.1", 0))
        web.listen()
        address = f"127.0.0.1:{web.getsockname()[1]}"
        with pytest.raises(RunError, match="no Ray cluster responds at"), ray_session(address):
            pass


def test_ray_processes_are_isolated(ray_cluster):
    """Signals to the group of `raytrec train` do not reach Ray's processes, and their files are private."""
    import ray

    @ray.remote(num_cpus=0)
    def look():
        return os.environ[RAY_TMPDIR_VARIABLE], os.getpid()

    folder, worker = ray.get(look.remote())
    session = ray._private.worker._global_node.get_session_dir_path()
    assert session.startswith(f"{folder}/ray/session_") and os.stat(folder).st_mode & 0o777 == 0o700
    assert os.environ.get(RAY_TMPDIR_VARIABLE) != folder, "other programs must not inherit the folder"
    children = psutil.Process().children()
    ours = [c.pid for c in children if session in " ".join(c.cmdline())]
    assert len(ours) == 2, f"expected GCS and raylet only: {children}"
    for pid in [*ours, worker]:
        assert os.getpgid(pid) != os.getpgrp() and os.getsid(pid) != os.getsid(0)


def test_cleaner_queries_its_own_cluster(ray_cluster):
    """The cleaner does not query other clusters on the machine."""
    import ray

    @ray.remote(num_cpus=0)
    class Controller:
        def id(self):
            return ray.get_runtime_context().get_actor_id()

    controller = Controller.remote()
    actor = ray.get(controller.id.remote())
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready())

    class CleanerElsewhere(ray_train.OwnClusterCleaner):
        def __init__(self, *arguments, **options):
            os.environ["RAY_ADDRESS"] = "127.0.0.1:9"  # where the state API would ask
            super().__init__(*arguments, **options)

    cleaner = ray.remote(num_cpus=0)(CleanerElsewhere)
    cleaner = cleaner.remote(actor, check_interval_s=0.1, get_actor_timeout_s=1, stop_timeout=None)
    ray.get(cleaner.register_placement_group.remote(group), timeout=60)
    ray.get(cleaner.start_monitoring.remote(), timeout=60)
    time.sleep(1)
    table = ray.util.placement_group_table
    assert ray_train.is_own_actor_alive(actor, 1) and table(group)["state"] == "CREATED"
    ray.kill(controller)
    wait_for(lambda: table(group)["state"] == "REMOVED", "removal of the placement group", 20)
    assert not ray_train.is_own_actor_alive(actor, 1)


TWICE_STARTED_CODE = """
import ray
from unittest.mock import patch
from raytrec.cluster.session import ray_session
from raytrec.compat.ray_start import STARTUP_TIMEOUT_TEXT

start, failures = ray.init, [Exception(f"The current node {STARTUP_TIMEOUT_TEXT}.")]

def init(**options):
    if failures:
        raise failures.pop()
    return start(**options)

if __name__ == "__main__":
    with patch("ray.init", init), ray_session(num_cpus=1):
        print(ray.cluster_resources()["CPU"], failures)
"""


@pytest.mark.slow
def test_ray_is_started_again_if_it_was_not_up_in_time():
    """The first start fails with Ray's text, as on a machine with a high load."""
    done = subprocess.run([sys.executable, "-c", TWICE_STARTED_CODE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1.0 []\n", done.stderr


def test_run_in_its_own_ray_starts_no_unused_actors():
    """Each actor would be a process that Ray wakes a hundred times per second."""

    def kinds(own):
        trainer = ray_train.ControlledTrainer(lambda: None, policies={}, on_start=None, wait=None, owns_ray=own)
        callbacks = trainer._create_default_callbacks()
        assert next(c for c in callbacks if type(c) is ray_train.NoDatasets).before_init_train_context([None]) == {}
        return [type(callback) for callback in callbacks]

    theirs, ours = ray_train.PlacementGroupCleanerCallback, ray_train.OwnClusterCleanerCallback
    assert not any(issubclass(kind, theirs) for kind in kinds(own=True))
    assert kinds(own=False).count(ours) == 1 and theirs not in kinds(own=False)
    with pytest.raises(RunError, match="has no PlacementGroupCleanerCallback"):
        ray_train.replace_callback([], theirs, [])
    alone = NodeCapacityPolicy(ScalingConfig(), None, 1, 1, reader_cpus=1, autoscaler_exists=False)
    alone.after_controller_start(None)
    alone.request_resources()
    alone.before_controller_abort()
    assert alone._coordinator_client is None, "an autoscaler was asked"


def test_duplicate_signals_count_as_one():
    """`timeout` sends each signal to the process and to its group."""
    said = []
    coordinator = SimpleNamespace(ask=SimpleNamespace(remote=lambda *a: said.append("save")))
    controller = SimpleNamespace(abort=SimpleNamespace(remote=lambda: said.append("abort")))
    stopping = StopSignalHandler(coordinator, patience_s=30)
    with stopping:
        stopping.install(controller)
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert said == ["save"] and stopping.signal == signal.SIGTERM
        stopping._asked_at -= 2 * DUPLICATE_SIGNAL_WINDOW_S
        signal.raise_signal(signal.SIGINT)
        assert said == ["save", "abort"]


def test_ray_auto_init_is_disabled(ray_cluster):
    """By default, a thread that calls Ray after its end would start or join another Ray."""
    from ray._private import auto_init_hook

    assert auto_init_hook.enable_auto_connect is False
