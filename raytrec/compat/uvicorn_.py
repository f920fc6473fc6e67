"""Private names of uvicorn (0.54): its protocol of HTTP/1.1, with limits that uvicorn does not have."""

from __future__ import annotations

from asyncio import BaseTransport, get_running_loop
from math import inf

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import Server

MAX_HEAD_BYTES = 32 << 10  # request line and headers; also bytes in a row that belong to no head or body
MAX_PIPELINED = 100  # requests of one connection that wait for the answer to the one before
MAX_CONNECTIONS = 4096  # of a process
CLIENT_S = 90  # seconds in which a client has to send a request, or the next one, and take the answer


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose requests are limited in size, number and time. uvicorn creates it.

    Attributes:
        waiting_since: The loop's time since which the client has something to send or to take; inf while a
            request is being answered.
    """

    _without_progress = 0  # bytes received since the last complete head or part of a body

    def connection_made(self, transport: BaseTransport) -> None:
        """Begin to wait; above MAX_CONNECTIONS, abort the connection that waits the longest."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.waiting_since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            longest = min(self.connections, key=lambda each: each.waiting_since)  # type: ignore[union-attr]
            self.connections.discard(longest)
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, unless too many of them bring the request no further."""
        self._without_progress += len(data)
        super().data_received(data)
        if self._without_progress > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Too many bytes outside of a body.")

    def on_message_begin(self) -> None:
        """Limit the time from the first byte of the request on."""
        super().on_message_begin()
        self.waiting_since = self.loop.time()

    def on_headers_complete(self) -> None:
        """Begin to answer, or end the parser with an error for a large head or too many waiting requests."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("a head that is too large, or too many requests without an answer")
        super().on_headers_complete()
        self._without_progress = 0

    def on_body(self, body: bytes) -> None:
        """Hand on a part of the body."""
        super().on_body(body)
        self._without_progress = 0

    def on_message_complete(self) -> None:
        """Stop waiting, unless the client takes no answers or had the answer before."""
        super().on_message_complete()
        if not (self.flow.write_paused or self.cycle.response_complete):
            self.waiting_since = inf

    def on_response_complete(self) -> None:
        """Wait for the client to take the answer and to send the next request."""
        super().on_response_complete()
        self.waiting_since = inf if self.pipeline else self.loop.time()


async def abort_slow(server: Server) -> None:
    """Abort a server's connections whose clients have had CLIENT_S."""
    now = get_running_loop().time()
    for connection in [*server.server_state.connections]:
        if now - connection.waiting_since > CLIENT_S:  # type: ignore[union-attr]
            connection.transport.abort()
