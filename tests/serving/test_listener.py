"""Time limits, size limits and shutdown of the HTTP listener, with plain ASGI applications."""

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest
from listeners import GET, WAIT_S, Echo, connect, parse_statuses, read_all
from waiting import wait_for

from raytrec.cluster.local_ray import check_ports
from raytrec.serving.listener import Listener

LIMITS_MODULE_PREFIX = "raytrec.compat.uvicorn_."
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def shared_listener():
    listener = Listener(echo := Echo(), "127.0.0.1", 0)
    yield listener, echo
    listener.close()


@pytest.fixture
def listener(shared_listener):
    return shared_listener[0]


@pytest.fixture
def echo(shared_listener):
    shared_listener[1].begun = 0
    return shared_listener[1]


@pytest.fixture
def short_client_timeout(monkeypatch):
    """Set the client timeout to 1.2 s. The listener checks its clients once a second."""
    monkeypatch.setattr(LIMITS_MODULE_PREFIX + "CLIENT_TIMEOUT_S", 1.2)


SLOW_REQUESTS = {
    "a head": GET[:-2] + b"X: y\r\n" * 1000,
    "a body": POST + b"x" * 99,
    "a body in chunks": CHUNKED + b"1\r\nx\r\n" * 1000,
    "empty lines": b"\r\n" * 1000,
    "nothing": b"",
    "the next request": GET + GET[:-2],
    "empty lines after a request": GET + b"\r\n" * 1000,
}


@pytest.mark.slow
def test_slow_clients_are_disconnected(short_client_timeout, listener):
    """All clients run at the same time and send one byte every 0.05 s."""
    with ExitStack() as stack:
        connections = {name: stack.enter_context(connect(listener)) for name in SLOW_REQUESTS}
        pool, began = stack.enter_context(ThreadPoolExecutor(len(connections))), time.monotonic()
        pool.map(send_slowly, connections.values(), SLOW_REQUESTS.values())
        found = {name: read_all(connection) for name, connection in connections.items()}
        assert time.monotonic() - began < 8
    assert {name for name, answers in found.items() if answers} == {name for name in SLOW_REQUESTS if "request" in name}


def send_slowly(connection, data):
    first = len(GET) if data.startswith(GET) else len(POST) if data.startswith(POST) else 0
    with suppress(OSError):  # the listener has closed it
        connection.sendall(data[:first])
        for at in range(first, len(data)):
            connection.sendall(data[at : at + 1])
            time.sleep(0.05)


