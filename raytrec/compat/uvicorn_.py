"""Private names of uvicorn (0.54): its protocol of HTTP/1.1, with limits that uvicorn does not have."""

from __future__ import annotations

import json
from asyncio import BaseTransport, TimerHandle
from http import HTTPStatus
from math import inf

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 32 << 10  # request line and headers; also bytes in a row that belong to no head or body
MAX_PIPELINED = 32  # complete requests of one connection that wait for the answer to the one before
MAX_CONNECTIONS = 4096  # of a process
RECEIVE_S, SEND_S = 60, 60  # seconds in which a request has to arrive, and in which an answer has to be taken


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose requests are limited in size, number and time. uvicorn creates it.

    A client that exceeds a limit gets a 4xx, after the answers to its complete requests, and is disconnected.

    Attributes:
        waiting_since: the loop's time at which the connection began to wait for a request; inf while one is
            being answered.
    """

    _receiving: TimerHandle | None = None  # until the request has arrived
    _sending: TimerHandle | None = None  # until the client takes what is sent
    _overhead = 0  # bytes received since the last complete head, part of a body or end of a request
    _progress = _arriving = _refused = False

    def connection_made(self, transport: BaseTransport) -> None:
        """Limit the time of the first request; above MAX_CONNECTIONS, abort the longest idle connection."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.waiting_since = self.loop.time()
        self._limit_receiving()
        if len(self.connections) > MAX_CONNECTIONS:
            longest = min(self.connections, key=lambda each: each.waiting_since)  # type: ignore[union-attr]
            self.connections.discard(longest)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        super().connection_lost(exc)
        for timer in filter(None, (self._receiving, self._sending, self.timeout_keep_alive_task)):
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and count those that bring the request no further."""
        if self._refused:
            return
        if not self._receiving:
            self._limit_receiving()
        self._progress, self._arriving = False, True
        super().data_received(data)
        self._overhead = 0 if self._progress else self._overhead + len(data)
        if self._overhead > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """Limit the time from the request's first byte on."""
        super().on_message_begin()
        self._arriving = True
        self._limit_receiving()

    def on_headers_complete(self) -> None:
        """Begin to answer, unless there are too many bytes, or too many requests before this one."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse_head()
        elif len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(400, "too many requests at once", f"at most {MAX_PIPELINED} without an answer")
        if self._refused:
            raise ValueError("the request is refused")  # ends the parser
        super().on_headers_complete()
        self._progress = True

    def on_body(self, body: bytes) -> None:
        """Hand on a part of the body."""
        super().on_body(body)
        self._progress = True

    def on_message_complete(self) -> None:
        """Let the request take as long as the answer needs."""
        super().on_message_complete()
        self._progress, self._arriving, self.cycle.more_body = True, False, False
        if self.cycle.response_complete:  # the answer did not need the body
            self._limit_receiving()
        elif self._receiving:
            self._receiving.cancel()
            self._receiving, self.waiting_since = None, inf

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the client to take the last answer."""
        if not self.pipeline:
            self.waiting_since = self.loop.time()
        super().on_response_complete()
        if self.transport.is_closing():
            self.pause_writing()

    def pause_writing(self) -> None:
        """Limit the time in which the client takes what is sent."""
        super().pause_writing()
        self._sending = self._sending or self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Send on."""
        super().resume_writing()
        if self._sending and not self.transport.is_closing():
            self._sending.cancel()
            self._sending = None

    def timeout_keep_alive_handler(self) -> None:
        """Disconnect an idle client, even if it has not taken the last answer."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(400, msg, "HTTP/1.1")

    def _limit_receiving(self) -> None:
        if self._receiving:
            self._receiving.cancel()
        expected = f"within {RECEIVE_S} s"
        self._receiving = self.loop.call_later(
            RECEIVE_S, self._refuse, 408, "the request arrives too slowly", expected
        )

    def _refuse_head(self) -> None:
        self._refuse(431, "the headers are too large", f"at most {MAX_HEAD_BYTES:,} bytes")

    def _refuse(self, status: int, what: str, expected: str) -> None:
        """Close the connection when the requests that have arrived are answered."""
        if self._refused or self.transport.is_closing():
            return
        self._refused, cycle = True, self.cycle
        if cycle and not cycle.more_body and not cycle.response_complete:
            cycle.keep_alive = False
            return
        if self._arriving and not (cycle and cycle.more_body and cycle.response_started):
            body = json.dumps({"error": what, "expected": expected}).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
        self.pause_writing()
