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
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from raytrec.common.errors import RunError, get_first_line
from raytrec.serving.batching import UnavailableError
from raytrec.serving.table_shards.messages import MAX_VALUE_BYTES, OutdatedStateError

_log = logging.getLogger(__name__)
RETRY_INTERVAL_S = 0.2  # interval of attempts to reach an unavailable shard
REFUSAL_INTERVAL_S = 5.0  # interval of attempts if the shard responds that it cannot load the tables
CONNECT_TIMEOUT_S = 2.0  # timeout of a connection to the port of a shard; the default of gRPC is 20 s
RECONNECT_TIMEOUT_S = 1800.0  # timeout of an attempt to reach a shard, which may have to load tables
DEADLINE_TICK_S = 0.005  # interval at which deadlines are checked while there are requests
MAX_LATE = 3  # consecutive requests without a response after which a shard is unavailable
READ_ACTION, READ_TIMEOUT_S = "rows", 10.0  # Flight action that returns stored rows, and its timeout
FAILURES = (pa.ArrowException, OSError, StopIteration)  # errors of a stream or action


class TableState(NamedTuple):
    """State of an export's tables, which shards load or reach by applying a run's deltas.

    Attributes:
        uri: Location of the export, or of the folder of deltas.
        version: Version of the export, or of the state after a delta.
        precisions: Precisions of the stacks (tables of one dim), such as int8,int8, on which the distribution of rows
            over shards depends.
        delta: Number of the delta that leads to the state; 0: `uri` is an export.
        is_first: True if a shard must load the state even if the shard has a later state, because a replica compares
            the golden rows of a full export.
    """

    uri: str
    version: str
    precisions: str
    delta: int = 0
    is_first: bool = False

    @property
    def key(self) -> str:
        """Return the name of the state in requests."""
        return f"{self.version} {self.precisions}"


