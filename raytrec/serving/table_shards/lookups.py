"""Lookups in table shards, which replace lookups in mapped tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import local
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
import torch

from raytrec.common.errors import DataError, RaytrecError, RunError
from raytrec.data.assembler import AssembledTensors
from raytrec.scoring.lookups import IdRows, Lookups, Tensors, divide_by_totals, pad_sequences
from raytrec.scoring.manifest import Manifest
from raytrec.scoring.stored_tables import PRECISIONS, RowChanges, place_tables
from raytrec.serving.batching import UnavailableError
from raytrec.serving.coordinator import LOAD_TIMEOUT_S
from raytrec.serving.table_shards.connection import ShardConnection, TableState
from raytrec.serving.table_shards.messages import MAX_VALUE_BYTES, encode_request
from raytrec.serving.table_shards.pooling import RowCache, ShardedStack, StackLookup

if TYPE_CHECKING:
    from raytrec.serving.options import ServiceOptions
    from raytrec.serving.replica_metrics import ReplicaMetrics

NOTHING = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)  # rows, lengths and weights
UPDATE_TIMEOUT_S = 10.0  # timeout of shards that apply a delta; the shards continue, and the replica asks again
CHECK_TIMEOUT_S = 60.0  # timeout of lookups of golden rows, whose pages are not in memory yet


class ShardedLookups(Lookups):
    """Lookup and pooling of ids in table shards. All methods are thread-safe.

    All shards are queried at the same time, each with one request for the rows of all tables.

    Args:
        manifest: Manifest of the export.
        ids: Rows of managed ids, by table.
        connections: Connections to all shards, by number, for one state; the constructor connects them.
        service_options: Options of the service: size of the cache, timeout and fallback.
        figures: Metrics of the replica.

    Raises:
        RunError: A shard cannot be reached, or cannot load the tables.
    """

    is_remote = True

    def __init__(
        self,
        manifest: Manifest,
        ids: Mapping[str, IdRows],
        connections: Sequence[ShardConnection],
        service_options: ServiceOptions,
        figures: ReplicaMetrics,
    ):
        shapes, stacks, cache_bytes = manifest.stack_shapes, [], int(service_options.table_cache_mib * 2**20)
        total = sum(rows * dim for rows, dim in shapes)
        for entry, (rows, dim) in zip(manifest.stacks, shapes, strict=True):
            row_bytes, cache = PRECISIONS[entry.precision].row_bytes(dim), cache_bytes * rows * dim // total
            stacks.append(ShardedStack(dim, row_bytes, len(connections), RowCache(rows, dim, cache)))
        self._stacks = stacks
        super().__init__(manifest.features, place_tables(manifest, self._stacks), ids)
        self._state, self._connections, self._figures = connections[0].state, connections, figures
        self._options, self._missing = service_options, local()
        self._timeout_s, self._uses_zeros = CHECK_TIMEOUT_S, False  # until the golden rows have been compared
        finalize(self, close_connections, connections)
        self._connect(self._state, LOAD_TIMEOUT_S, connections)

    def _connect(self, state: TableState, timeout_s: float, connections: Sequence[ShardConnection]) -> None:
        with ThreadPoolExecutor(len(self._connections)) as threads:
            list(threads.map(partial(_connect, state, timeout_s), connections))

    @property
    def refusal(self) -> RunError | None:
        """Return the reason why an unavailable shard cannot load the current state; see Lookups."""
        return next((each.refusal for each in self._connections if each.refusal), None)

    def finish_loading(self) -> None:
        """Apply the timeout and the fallback of the service to all further lookups."""
        self._timeout_s = self._options.table_timeout_ms / 1000
        self._uses_zeros = self._options.on_missing_shard == "zeros"

    def take_missing_shards(self) -> set[int]:
        """Return the numbers of the shards that did not respond to lookups of this thread since the last call."""
        missing, self._missing.shards = getattr(self._missing, "shards", set()), set()
        return missing

    def prepare_update(
        self, deltas: Sequence[Mapping[str, RowChanges]], version: str, number: int
    ) -> Callable[[], None]:
        """Wait until all shards have the new state, and return the function that adopts the state; see Lookups.

        Raises:
            UnavailableError: A shard cannot be reached, or does not have the state after UPDATE_TIMEOUT_S seconds.
            OutdatedStateError: A shard keeps only later states.
            RunError: A shard cannot apply the deltas.
        """
        state = self._state._replace(version=version, delta=number, is_first=False)
        # If a shard is unavailable, the other shards must not advance, because they would drop the current state.
        self._connect(state, UPDATE_TIMEOUT_S, [each for each in self._connections if each.is_away])
        self._connect(state, UPDATE_TIMEOUT_S, self._connections)

        def update() -> None:
            for name, each in (item for changes in deltas for item in changes.items()):
                table: Any = self.tables[name]
                table.stack.cache.drop(each.rows.numpy() + table.first_row)
            self._state = state
            for connection in self._connections:
                connection.state = state

        return update

    def make_reader(self, table: str) -> Callable[[int, int], torch.Tensor]:
        """Return a function that reads stored rows in the shards; see Lookups.make_reader.

        The function raises UnavailableError if a shard is unavailable, or no longer has the state.
        """
        stack: Any = self.tables[table].stack
        first_row, number, state = self.tables[table].first_row, self._stacks.index(stack), self._state

        def read(first: int, end: int) -> torch.Tensor:
            rows = np.arange(first, end) + first_row
            shards, stored = stack.find_shards(rows), np.empty((len(rows), stack.row_bytes), np.uint8)
            for connection in self._connections:
                content = connection.read(state, number, first + first_row, end + first_row)
                places = shards == connection.number
                stored[places] = np.frombuffer(content, np.uint8).reshape(-1, stack.row_bytes)
            return torch.from_numpy(stored)

        return read

    def __call__(self, rows: AssembledTensors, needed_features: Collection[str]) -> Tensors:
        """Return (kind, feature) → input tensor with B rows for `needed_features`, and ("dense", "") → dense columns.

        Raises:
            UnavailableError: A shard is unavailable or late, unless the fallback is zeros.
            DataError: The rows have more ids than a request may look up.
        """
        bags, side_features = rows.bags, rows.side_features or {}
        lengths_FB, ids = bags.lengths.view(len(bags.keys), bags.rows), bags.ids.split(bags.counts)
        weights = [None] * len(bags.counts) if bags.weights is None else bags.weights.split(bags.counts)
        members: dict[Any, list[int]] = {stack: [] for stack in self._stacks}
        for place, (feature, _) in enumerate(self._specs):
            if feature in needed_features:
                members[self._tables[place].stack].append(place)
        lookups, sizes = [], []
        for stack, places in members.items():
            parts = [self._locate(place, ids[place], lengths_FB[place], weights[place]) for place in places]
            sizes.append([len(lengths) for _, lengths, _ in parts])
            rows_N, lengths_K, weights_N = (np.concatenate(each) for each in zip(NOTHING, *parts, strict=True))
            is_weighted = any(self._specs[place][1].weights for place in places)
            lookups.append(StackLookup(stack, rows_N, lengths_K, weights_N if is_weighted else None))
        self._ask_shards(lookups)
        inputs: Tensors = {("dense", ""): rows.dense}
        for places, counts, lookup in zip(members.values(), sizes, lookups, strict=True):
            for place, sums in zip(places, lookup.pool().split(counts), strict=True):
                feature, spec = self._specs[place]
                if feature not in self._features.sequences:
                    if self._features.is_mean(feature):
                        sums = divide_by_totals(sums, lengths_FB[place], weights[place] if spec.weights else None)
                    inputs["bag", feature] = sums
                    continue
                present_BL = torch.arange(self._features.sequences[feature]) < lengths_FB[place].unsqueeze(1)
                inputs["vectors", feature] = pad_sequences(sums, present_BL)
                inputs["present", feature] = present_BL
                if (side := side_features.get(feature)) is not None:
                    inputs["side_features", feature] = pad_sequences(side, present_BL)
        return inputs

    def _locate(
        self, place: int, ids_N: torch.Tensor, lengths_B: torch.Tensor, weights_N: torch.Tensor | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows in the stack [N], bag lengths and weights [N] of a feature. Each id of a sequence is a bag."""
        (feature, spec), table = self._specs[place], self._tables[place]
        rows_N = self.find_table_rows(spec.table, ids_N).numpy() + table.first_row
        is_sequence = feature in self._features.sequences
        lengths = np.ones(len(rows_N), np.int64) if is_sequence else lengths_B.numpy().astype(np.int64)
        has_weights = spec.weights and weights_N is not None
        return rows_N, lengths, weights_N.numpy() if has_weights else np.ones(len(rows_N), np.float32)

    def _ask_shards(self, lookups: Sequence[StackLookup]) -> None:
        """Request the vectors of the lookups from all shards, and add the responses to the lookups.

        Raises:
            UnavailableError: A shard is unavailable or late, unless the fallback is zeros.
            DataError: The vectors exceed MAX_VALUE_BYTES.
        """
        began, asked, missing = monotonic(), [], set[int]()
        if (size := sum(each.vector_bytes for each in lookups)) > MAX_VALUE_BYTES:
            what, expected = f"the vectors of all ids take {size:,} bytes", f"at most {MAX_VALUE_BYTES:,} bytes"
            raise DataError(what, where="the rows", expected=expected, do="send fewer rows or shorter lists")
        for connection in self._connections:
            stacks = [each.request(connection.number) for each in lookups]
            if rows := sum(len(each.rows) for each in stacks):
                self._figures.table_rows.labels("shard").inc(rows)
                request = encode_request(self._state.key, stacks)
                asked.append((connection, connection.send(request, began + self._timeout_s)))
        for connection, exchange in asked:
            sizes = [each.count_values(connection.number) for each in lookups]
            answer = exchange and connection.receive(exchange, 4 * sum(sizes))
            if answer is None:
                missing.add(connection.number)
                self._figures.missing_shards.labels(connection.number).inc()
                continue
            parts = np.split(np.frombuffer(answer, np.float32), np.cumsum(sizes)[:-1])
            for lookup, values in zip(lookups, parts, strict=True):
                lookup.add(connection.number, values)
        self._figures.table_rows.labels("cache").inc(sum(each.found for each in lookups))
        self._figures.table_seconds.labels("missing" if missing else "complete").observe(monotonic() - began)
        if missing and not self._uses_zeros:
            what = f"table shards are unavailable or late: {', '.join(map(str, sorted(missing)))}"
            raise UnavailableError(what, where="the service", do="retry after 1 s")
        self._missing.shards = getattr(self._missing, "shards", set()) | missing


def close_connections(connections: Sequence[ShardConnection]) -> None:
    """Close connections permanently."""
    for connection in connections:
        connection.close()


def _connect(state: TableState, timeout_s: float, connection: ShardConnection) -> None:
    """Connect to a shard; raise the shard's RaytrecError, or UnavailableError for any other failure."""
    try:
        connection.connect(state, timeout_s)
    except Exception as error:
        cause = getattr(error, "cause", error)  # cause of a Ray error
        if not isinstance(cause, RaytrecError):
            if not isinstance(error, TimeoutError):  # a shard that is slow to respond still serves requests
                connection.lose(error)
            late = f"has not loaded {state.version} within {timeout_s:g} s"
            fault = late if isinstance(error, TimeoutError) else f"cannot be reached: {type(cause).__name__}"
            what = f"table shard {connection.number} {fault}"
            cause = UnavailableError(what, where="the service", do="read the log of the service")
        raise cause from None
