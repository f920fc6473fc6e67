"""Private names of uvicorn (0.54): its HTTP/1.1 protocol, with additional limits."""

from __future__ import annotations

import socket
from asyncio import BaseTransport, get_running_loop, sleep
from contextlib import suppress
from math import inf
from time import monotonic

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import Server

MAX_HEAD_BYTES = 32 << 10  # request line and headers; also consecutive bytes outside heads and bodies
MAX_PIPELINED = 100  # requests on one connection that wait for the response to an earlier request
MAX_CONNECTIONS = 4096  # per process
CLOSE_GRACE_S = 1  # seconds in which clients with open connections may send a request to a closing server
ACTIVE_S = 5.0  # seconds after its start or last request for which a connection counts as active
CONNECTION_TOLERANCE = 0.1  # share of the fair number of connections by which a server may exceed that number
CLOSE_HEADER = (b"connection", b"close")
CLIENT_TIMEOUT_S = 90  # seconds within which a client must send a (further) request, and read the response


class BoundedProtocol(HttpToolsProtocol):
    """Connection whose requests are limited in size, number and time; created by uvicorn.

    Attributes:
        waiting_since: Event loop time since which the server waits for the client to send or read; inf while
            a request is being served.
        is_surplus: True if the next response closes the connection, so that the client opens another one.
    """

    is_surplus = False
    _without_progress = 0  # bytes received since the last complete head or body part

    def connection_made(self, transport: BaseTransport) -> None:
        """Start the client's time limit.

        With more than MAX_CONNECTIONS connections, abort the one whose client has been silent for the longest time.
        """
        super().connection_made(transport)  # type: ignore[arg-type]
        self.waiting_since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            longest = min(self.connections, key=lambda each: each.waiting_since)  # type: ignore[union-attr]
            self.connections.discard(longest)
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; reject the request after MAX_HEAD_BYTES without a complete head or part of a body."""
        self._without_progress += len(data)
        super().data_received(data)
        if self.is_surplus and self.cycle:  # cycle of the last pipelined request
            self.is_surplus, self.cycle.default_headers = False, [*self.cycle.default_headers, CLOSE_HEADER]
        if self._without_progress > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Too many bytes outside of a request body.")

    def on_message_begin(self) -> None:
        """Start the time limit at the first byte of the request."""
        super().on_message_begin()
        self.waiting_since = self.loop.time()

    def on_headers_complete(self) -> None:
        """Start to serve the request; raise ValueError, which ends parsing, if the request exceeds a limit."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("the request head is too large, or too many requests are waiting for a response")
        super().on_headers_complete()
        self._without_progress = 0

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on to the application."""
        super().on_body(body)
        self._without_progress = 0

    def on_message_complete(self) -> None:
        """Stop the time limit, unless the client does not read responses or the response is already complete."""
        super().on_message_complete()
        if not (self.flow.write_paused or self.cycle.response_complete):
            self.waiting_since = inf

    def on_response_complete(self) -> None:
        """Start the time limit for reading the response and sending a request, unless a request is waiting."""
        super().on_response_complete()
        self.waiting_since = inf if self.pipeline else self.loop.time()


class DrainingServer(Server):
    """Server that accepts all waiting connections before it closes its sockets."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the waiting connections, close the sockets, and return when requests are complete or time out."""
        waiting, copies = [], [each.dup() for each in sockets or ()]
        for server in self.servers:
            server.close()  # the event loop accepts no more connections; without the copies, waiting ones would be lost
        for listening in copies:
            listening.setblocking(False)
            with listening, suppress(BlockingIOError):
                while True:
                    waiting.append(listening.accept()[0])
        for connection in waiting:
            await get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        if waiting:
            await sleep(CLOSE_GRACE_S)
        await super().shutdown(sockets)

    def _make_protocol(self) -> BoundedProtocol:
        return BoundedProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def list_active(server: Server) -> list[BoundedProtocol]:
    """Return the connections that serve a request, or have waited for the client for less than ACTIVE_S."""
    oldest = monotonic() - ACTIVE_S
    connections: list[BoundedProtocol] = [*server.server_state.connections]  # type: ignore[list-item]
    return [each for each in connections if each.waiting_since > oldest]


def close_surplus(server: Server, fair_count: float) -> None:
    """Mark a server's active connections beyond `fair_count` as surplus, so that their next response closes them.

    Nothing is marked if the surplus is below one connection, or below CONNECTION_TOLERANCE × `fair_count`.
    """
    active = list_active(server)
    surplus = len(active) - fair_count
    if surplus >= max(1.0, CONNECTION_TOLERANCE * fair_count):
        for connection in sorted(active, key=lambda each: not each.is_surplus)[: int(surplus)]:
            connection.is_surplus = True


async def abort_slow(server: Server) -> None:
    """Abort a server's connections whose clients have not sent a request or read the response in CLIENT_TIMEOUT_S."""
    now = get_running_loop().time()
    for connection in [*server.server_state.connections]:
        if now - connection.waiting_since > CLIENT_TIMEOUT_S:  # type: ignore[union-attr]
            connection.transport.abort()
