"""Tables of an export in a shard's memory, which a run's deltas may change in place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import torch

from raytrec.common.storage import make_absolute
from raytrec.deltas.apply import read_row_changes, refuse_unusable
from raytrec.deltas.chain import Position, read_next
from raytrec.scoring.load import check_files, copy_to_disk, list_table_names, select_files, unlink_files
from raytrec.scoring.manifest import Manifest, read_manifest
from raytrec.scoring.stored_tables import RowChanges, RowStack, StackedTable, encode_changes, open_tables
from raytrec.serving.table_shards.connection import TableState
from raytrec.serving.table_shards.messages import MAX_STATES, StackRequest, decode_request
from raytrec.serving.table_shards.pooling import find_shards

StoredRows = tuple[torch.Tensor, torch.Tensor]  # rows in a stack, int64 [n], ascending, and their stored values, [n, …]


@dataclass(frozen=True)
class _State:
    """One of the states of the tables that can be looked up.

    Attributes:
        key: Name of the state in requests (`TableState.key`); "" while rows are being changed to this state.
        replaced: Stack → rows that differ from the previous state, with their values in the previous state.
    """

    key: str
    replaced: dict[RowStack, StoredRows]


class LoadedTables:
    """Mapped tables of an export, without its programs. All methods except `advance` are thread-safe.

    Args:
        manifest: Manifest of the export.
        tables: Tables of the export.
        part: (number of the shard, number of shards); deltas are applied only to the rows of this shard.
        folder: Folder of deltas; "": the tables do not change.
        position: Delta that leads to the state of the export; None: the tables do not change.

    Attributes:
        folder: Folder of deltas.
        precisions: Precisions of the stacks.
        used_s: Time of the last lookup, as returned by `monotonic`.
    """

    def __init__(
        self,
        manifest: Manifest,
        tables: dict[str, StackedTable],
        part: tuple[int, int],
        folder: str = "",
        position: Position | None = None,
    ):
        self._manifest, self._tables, self._part = manifest, tables, part
        self._stacks: list[Any] = [tables[each.tables[0]].stack for each in manifest.stacks]
        self.folder, self._position, self.used_s = folder, position, monotonic()
        self.precisions, version = manifest.stack_precisions, position.version if position else manifest.version
        self._states: tuple[_State, ...] = (_State(self._name(version), {}),)

    def _name(self, version: str) -> str:
        return TableState(self.folder, version, self.precisions).key

    @property
    def keys(self) -> list[str]:
        """Return the names of the states that can be looked up."""
        return [each.key for each in self._states if each.key]

    @property
    def delta(self) -> int:
        """Return the number of the delta that leads to the newest state; 0 for an export that does not change."""
        return self._position.number if self._position else 0

    def advance(self, delta: int) -> None:
        """Apply the existing deltas up to this number to the newest state. Only one thread may call this at a time.

        Raises:
            RunError: A delta cannot be used. The deltas before it remain applied.
        """
        while self._position and self._position.number < delta:
            if (following := read_next(self.folder, self._position)) is None:
                return
            self._apply(following)

    def _apply(self, following: Position) -> None:
        changes = read_row_changes(self.folder, following, self._manifest.data_schema)
        with refuse_unusable(self.folder, following):
            own, replaced = dict[RowStack, StoredRows](), dict[RowStack, StoredRows]()
            for stack, (unsorted_rows, stored) in encode_changes(self._tables, self._select_own(changes)).items():
                rows, order = unsorted_rows.sort()
                own[stack] = rows, stored[order]
                stack.prepare_writing(rows)
                replaced[stack] = rows, stack.read_rows(rows)
        # Lookups of earlier states are not affected while rows change, because they restore the replaced rows last.
        earlier = self._states[1 - MAX_STATES :]
        self._states = *earlier, _State("", replaced)
        for stack, each in own.items():
            stack.write(*each)
        self._states, self._position = (*earlier, _State(self._name(following.version), replaced)), following

    def _select_own(self, changes: Mapping[str, RowChanges]) -> dict[str, RowChanges]:
        own = dict[str, RowChanges]()
        for name, each in changes.items():
            places = self._find_own(self._tables[name].stack, each.rows + self._tables[name].first_row)
            own[name] = RowChanges(each.rows[places], each.values[places])
        return own

    def _find_own(self, stack: RowStack, rows_N: torch.Tensor) -> torch.Tensor:
        """Return the positions of the shard's rows among rows of a stack: int64 [N] → int64 [n]."""
        number, count = self._part
        is_own_N = find_shards(rows_N.numpy(), stack.read(0, 1).nbytes, count) == number
        return torch.from_numpy(is_own_N.nonzero()[0])

    def look_up(self, key: str, request: memoryview) -> np.ndarray:
        """Return the response to a request for this state, float32 [n]; see messages.py.

        Raises:
            ValueError: The request is malformed, or the state can no longer be looked up.
        """
        self.used_s = monotonic()
        requests = zip(self._stacks, decode_request(request, self._manifest.stack_shapes), strict=True)
        with torch.inference_mode():
            parts = [self._pool(stack, key, each).numpy().reshape(-1) for stack, each in requests if len(each.rows)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.float32), *parts])

    def _pool(self, stack: RowStack, key: str, request: StackRequest) -> torch.Tensor:
        """Return the vectors of single rows, followed by the sums of bags, float32 [s + b, dim]."""
        rows_N = torch.from_numpy(request.rows.copy())
        vectors_ND = stack.vectors(rows_N)
        for is_replaced_N, stored in self._find_replaced(stack, key, rows_N):
            vectors_ND[is_replaced_N] = stack.precision.decode(stored)
        if not len(request.lengths):
            return vectors_ND
        single = len(request.rows) - int(request.lengths.sum())
        pooled = vectors_ND[single:]
        if request.weights is not None:
            pooled = pooled * torch.from_numpy(request.weights.copy()).unsqueeze(1)
        sums = torch.segment_reduce(pooled, "sum", lengths=torch.from_numpy(request.lengths.copy()), unsafe=True)
        return torch.cat([vectors_ND[:single], sums])

    def read(self, key: str, stack_number: int, first: int, end: int) -> torch.Tensor:
        """Return the stored values of the shard's rows among the rows [first, end) of a stack, [n, …].

        Raises:
            ValueError: There is no such stack, it does not contain the rows, or the state can no longer be looked up.
        """
        if not 0 <= stack_number < len(self._stacks):
            raise ValueError(f"there is no stack {stack_number}")
        stack, (rows, _) = self._stacks[stack_number], self._manifest.stack_shapes[stack_number]
        if not 0 <= first < end <= rows:
            raise ValueError(f"rows [{first:,}, {end:,}) are not in the {rows:,} rows of stack {stack_number}")
        all_N = torch.arange(first, end)
        rows_N = all_N[self._find_own(stack, all_N)]
        stored_N = stack.read_rows(rows_N)
        for is_replaced_N, stored in self._find_replaced(stack, key, rows_N):
            stored_N[is_replaced_N] = stored
        return stored_N

    def _find_replaced(
        self, stack: RowStack, key: str, rows_N: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (mask of the rows that a later state has replaced, bool [N], their stored values before that state).

        The newest state is first. The values of the state `key` are the newest values, overwritten in this order.

        Raises:
            ValueError: The state can no longer be looked up.
        """
        states, keys = self._states, [each.key for each in self._states]
        for state in reversed(states[keys.index(key) + 1 :]):
            if stack in state.replaced and len((replaced := state.replaced[stack])[0]):
                places_N = torch.searchsorted(replaced[0], rows_N).clamp(max=len(replaced[0]) - 1)
                is_replaced_N = replaced[0][places_N] == rows_N
                yield is_replaced_N, replaced[1][places_N[is_replaced_N]]


def load_tables(uri: str, part: tuple[int, int], folder: str = "", position: Position | None = None) -> LoadedTables:
    """Map the tables of an export into memory.

    Args:
        uri: Local path, s3:// or gs:// URI.
        part: (number of this shard, number of shards). A shard compares the checksums of a part of the files, so that
            all shards together check all files.
        folder: Folder of deltas; "": the tables do not change.
        position: Delta that leads to the state of the export; None: the tables do not change.

    Raises:
        RunError: There is no export, or it is damaged or cannot be copied.
        DataError: The URI is not valid, or the store cannot be reached.
    """
    place = make_absolute(uri)
    manifest, (number, count) = read_manifest(place), part
    names = sorted(list_table_names(manifest))
    with ExitStack() as copies:
        local, copied = copy_to_disk(place, select_files(manifest, names), copies)
        check_files(local, select_files(manifest, names[number::count]), True, place, background=True)
        loaded = LoadedTables(manifest, open_tables(local, manifest), part, folder, position)
        if copied:
            unlink_files(local, names)
        weakref.finalize(loaded, copies.pop_all().close)
    return loaded
