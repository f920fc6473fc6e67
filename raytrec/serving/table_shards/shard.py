"""Table shards: actors with a part of an export's rows, and the lookups of replicas in them over Arrow Flight."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from time import monotonic
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import torch

from raytrec.common.errors import RunError
from raytrec.common.formatting import format_address, format_bytes
from raytrec.deltas.chain import Position, iterate_exports, make_missing_export_error
from raytrec.scoring.load import LookupMaker
from raytrec.scoring.lookups import IdRows
from raytrec.scoring.manifest import Manifest, read_manifest
from raytrec.serving.coordinator import NAMESPACE
from raytrec.serving.options import ServiceOptions
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.serving.table_shards.connection import READ_ACTION, ShardConnection, TableState, read_tls_files
from raytrec.serving.table_shards.loaded_tables import LoadedTables, load_tables
from raytrec.serving.table_shards.lookups import ShardedLookups
from raytrec.serving.table_shards.messages import OutdatedStateError, decode_key

MAX_LOADED = 4  # exports in memory: the current, previous and prepared export, and the challenger
MAX_WAIT_S = 5.0  # maximum time that a call waits for another call that loads tables or applies deltas
SHARD_CPUS = 0.01  # almost 0, because Ray places shards by memory
MAX_CALLS = 100  # concurrent calls of `TableShard.open`; calls for loaded states must not wait


class _TokenCheck(flight.ServerMiddlewareFactory):
    """Check of the token at the start of each Flight call."""

    def __init__(self, token: str):
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str]]) -> None:
        """Raise FlightUnauthenticatedError if the token is missing or wrong."""
        given = headers.get("authorization", [""])[0]
        if not hmac.compare_digest(given.encode(), self._expected):
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")


class _LookupServer(flight.FlightServerBase):
    def __init__(self, shard: TableShard, host: str, token: str):
        tls = read_tls_files()
        super().__init__(
            f"grpc{'+tls' if tls else ''}://{format_address(host, 0)}",
            middleware={"token": _TokenCheck(token)},
            tls_certificates=[tls[:2]] if tls else [],
        )
        self._shard, self.location = shard, f"grpc{'+tls' if tls else ''}://{format_address(host, self.port)}"

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve the requests of a stream until the client or an error (see `TableShard.answer`) ends the stream."""
        for chunk in reader:
            if chunk.app_metadata is None:
                raise ValueError("the message is not a request")
            writer.write_metadata(self._shard.answer(memoryview(chunk.app_metadata)))

    def do_action(self, context: Any, action: Any) -> list[pa.Buffer]:
        """Return stored rows of the shard; raise ValueError for another action, or as in `TableShard.read`."""
        if action.type != READ_ACTION:
            raise ValueError(f"there is no action {action.type}")
        return [self._shard.read(memoryview(action.body))]


