"""End of a listener: all requests of clients that have connected are answered."""

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from listeners import GET, WAIT_S, Echo, connect, parse_statuses, read_all

from raytrec.serving.listener import Listener, refuse_connections


@pytest.fixture
def short_grace(monkeypatch):
    """Give clients 0.2 s to send requests to a closing listener."""
    monkeypatch.setattr("raytrec.compat.uvicorn_.CLOSE_GRACE_S", 0.2)


@pytest.fixture(params=["filter", "no filter"])
def with_or_without_filter(request, monkeypatch):
    """Repeat the test as in a container that does not support socket filters."""
    if request.param == "no filter":
        monkeypatch.setattr("raytrec.serving.listener.SO_ATTACH_FILTER", -1)


def test_closing_listener_answers_keep_alive_connections():
    listener = Listener(Echo(), "127.0.0.1", 0)
    with connect(listener) as connection:
        connection.sendall(GET)
        assert b"connection: close" not in connection.recv(1 << 16)
        ending = threading.Thread(target=listener.close)
        ending.start()
        time.sleep(0.2)
        connection.sendall(GET)
        found = read_all(connection)
        assert parse_statuses(found) == [200] and b"connection: close" in found
        ending.join(WAIT_S)


class Blocking(Echo):
    """Application that blocks the event loop during its second request until `released` is set."""

    def __init__(self):
        super().__init__()
        self.blocked, self.released = threading.Event(), threading.Event()

    async def __call__(self, scope, receive, send):
        if self.begun == 1:
            self.blocked.set()
            self.released.wait(WAIT_S)
        await super().__call__(scope, receive, send)


def test_requests_that_wait_for_a_busy_listener_are_answered(short_grace, with_or_without_filter):
    """New and kept connections send requests while the event loop is busy; the loop then finds the end."""
    listener = Listener(app := Blocking(), "127.0.0.1", 0)
    with ExitStack() as stack:
        kept = stack.enter_context(connect(listener))
        kept.sendall(GET)
        assert parse_statuses(kept.recv(1 << 16)) == [200]
        busy = stack.enter_context(connect(listener))
        busy.sendall(GET)
        assert app.blocked.wait(WAIT_S)
        waiting = [kept, busy, *(stack.enter_context(connect(listener)) for _ in range(20))]
        for connection in (kept, *waiting[2:]):
            connection.sendall(GET)
        ending = threading.Thread(target=listener.close)
        ending.start()
        time.sleep(0.6)  # the grace ends
        app.released.set()
        assert [parse_statuses(read_all(connection)) for connection in waiting] == [[200]] * 22
        ending.join(WAIT_S)
        assert not listener.alive


def test_refused_connections_are_only_those_that_have_not_begun():
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as late:
        # The kernel then regards a connection as half open until data arrives.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, WAIT_S)
        listening.settimeout(WAIT_S)
        with closing(socket.create_connection(listening.getsockname(), timeout=WAIT_S)) as early:
            refuse_connections(listening)
            early.sendall(b"x")
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.recv(1) == b"x"
        late.settimeout(0.3)
        with pytest.raises(TimeoutError):
            late.connect(listening.getsockname())


def send_until_refused(port):
    """Open a connection for each request until connections are refused; return (statuses or error) of each request."""
    results = []
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        except ConnectionRefusedError:
            return results
        with closing(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            try:
                connection.sendall(GET)
                results.append(parse_statuses(connection.recv(1 << 16)))
            except OSError as error:
                results.append(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends", [30, pytest.param(1000, marks=[pytest.mark.survive, pytest.mark.timeout(1800)])], ids=str
)
def test_ends_reset_no_reconnecting_client(short_grace, ends):
    """Ten listeners end at the same time, each with two clients."""
    with ThreadPoolExecutor(30) as pool:
        for _ in range(ends // 10):
            listeners = [Listener(Echo(), "127.0.0.1", 0) for _ in range(10)]
            clients = [pool.submit(send_until_refused, each.port) for each in listeners for _ in range(2)]
            time.sleep(0.1)
            ending = [pool.submit(each.close) for each in listeners]
            results = [result for client in clients for result in client.result(60)]
            assert len(results) > 20 and not [result for result in results if result != [200]]
            for each in ending:
                each.result(60)