def read_tls_files() -> tuple[bytes, bytes, bytes] | None:
    """Return certificate, key and root certificates in PEM if the Ray cluster uses TLS (RAY_USE_TLS), else None."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    certificate, key, roots = (Path(os.environ[name]).read_bytes() for name in names)
    return certificate, key, roots


class Exchange:
    """Flight stream to a shard, which carries one request at a time.

    Args:
        client: Client of the shard.
        token: Token of the shard.

    Attributes:
        deadline: Time of `monotonic` at which the request is canceled; None: there is no request.
    """

    def __init__(self, client: flight.FlightClient, token: str):
        self.client = client
        self.deadline: float | None = None
        command = flight.FlightDescriptor.for_command(b"lookup")
        self._writer, self._reader = client.do_exchange(command, _make_options(token))

    def send(self, request: bytes, deadline: float) -> None:
        """Send a request; raise one of FAILURES if the shard cannot be reached."""
        self.deadline = deadline
        _watched.put((self, deadline))
        self._writer.write_metadata(request)

    def receive(self) -> tuple[pa.Buffer, bool]:
        """Return the response to the request, and True if it is in time, so that the stream can be used again.

        Raises one of FAILURES if the stream fails, or is canceled because the deadline has passed.
        """
        answer, deadline = self._reader.read_chunk().app_metadata, self.deadline
        self.deadline = None
        return answer, monotonic() < deadline  # after the deadline, the stream may already be canceled

    def close(self) -> None:
        """End the stream, whereupon `send` and `receive` raise an error."""
        self._reader.cancel()


def _make_options(token: str, **options: Any) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())], **options)


_watched: SimpleQueue[tuple[Exchange, float]] = SimpleQueue()  # requests and their deadlines


def _cancel_late_requests() -> None:
    requests = list[tuple[Exchange, float]]()
    while True:
        while not (requests and _watched.empty()):
            requests.append(_watched.get())
        sleep(DEADLINE_TICK_S)
        requests = [each for each in requests if each[0].deadline == each[1]]  # those without a response
        for exchange, _ in (late := [each for each in requests if each[1] < monotonic()]):
            exchange.close()
        requests = [each for each in requests if each not in late]


@cache
def _start_deadlines() -> None:
    Thread(target=_cancel_late_requests, name="lookup-deadlines", daemon=True).start()


class ShardConnection:
    """Connection to one shard, for one state of the tables at a time.

    If the shard cannot be reached, or MAX_LATE requests in succession get no response, the shard is unavailable until
    a thread has reached it again. Meanwhile, requests do not wait for the shard.

    Args:
        number: Number of the shard.
        reach: Function (state, timeout in seconds) that makes the shard load a state of the tables, and returns the
            location and token of the shard.
        state: First state.

    Attributes:
        state: State that the shard must have when it is reached again.
        refusal: Reason why the shard cannot load this state; None: no reason is known.
    """

    def __init__(self, number: int, reach: Callable[[TableState, float], tuple[str, str]], state: TableState):
        self.number, self.state, self._reach = number, state, reach
        self.refusal: RunError | None = None
        self._lock, self._client, self._idle = Lock(), None, list[Exchange]()
        self._address, self._late, self._is_closed, self._is_reconnecting = ("", ""), 0, False, False

    @property
    def is_away(self) -> bool:
        """Return True if the shard is unavailable."""
        return self._client is None

    def connect(self, state: TableState, timeout_s: float) -> None:
        """Connect to the shard once it has loaded a state of the tables; keep a connection that works.

        Raises:
            Exception: The shard cannot be reached, or cannot load the state.
        """
        _start_deadlines()
        address = self._reach(state, timeout_s)
        with self._lock:
            if self._client is not None and self._address == address:
                return
        tls, limits = read_tls_files(), [("grpc.max_receive_message_length", MAX_VALUE_BYTES + 1024)]
        limits.append(("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)))
        client = flight.FlightClient(address[0], tls_root_certs=tls and tls[2], generic_options=limits)
        first = Exchange(client, address[1])  # opened here, because requests must not wait for the connection
        with self._lock:
            idle, self._idle = self._idle, []
            if self._is_closed:
                idle.append(first)
            else:
                self._idle = [first]
                self._client, self._address, self._late, self._is_reconnecting = client, address, 0, False
                self.refusal = None
        for exchange in idle:
            exchange.close()

    def send(self, request: bytes, deadline: float) -> Exchange | None:
        """Send a request, and return the stream of its response, or None if the shard is unavailable."""
        with self._lock:
            client, exchange = self._client, self._idle.pop() if self._idle else None
        if client is None:
            return None
        try:
            exchange = exchange or Exchange(client, self._address[1])
            exchange.send(request, deadline)
            return exchange
        except FAILURES as error:
            self.lose(error, client)
            return None

    def receive(self, exchange: Exchange, size: int) -> pa.Buffer | None:
        """Return a response of `size` bytes, or None if the shard sends no such response before the deadline."""
        try:
            answer, is_reusable = exchange.receive()
            if answer is None or answer.size != size:
                raise OSError(f"the response does not have {size:,} bytes")
        except FAILURES as error:
            exchange.close()
            is_late = exchange.deadline is not None and monotonic() >= exchange.deadline
            self._late = self._late + 1 if is_late else MAX_LATE
            if self._late >= MAX_LATE:
                self.lose(error, exchange.client)
            return None
        self._late = 0
        with self._lock:
            if exchange.client is self._client and is_reusable:
                self._idle.append(exchange)
        return answer

    def read(self, state: TableState, stack: int, first: int, end: int) -> bytes:
        """Return the stored bytes of the shard's rows among the rows [first, end) of a stack.

        Raises:
            UnavailableError: The shard is unavailable, or does not have the state.
        """
        body = np.array([stack, first, end]).tobytes() + state.key.encode()
        try:
            if (client := self._client) is None:
                raise OSError("the connection is closed")
            options = _make_options(self._address[1], timeout=READ_TIMEOUT_S)
            return b"".join(each.body for each in client.do_action(flight.Action(READ_ACTION, body), options))
        except FAILURES as error:
            _log.warning("stored rows of table shard %s cannot be read: %s", self.number, get_first_line(error))
            what = f"table shard {self.number} is unavailable, or does not have the state of the replica"
            raise UnavailableError(what, where="the service", do="retry") from None

    def close(self) -> None:
        """Close the connection permanently."""
        with self._lock:
            self._is_closed, self._client, idle, self._idle = True, None, self._idle, []
        for exchange in idle:
            exchange.close()

    def lose(self, error: Exception, client: flight.FlightClient | None = None) -> None:
        """Stop using the shard until a thread has reached it again.

        Args:
            error: Failure of the shard.
            client: Client that has failed; None: the present client.
        """
        with self._lock:
            if self._client is None or client not in (None, self._client):
                return  # another request has already detected the failure
            self._client, idle, self._idle = None, self._idle, []
            starts, self._is_reconnecting = not self._is_reconnecting, True
        _log.warning("table shard %s is unavailable: %s", self.number, get_first_line(error))
        for exchange in idle:
            exchange.close()
        if starts:
            Thread(target=self._reconnect, name=f"shard-{self.number}", daemon=True).start()

    def _reconnect(self) -> None:
        while not self._is_closed:
            try:
                self.connect(self.state, RECONNECT_TIMEOUT_S)
                return _log.warning("table shard %s is available again", self.number)
            except Exception as error:  # the shard is restarting, or its node is gone
                cause = getattr(error, "cause", error)  # cause of a Ray error
                is_outdated = isinstance(cause, OutdatedStateError)  # the replica only has to apply the next deltas
                self.refusal = cause if isinstance(cause, RunError) and not is_outdated else None
                sleep(REFUSAL_INTERVAL_S if self.refusal else RETRY_INTERVAL_S)