class TableShard:
    """Actor with a part of the rows of exports. Replicas call `open`, and then look up rows over Flight.

    Args:
        number: Number of the shard.
        count: Number of shards.
        host: Address to listen on, on any free port; None: the node's address in the Ray cluster, which is loopback
            for a local cluster.
    """

    def __init__(self, number: int, count: int, host: str | None = None):
        torch.set_num_threads(1)
        self._part, self._advancing, self._loading = (number, count), Lock(), Lock()
        self._tables: list[LoadedTables] = []
        self._failure: RunError | None = None  # of the last delta that could not be applied
        if host is None:
            import ray

            host = ray.util.get_node_ip_address()
        self._token = secrets.token_urlsafe(32)
        self.server = _LookupServer(self, host, self._token)
        Thread(target=self.server.serve, name="flight", daemon=True).start()

    def open(self, state: TableState) -> tuple[str, str] | None:
        """Load a state of tables unless it is in memory, and return the shard's location and token.

        The least recently used tables are released if there are more than MAX_LOADED. The result is None if the shard
        has been busy with other calls for MAX_WAIT_S seconds.

        Raises:
            OutdatedStateError: The state is older than the states that the shard keeps.
            RunError: The export cannot be used or has another version, or no deltas lead to the state.
        """
        # Replicas that ask for the next delta do not wait for tables that are being loaded.
        for lock, provide in (self._advancing, self._advance), (self._loading, self._load):
            if not self._find(state.key):
                if not lock.acquire(timeout=MAX_WAIT_S):
                    return None
                try:
                    provide(state)
                finally:
                    lock.release()
        return self.server.location, self._token

    def _find(self, key: str) -> LoadedTables | None:
        return next((each for each in self._tables if key in each.keys), None)

    def _list_followed(self, state: TableState) -> list[LoadedTables]:
        """Return the tables in memory to which the deltas that lead to a state can be applied."""
        same = [each for each in self._tables if (each.folder, each.precisions) == (state.uri, state.precisions)]
        return same if state.delta else []

    def _advance(self, state: TableState) -> None:
        """Apply deltas to loaded tables until they have a state, if possible; raise an error if they have passed it."""
        self._failure = None
        if state.is_first:  # deltas before a full export may be unusable, and other replicas need the tables in memory
            return
        followed = self._list_followed(state)
        for tables in sorted(followed, key=lambda each: -each.delta):
            if not self._find(state.key):
                try:
                    tables.advance(state.delta)
                except RunError as error:
                    self._failure = error.with_traceback(None)  # a later export may replace the deltas
        if not self._find(state.key) and any(each.delta > state.delta for each in followed):
            what = f"table shard {self._part[0]} no longer has the state {state.version}"
            raise OutdatedStateError(what, where=state.uri, expected="a later state")

    def _load(self, state: TableState) -> None:
        """Load a state unless another call has just loaded it; raise RunError as `open` does."""
        if not self._find(state.key):
            tables = self._load_followed(state) if state.delta else load_tables(state.uri, self._part)
            if state.key not in tables.keys:
                what = f"the export was changed in place from version {state.version} to {tables.keys[0].split()[0]}"
                raise RunError(what, where=state.uri, do="write each export to a new folder, and promote it")
            newest = sorted(self._tables, key=lambda each: each.used_s)[1 - MAX_LOADED :]
            self._tables = [*newest, tables]

    def _load_followed(self, state: TableState) -> LoadedTables:
        """Load the newest usable export that is not newer than a state, and apply the deltas up to the state.

        Unless the state is a replica's first one, only exports newer than the tables in memory are tried. Older
        exports would need the deltas that could not be applied to these tables.

        Raises:
            RunError: No export leads to the state.
        """
        what = f"there is no full export with deltas that lead to {state.version}"
        failure = self._failure or RunError(what, where=state.uri, expected="a full export and the deltas after it")
        known = [] if state.is_first else [each.delta for each in self._list_followed(state)]
        for uri, position in iterate_exports(state.uri, max(known, default=0)):
            if position.number <= state.delta:
                try:
                    tables = load_tables(uri, self._part, state.uri, position)
                    tables.advance(state.delta)
                    if state.key in tables.keys:
                        return tables
                except RunError as error:
                    failure = error
        raise failure

    def answer(self, request: memoryview) -> pa.Buffer:
        """Return the response to a request for vectors (messages.py).

        Raises:
            ValueError: The request is malformed, or the shard does not have the state.
        """
        key = decode_key(request)
        return pa.py_buffer(self._get(key).look_up(key, request))

    def read(self, request: memoryview) -> pa.Buffer:
        """Return the stored bytes of the shard's rows in a range of a stack.

        Args:
            request: int64 [3] with the number of the stack, the first row and the end, then the state's key in UTF-8.

        Raises:
            ValueError: The request is malformed, or the shard does not have the state.
        """
        key, numbers = bytes(request[24:]).decode(), np.frombuffer(request, np.int64, 3).tolist()
        return pa.py_buffer(self._get(key).read(key, *numbers).numpy())

    def _get(self, key: str) -> LoadedTables:
        if tables := self._find(key):
            return tables
        known = ", ".join(name for each in self._tables for name in each.keys) or "no tables"
        raise ValueError(f"shard {self._part[0]} has {known}, not {key}")


