"""Connection of a replica to a table shard: streams that stay open, with a deadline for each request."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic, sleep

import pyarrow as pa
import pyarrow.flight as flight

from raytrec.common.errors import get_first_line
from raytrec.serving.table_shards.messages import MAX_VALUE_BYTES

_log = logging.getLogger(__name__)
RETRY_INTERVAL_S = 0.2  # interval of attempts to reach a shard that is away
RECONNECT_TIMEOUT_S = 1800.0  # timeout of such an attempt, in which the shard may load tables
DEADLINE_TICK_S = 0.005  # interval at which deadlines are checked while there are requests
FAILURES = (pa.ArrowException, OSError, StopIteration)


def read_tls_files() -> tuple[bytes, bytes, bytes] | None:
    """Return certificate, key and root certificates if the Ray cluster uses TLS, else None."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    certificate, key, roots = (Path(os.environ[name]).read_bytes() for name in names)
    return certificate, key, roots


class Exchange:
    """Stream to a shard, which one request uses at a time.

    Attributes:
        deadline: Time of `monotonic` at which the request is canceled; None: there is no request.
    """

    def __init__(self, client: flight.FlightClient, token: str):
        options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])
        self.client = client
        self.deadline: float | None = None
        self._writer, self._reader = client.do_exchange(flight.FlightDescriptor.for_command(b"lookup"), options)

    def send(self, request: bytes, deadline: float) -> None:
        """Send a request; raise one of FAILURES if the shard cannot be reached."""
        self.deadline = deadline
        _watched.put((self, deadline))
        self._writer.write_metadata(request)

    def receive(self) -> tuple[pa.Buffer, bool]:
        """Return the answer to the request, and True if the stream can be used for another request.

        Raises one of FAILURES if there is no answer before the deadline.
        """
        answer, deadline = self._reader.read_chunk().app_metadata, self.deadline
        self.deadline = None
        return answer, monotonic() < deadline  # later, the stream may already be canceled

    def close(self) -> None:
        """End the stream, whereupon `send` and `receive` raise an error."""
        self._reader.cancel()


_watched: SimpleQueue[tuple[Exchange, float]] = SimpleQueue()  # requests and their deadlines


def _cancel_late_requests() -> None:
    requests = list[tuple[Exchange, float]]()
    while True:
        while not (requests and _watched.empty()):
            requests.append(_watched.get())
        sleep(DEADLINE_TICK_S)
        requests = [each for each in requests if each[0].deadline == each[1]]  # without an answer
        for exchange, _ in (late := [each for each in requests if each[1] < monotonic()]):
            exchange.close()
        requests = [each for each in requests if each not in late]


@cache
def _start_deadlines() -> None:
    Thread(target=_cancel_late_requests, name="lookup-deadlines", daemon=True).start()


class ShardConnection:
    """Connection to one shard for one version of the tables.

    If a request fails, the shard is away until a thread has reached it again; requests do not wait for the shard
    meanwhile.

    Args:
        number: Number of the shard.
        reach: Function that makes the shard load the tables, and returns its location and token. The argument is
            the timeout in seconds.
    """

    def __init__(self, number: int, reach: Callable[[float], tuple[str, str]]):
        self.number, self._reach = number, reach
        self._lock, self._client, self._token, self._idle = Lock(), None, "", list[Exchange]()
        self._is_closed = False

    def connect(self, timeout_s: float) -> None:
        """Connect to the shard once it has loaded the tables.

        Raises:
            Exception: The shard cannot be reached, or cannot load the tables.
        """
        _start_deadlines()
        location, token = self._reach(timeout_s)
        tls, limits = read_tls_files(), [("grpc.max_receive_message_length", MAX_VALUE_BYTES + 1024)]
        client = flight.FlightClient(location, tls_root_certs=tls and tls[2], generic_options=limits)
        with self._lock:
            if not self._is_closed:
                self._client, self._token = client, token

    def send(self, request: bytes, deadline: float) -> Exchange | None:
        """Send a request, and return the stream of its answer, or None if the shard is away."""
        with self._lock:
            client, exchange = self._client, self._idle.pop() if self._idle else None
        if client is None:
            return None
        try:
            exchange = exchange or Exchange(client, self._token)
            exchange.send(request, deadline)
            return exchange
        except FAILURES as error:
            self._lose(client, error)
            return None

    def receive(self, exchange: Exchange, size: int) -> pa.Buffer | None:
        """Return an answer of `size` bytes, or None if there is none before the deadline."""
        try:
            answer, is_reusable = exchange.receive()
            if answer is None or answer.size != size:
                raise OSError(f"the answer does not have {size:,} bytes")
        except FAILURES as error:
            exchange.close()
            self._lose(exchange.client, error)
            return None
        with self._lock:
            if exchange.client is self._client and is_reusable:
                self._idle.append(exchange)
        return answer

    def close(self) -> None:
        """Close the connection for good."""
        with self._lock:
            self._is_closed, self._client, idle, self._idle = True, None, self._idle, []
        for exchange in idle:
            exchange.close()

    def _lose(self, client: flight.FlightClient, error: Exception) -> None:
        """Stop using a client, and connect again in a thread."""
        with self._lock:
            if client is not self._client:
                return  # another request has noticed the failure first
            self._client, idle, self._idle = None, self._idle, []
        _log.warning("table shard %s is away: %s", self.number, get_first_line(error))
        for exchange in idle:
            exchange.close()
        Thread(target=self._reconnect, name=f"shard-{self.number}", daemon=True).start()

    def _reconnect(self) -> None:
        while not self._is_closed:
            try:
                self.connect(RECONNECT_TIMEOUT_S)
                return _log.warning("table shard %s is back", self.number)
            except Exception:  # the shard is restarting, or its node is gone
                sleep(RETRY_INTERVAL_S)
