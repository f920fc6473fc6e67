"""Kept connections, which replicas on one node hand over to each other, and ports of services that end."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest
from listeners import GET, WAIT_S, Echo, connect, parse_statuses
from waiting import wait_for

from raytrec.common.errors import RunError
from raytrec.serving import command
from raytrec.serving.coordinator import Coordinator
from raytrec.serving.listener import Listener
from raytrec.serving.replica_state import Export, ReplicaState

CLIENTS = 12
CLOSE = b"connection: close"


@pytest.fixture
def listener():
    with closing(Listener(Echo(), "127.0.0.1", 0)) as listener:
        yield listener


def ask(connection):
    """Send a request and return the whole answer, whose body is 0."""
    connection.sendall(GET)
    answer, part = b"", b"x"
    while part and not answer.endswith(b"\r\n\r\n0"):
        part = connection.recv(1 << 16)
        answer += part
    assert parse_statuses(answer) == [200]
    return answer


@pytest.mark.slow
def test_surplus_connections_are_closed_after_an_answer(listener):
    with ExitStack() as stack:
        kept = [stack.enter_context(connect(listener)) for _ in range(8)]
        until, closed = time.monotonic() + WAIT_S, 0
        assert not any(CLOSE in ask(connection) for connection in kept)
        listener.fair_connections = 5
        while closed < 3 and time.monotonic() < until:
            for connection in [*kept]:
                if CLOSE in ask(connection):
                    assert connection.recv(1) == b""
                    kept.remove(connection)
                    closed += 1
            time.sleep(0.05)
        time.sleep(2.2)
        assert closed == 3 and not any(CLOSE in ask(connection) for connection in kept)


def test_idle_connections_do_not_count(listener, monkeypatch):
    monkeypatch.setattr("raytrec.compat.uvicorn_.ACTIVE_S", 0.5)
    with ExitStack() as stack:
        kept = [stack.enter_context(connect(listener)) for _ in range(8)]
        for connection in kept:
            ask(connection)
        assert listener.count_active_connections() == 8
        time.sleep(0.6)
        ask(kept[0])
        assert listener.count_active_connections() == 1


@pytest.mark.slow
def test_surplus_connection_answers_all_pipelined_requests(listener):
    with connect(listener) as connection:
        ask(connection)
        listener.fair_connections = 0
        (kept,) = listener._server.server_state.connections
        wait_for(lambda: kept.is_surplus, "a surplus connection", WAIT_S)
        answers = b""
        connection.sendall(GET * 5)
        while len(parse_statuses(answers)) < 5:
            part = connection.recv(1 << 16)
            assert part, answers
            answers += part


def follow(coordinator, replica, node, connections):
    report = ReplicaState(0, "v1", node=node, connections=connections)
    command = asyncio.run(coordinator.follow(replica, report, -1))
    return command.fair_connections


def test_coordinator_computes_fair_connections_for_each_node():
    coordinator = Coordinator(Export("/export", "v1"), lambda: None, lambda state: None)
    assert follow(coordinator, "a", "node 1", None) == float("inf")
    assert follow(coordinator, "a", "node 1", 12) == float("inf"), "a lone replica would close connections"
    assert follow(coordinator, "b", "node 1", None) == float("inf"), "a replica that does not listen yet was counted"
    assert follow(coordinator, "b", "node 1", 0) == 6
    assert follow(coordinator, "c", "node 2", 100) == float("inf")
    assert follow(coordinator, "a", "node 1", 6) == 3


@pytest.mark.slow
def test_second_listener_takes_over_kept_connections():
    """Clients open another connection when the answer asks them to, as HTTP libraries do."""
    apps, stop = (Echo(), Echo()), threading.Event()
    first = Listener(apps[0], "127.0.0.1", 0)

    def run():
        while not stop.is_set():
            with connect(first) as connection:
                while not stop.is_set() and CLOSE not in ask(connection):
                    time.sleep(0.02)

    with ThreadPoolExecutor(CLIENTS) as pool, closing(first):
        clients = [pool.submit(run) for _ in range(CLIENTS)]
        with closing(Listener(apps[1], "127.0.0.1", first.port)) as second:
            first.fair_connections = second.fair_connections = CLIENTS / 2
            until, shares = time.monotonic() + 30, [0.0]
            while shares[-1] < 0.35 and time.monotonic() < until:
                before = [app.begun for app in apps]
                time.sleep(1)
                gained = np.subtract([app.begun for app in apps], before)
                shares.append(gained[1] / gained.sum())
            stop.set()
            for client in clients:
                client.result(WAIT_S)
    assert shares[-1] >= 0.35, shares


LISTEN = """
import socket, sys, time
HOST = sys.argv.pop()
listening = socket.socket()
for option in sys.argv[2:]:
    listening.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
listening.bind((HOST, 0))
listening.listen()
print(listening.getsockname()[1], flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def listen():
    """Return a function that starts a process which listens for some seconds, and returns the port."""
    processes = []

    def start(seconds, *options, host="127.0.0.1"):
        words = [sys.executable, "-c", LISTEN, str(seconds), *options, host]
        processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        return int(processes[-1].stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_start_waits_until_an_ending_service_frees_the_port(listen, capsys):
    port = listen(1.5, "SO_REUSEPORT", "SO_REUSEADDR")
    command.wait_for_port(port)
    assert capsys.readouterr().out == f"waiting      up to 40 s for a service on port {port} to end\n"
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_port_of_a_running_service_is_refused_after_the_wait(listen, monkeypatch):
    monkeypatch.setattr(command, "PORT_TIMEOUT_S", 0.5)
    with pytest.raises(RunError, match="cannot be used: Address already in use"):
        command.wait_for_port(listen(60, "SO_REUSEPORT", "SO_REUSEADDR"))


def test_port_is_checked_on_the_address_of_the_service(listen, monkeypatch):
    monkeypatch.setattr(command, "PORT_TIMEOUT_S", 0.5)
    port = listen(60, "SO_REUSEPORT", "SO_REUSEADDR", host="127.0.0.2")
    with pytest.raises(RunError, match="cannot be used: Address already in use"):
        command.wait_for_port(port, "127.0.0.2")
    command.wait_for_port(port, "203.0.113.7")  # an address of another node


@pytest.mark.parametrize("port", ["another program", 80, 70000])
def test_unusable_port_is_refused_at_once(listen, port, capsys):
    began = time.monotonic()
    with pytest.raises(RunError, match="cannot be used"):
        command.wait_for_port(listen(60, "SO_REUSEADDR") if isinstance(port, str) else port)
    assert time.monotonic() - began < 15 and not capsys.readouterr().out


def test_command_and_coordinator_import_no_torch():
    """Their processes would otherwise need seconds and 200 MiB more."""
    code = "import sys, raytrec.cli, raytrec.serving.command, raytrec.serving.coordinator, raytrec.compat.ray_core;"
    code += "print(sorted({'torch', 'numpy', 'pyarrow', 'ray', 'starlette'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