def get_shard_name(name: str, number: int, count: int) -> str:
    """Return the name of the actor of shard `number` of `count` of the service `name`."""
    return f"raytrec-tables-{name}-{number}-of-{count}"


def start_shards(service_options: ServiceOptions) -> None:
    """Start the shards of a service that do not exist yet; they load tables when replicas connect.

    Raises:
        RunError: There is no export, or the cluster does not have enough memory.
        DataError: The URI of the export is not valid, or its store cannot be reached.
    """
    import ray

    name, count, missing = service_options.name, service_options.table_shards, []
    for number in range(count):
        try:
            ray.get_actor(get_shard_name(name, number, count), NAMESPACE)
        except ValueError:
            missing.append(number)
    uri = service_options.uri
    if service_options.follow:
        uri, _ = next(iterate_exports(uri), (None, None))
        if uri is None:
            raise make_missing_export_error(service_options.uri)
    manifest = read_manifest(uri)
    memory_bytes = -(-sum(manifest.files[file].bytes for each in manifest.stacks for file in each.files) // count)
    _check_memory(memory_bytes, len(missing))
    for number in missing:
        ray.remote(TableShard).options(
            name=get_shard_name(name, number, count),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=MAX_CALLS,
            num_cpus=SHARD_CPUS,
            memory=memory_bytes,
            scheduling_strategy="SPREAD",
        ).remote(number, count)


def _check_memory(memory_bytes: int, shards: int) -> None:
    from raytrec.compat.ray_core import has_autoscaler, list_free_resources

    free = [node.get("memory", 0.0) for node in list_free_resources().values()]
    if sum(each // max(1, memory_bytes) for each in free) < shards and not has_autoscaler():
        what = f"the missing table shards ({shards}) need {format_bytes(memory_bytes)} of memory each"
        expected = f"this free memory for each shard; the nodes have {', '.join(map(format_bytes, free)) or 'none'}"
        do = "increase the number of table shards, or the memory of the cluster"
        raise RunError(what, where="the Ray cluster", expected=expected, do=do)


def end_shards(name: str, count: int) -> None:
    """Terminate the existing shards of a service."""
    import ray

    for number in range(count):
        with suppress(ValueError):  # the actor does not exist
            ray.kill(ray.get_actor(get_shard_name(name, number, count), NAMESPACE))


def make_lookup_maker(
    service_options: ServiceOptions, figures: ReplicaMetrics, position: Position | None = None
) -> LookupMaker:
    """Return the argument `make_lookups` of scoring.load.load for lookups in the shards of a service.

    Args:
        service_options: Options of the service.
        figures: Metrics of the replica.
        position: Delta that leads to the state of the export; None: the service does not follow a run.
    """
    count = service_options.table_shards
    names = [get_shard_name(service_options.name, number, count) for number in range(count)]

    def make_lookups(uri: str, manifest: Manifest, ids: Mapping[str, IdRows]) -> ShardedLookups:
        precisions, folder = manifest.stack_precisions, service_options.uri
        state = TableState(uri, manifest.version, precisions)
        if position:
            state = TableState(folder, position.version, precisions, position.number, is_first=True)
        connections = [ShardConnection(number, partial(_open, name), state) for number, name in enumerate(names)]
        return ShardedLookups(manifest, ids, connections, service_options, figures)

    return make_lookups


def _open(name: str, state: TableState, timeout_s: float) -> Any:
    """Return the result of `TableShard.open` of a shard's actor; raise Ray's error if it takes too long or fails."""
    import ray

    deadline, shard = monotonic() + timeout_s, ray.get_actor(name, NAMESPACE)
    while (address := ray.get(shard.open.remote(state), timeout=max(0.0, deadline - monotonic()))) is None:
        pass  # the shard is loading tables for another call
    return address
