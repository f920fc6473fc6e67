"""Private names of uvicorn (0.54): its HTTP/1.1 protocol, with additional limits."""

from __future__ import annotations

from asyncio import BaseTransport, get_running_loop
from math import inf

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import Server

MAX_HEAD_BYTES = 32 << 10  # request line and headers; also consecutive bytes outside heads and bodies
MAX_PIPELINED = 100  # requests on one connection that wait for the answer to an earlier request
MAX_CONNECTIONS = 4096  # per process
CLIENT_TIMEOUT_S = 90  # seconds within which a client must send a (further) request, and read the answer


class BoundedProtocol(HttpToolsProtocol):
    """Connection whose requests are limited in size, number and time; created by uvicorn.

    Attributes:
        waiting_since: Event loop time since which the server waits for the client to send or read; inf while
            a request is being answered.
    """

    _without_progress = 0  # bytes received since the last complete head or body part

    def connection_made(self, transport: BaseTransport) -> None:
        """Start the client's time limit; above MAX_CONNECTIONS, abort the connection that has waited longest."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.waiting_since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            longest = min(self.connections, key=lambda each: each.waiting_since)  # type: ignore[union-attr]
            self.connections.discard(longest)
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; reject the request after too many bytes without a complete head or body part."""
        self._without_progress += len(data)
        super().data_received(data)
        if self._without_progress > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Too many bytes outside of a request body.")

    def on_message_begin(self) -> None:
        """Start the time limit at the first byte of the request."""
        super().on_message_begin()
        self.waiting_since = self.loop.time()

    def on_headers_complete(self) -> None:
        """Start answering the request; raise ValueError, which ends parsing, if the request exceeds a limit."""
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
        """Stop the time limit, unless the client does not read answers or the answer is already complete."""
        super().on_message_complete()
        if not (self.flow.write_paused or self.cycle.response_complete):
            self.waiting_since = inf

    def on_response_complete(self) -> None:
        """Start the time limit for reading the answer and sending a request, unless a request is waiting."""
        super().on_response_complete()
        self.waiting_since = inf if self.pipeline else self.loop.time()


async def abort_slow(server: Server) -> None:
    """Abort a server's connections whose clients have exceeded CLIENT_TIMEOUT_S."""
    now = get_running_loop().time()
    for connection in [*server.server_state.connections]:
        if now - connection.waiting_since > CLIENT_TIMEOUT_S:  # type: ignore[union-attr]
            connection.transport.abort()