@pytest.mark.slow
def test_client_timeout_applies_to_unread_bodies(short_client_timeout):
    with (
        closing(Listener(Echo(reads=False), "127.0.0.1", 0)) as listener,
        connect(listener) as connection,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(send_slowly, connection, POST + b"x" * 99)
        began = time.monotonic()
        assert parse_statuses(read_all(connection)) == [200] and time.monotonic() - began < 5


@pytest.mark.slow
def test_response_may_take_longer_than_client_timeout(short_client_timeout):
    class Slow(Echo):
        async def __call__(self, scope, receive, send):
            await asyncio.sleep(2.6)
            await super().__call__(scope, receive, send)

    with closing(Listener(Slow(), "127.0.0.1", 0)) as listener, connect(listener) as connection:
        connection.sendall(GET)
        assert parse_statuses(connection.recv(1 << 16)) == [200]


LARGE_REQUESTS = {
    "a header": b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 40_000 + b"\r\n",
    "a path": b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a header without end": b"GET / HTTP/1.1\r\nX: " + b"x" * (2 << 20),
    "trailers": CHUNKED + b"1\r\nx\r\n0\r\n" + b"X: y\r\n" * 400_000,
    "an extension of a chunk": CHUNKED + b"1;" + b"x" * (2 << 20),
    "empty lines": b"\r\n" * (1 << 20),
}


@pytest.mark.parametrize("data", LARGE_REQUESTS.values(), ids=LARGE_REQUESTS)
@pytest.mark.parametrize("size", [4 << 20, 1000])
def test_large_request_heads_are_refused(listener, echo, data, size):
    found = exchange(listener, [data[at : at + size] for at in range(0, len(data), size)])
    assert parse_statuses(found) in ([400], []), found[:200]  # []: reset while the client sent the rest
    assert not echo.begun or data.startswith(CHUNKED)


def test_large_chunked_bodies_and_heads_of_30_kb_are_served(listener):
    with connect(listener) as connection:
        connection.sendall(GET[:-2] + b"X: " + b"x" * 30_000 + b"\r\n\r\n")
        assert parse_statuses(connection.recv(1 << 16)) == [200]
        for pieces in (1, 1000):
            body = b"%x\r\n%s\r\n" % (4_000_000 // pieces, b"x" * (4_000_000 // pieces)) * pieces
            connection.sendall(CHUNKED + body + b"0\r\n\r\n")
            assert connection.recv(1 << 16).endswith(b"4000000")


def test_pipelined_requests_are_answered_in_order(listener):
    with connect(listener) as connection:
        connection.sendall(b"".join(POST.replace(b"100", b"%d" % n) + b"x" * n for n in range(8)))
        found = b""
        while len(parse_statuses(found)) < 8 or not found.endswith(b"\r\n\r\n7"):
            found += connection.recv(1 << 16)
    assert [part.rpartition(b"\r\n")[2] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"%d" % n for n in range(8)]


def test_pipelining_is_bounded(listener, echo):
    found = exchange(listener, [GET * 20_000])
    assert 1 <= echo.begun <= 101, "more than 101 requests of one connection were started"
    assert set(parse_statuses(found)) <= {200, 400}


def exchange(listener, pieces):
    """Send pieces on one connection, and meanwhile return all answers until the listener closes it."""

    def send():
        with suppress(OSError):  # the listener has closed it
            for piece in pieces:
                connection.sendall(piece)

    with connect(listener) as connection, ThreadPoolExecutor(1) as pool:
        pool.submit(send)
        return read_all(connection)


@pytest.mark.slow
@pytest.mark.parametrize("answer_bytes", [64 << 20, 40_000])
def test_clients_that_do_not_read_are_disconnected(short_client_timeout, answer_bytes):
    listener = Listener(Echo(answer_bytes), "127.0.0.1", 0)
    with closing(listener), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", listener.port))
        connection.sendall(GET)
        assert connection.recv(9) == b"HTTP/1.1 "
        wait_for(lambda: not listener._server.server_state.connections, "the end of the connection", WAIT_S)


def test_new_connection_replaces_the_longest_idle_one(monkeypatch, echo):
    monkeypatch.setattr(LIMITS_MODULE_PREFIX + "MAX_CONNECTIONS", 3)
    with ExitStack() as stack:
        listener = stack.enter_context(closing(Listener(echo, "127.0.0.1", 0)))
        kept, taken = [], listener._server.server_state.connections
        for _ in range(3):
            kept.append(stack.enter_context(connect(listener)))
            wait_for(lambda: len(taken) == len(kept), "a connection to be accepted", WAIT_S)
            time.sleep(0.01)  # idle times are measured in milliseconds

        def ask(connection):
            connection.sendall(GET)
            assert parse_statuses(connection.recv(1 << 16)) == [200]

        ask(kept[0])  # kept[1] is then the longest idle connection when a fourth one is opened
        for connection in (stack.enter_context(connect(listener)), kept[0], kept[2]):
            ask(connection)
        assert read_all(kept[1]) == b""


@pytest.mark.slow
def test_port_is_reusable_after_close_with_open_connections(echo):
    listener = Listener(echo, "127.0.0.1", 0)
    with connect(listener) as connection:
        connection.sendall(GET)
        assert connection.recv(1 << 16)
        with pytest.raises(Exception, match="cannot be used"):
            check_ports({"--port": listener.port})
        listener.close()
        assert read_all(connection) == b""
    check_ports({"--port": listener.port})
    again = Listener(echo, "127.0.0.1", listener.port)
    again.close()
