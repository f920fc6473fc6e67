"""Read and check deltas, and apply them to a model in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from raytrec.common.errors import get_first_line
from raytrec.config.schema import Schema
from raytrec.deltas.chain import Position, make_refusal
from raytrec.deltas.format import UnusableDeltaError, read_batches, select_tables
from raytrec.scoring.lookups import IdRows
from raytrec.scoring.scorer import Scorer
from raytrec.scoring.stored_tables import PRECISIONS, RowChanges, encode_rows


class IdChanges(NamedTuple):
    """Changes of a table's managed ids.

    Attributes:
        listed: Rows that lose their id, int64 [l].
        ids: Ids that get a row, int64 [n].
        rows: Row that each of `ids` gets, int64 [n]; all of these rows are in `listed`.
    """

    listed: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Delta:
    """Content of a delta, restricted to the tables of a consumer (the export or service to which it is applied).

    Attributes:
        position: Position of a consumer that has applied the delta.
        rows: Table → new values of changed rows.
        ids: Table → changes of managed ids.
        dense: Weight → new values, for all weights of the programs.
    """

    position: Position
    rows: dict[str, RowChanges]
    ids: dict[str, IdChanges]
    dense: dict[str, torch.Tensor]


def read_delta(folder: str, position: Position, schema: Schema, weights: Mapping[str, torch.Tensor]) -> Delta:
    """Read and check the files of a delta.

    Args:
        folder: Folder of deltas.
        position: Position of a consumer that has applied the delta.
        schema: Schema of the consumer's export, which may lack some of the run's tables.
        weights: Weights of the consumer's programs by name; the delta must have the same names, shapes and dtypes.

    Raises:
        RunError: A file is missing, damaged or cannot be read, does not fit the consumer's export, or contains NaN or
            infinity. Infinite values of dense weights are accepted if they do not change.
    """
    with refuse_unusable(folder, position):
        _check_tables(position, schema)
        rows, ids, dense = (
            list(read_batches(folder, position.manifest, operation)) for operation in ("rows", "ids", "dense")
        )
        return Delta(position, _join_tables(rows, schema), _read_ids(ids, schema), _read_dense(dense, weights))


def read_row_changes(folder: str, position: Position, schema: Schema) -> dict[str, RowChanges]:
    """Return table → new rows of a delta, and ignore its ids and dense weights; errors are those of `read_delta`."""
    with refuse_unusable(folder, position):
        _check_tables(position, schema)
        return _join_tables(list(read_batches(folder, position.manifest, "rows")), schema)


@contextmanager
def refuse_unusable(folder: str, position: Position) -> Iterator[None]:
    """Convert an OSError, ValueError or ArrowException in the block to the RunError that refuses the delta."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise make_refusal(folder, position.number, get_first_line(error)) from None


def _check_tables(position: Position, schema: Schema) -> None:
    for name, table in schema.tables.items():
        if (size := position.manifest.tables.get(name)) is None:
            raise UnusableDeltaError(f"table {name} is missing in the manifest, but the export contains it")
        if (size.rows, size.dim) != (table.rows, table.dim):
            raise UnusableDeltaError(
                f"table {name} has {size.rows:,} rows of dim {size.dim} "
                f"instead of {table.rows:,} of dim {table.dim} in the export"
            )


def _check_range(table: str, rows: np.ndarray, count: int) -> None:
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        row = rows.min() if rows.min() < 0 else rows.max()
        raise UnusableDeltaError(f"row {row:,} is not in table {table}, which has {count:,} valid rows")


Piece = tuple[int, np.ndarray, np.ndarray]  # first column, rows [n], and values of `width` columns, [n, width]


def _split_rows(batches: list[pa.RecordBatch], schema: Schema) -> dict[str, list[Piece]]:
    """Return table → pieces; a piece contains rows of a batch that have values for the same range of columns."""
    pieces: dict[str, list[Piece]] = {}
    for batch in batches:
        rows, columns, lists = batch["row"].to_numpy(), batch["column"].to_numpy(), batch["values"]
        offsets, values = lists.offsets.to_numpy(), lists.values
        if values.null_count:
            raise UnusableDeltaError("column values of a rows file contains a list with null")
        values = values.to_numpy()
        for name, places in select_tables(batch, schema.tables):
            spans = columns[places].astype(np.int64) << 32 | np.diff(offsets)[places]
            for column, width in (divmod(span, 1 << 32) for span in np.unique(spans).tolist()):
                dim = schema.tables[name].dim
                if column < 0 or width < 1 or column + width > dim:
                    raise UnusableDeltaError(
                        f"columns [{column}, {column + width}) are not columns of table {name}, whose dim is {dim}"
                    )
                chosen = places[spans == (column << 32 | width)]
                piece = np.lib.stride_tricks.sliding_window_view(values, width)[offsets[chosen]]
                pieces.setdefault(name, []).append((column, rows[chosen], piece))
    return pieces


def _join_tables(batches: list[pa.RecordBatch], schema: Schema) -> dict[str, RowChanges]:
    return {name: _join_rows(name, schema, pieces) for name, pieces in _split_rows(batches, schema).items()}


def _join_rows(table: str, schema: Schema, pieces: list[Piece]) -> RowChanges:
    """Join the pieces of a table into complete rows in ascending order, and check the rows."""
    all_rows = np.unique(np.concatenate([rows for _, rows, _ in pieces]))
    _check_range(table, all_rows, schema.tables[table].rows)
    values = np.empty((len(all_rows), schema.tables[table].dim), np.float32)
    is_set = np.zeros(values.shape, bool)
    for column, rows, piece in pieces:
        span, places = slice(column, column + piece.shape[1]), np.searchsorted(all_rows, rows)
        if len(np.unique(rows)) < len(rows) or is_set[places, span].any():
            raise UnusableDeltaError(f"a row of table {table} has two values for a column")
        is_set[places, span], values[places, span] = True, piece
    if not is_set.all():
        raise UnusableDeltaError(f"row {all_rows[~is_set.all(1)][0]:,} of table {table} has no values for some columns")
    if not np.isfinite(values).all():
        row = all_rows[~np.isfinite(values).all(1)][0]
        raise UnusableDeltaError(f"row {row:,} of table {table} contains NaN or infinity")
    return RowChanges(torch.from_numpy(all_rows), torch.from_numpy(values))


def _read_ids(batches: list[pa.RecordBatch], schema: Schema) -> dict[str, IdChanges]:
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for batch in batches:
        has_id, ids = batch["id"].is_valid().to_numpy(zero_copy_only=False), batch["id"].fill_null(0).to_numpy()
        for name, places in select_tables(batch, schema.tables):
            if schema.tables[name].ids is None:
                raise UnusableDeltaError(f"table {name} has no managed ids in the export, but the delta changes ids")
            parts.setdefault(name, []).append((batch["row"].to_numpy()[places], ids[places], has_id[places]))
    changes = {}
    for name, members in parts.items():
        rows, ids, has_id = (np.concatenate(each) for each in zip(*members, strict=True))
        _check_range(name, rows, schema.tables[name].own_rows)
        if len(np.unique(rows)) < len(rows):
            raise UnusableDeltaError(f"a row of table {name} is listed twice in the changes of ids")
        changes[name] = IdChanges(*map(torch.from_numpy, (rows, ids[has_id], rows[has_id])))
    return changes


def _read_dense(batches: list[pa.RecordBatch], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dense: dict[str, torch.Tensor] = {}
    for batch in batches:
        for name, dtype, shape, values in zip(*(batch[each].to_pylist() for each in batch.schema.names), strict=True):
            old = weights.get(name)
            if old is None or name in dense:
                raise UnusableDeltaError(f"weight {name!r} is {'repeated' if name in dense else 'not in the export'}")
            expected = str(old.dtype).removeprefix("torch."), list(old.shape), old.nbytes
            if (dtype, shape, len(values)) != expected:
                what = f"weight {name} is {dtype} {shape} in {len(values):,} bytes"
                raise UnusableDeltaError(f"{what} instead of {expected[0]} {expected[1]} in {expected[2]:,} bytes")
            dense[name] = torch.empty(old.shape, dtype=old.dtype)
            dense[name].view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(values, np.uint8)
            # A mask may contain infinity, but only where its value does not change.
            if not bool((dense[name].isfinite() | (dense[name] == old)).all()):
                raise UnusableDeltaError(f"weight {name} contains NaN, or an infinite value that the export lacks")
    if missing := sorted(weights.keys() - dense.keys()):
        raise UnusableDeltaError(f"weight {missing[0]} is missing in the delta")
    return dense


class PreparedDeltas:
    """Consecutive deltas, prepared so that applying them to a loaded model only copies values.

    Args:
        folder: Folder of deltas, for error messages.
        scorer: Scorer in the state before the first delta. Until `apply`, the scorer may score but must not change.

    Attributes:
        position: Position after the last added delta; None if no delta has been added.
    """

    def __init__(self, folder: str, scorer: Scorer):
        self._folder, self._scorer = folder, scorer
        self.position: Position | None = None
        self._rows: list[dict[str, RowChanges]] = []
        self._ids: dict[str, IdRows] = {}

    def add(self, delta: Delta) -> None:
        """Add the next delta, or raise an error and add nothing.

        Raises:
            RunError: A weight does not have the shape that a program requires, an id would have two rows, or a value
                is too large for the precision of its table (checked here only with table shards).
        """
        lookups, precisions, rows = self._scorer.lookups, self._scorer.manifest.precisions, delta.rows
        with refuse_unusable(self._folder, delta.position):
            for key, value in self._scorer.program_weights.items():
                if delta.dense[name := key.partition("/")[2]].shape != value.shape:
                    raise UnusableDeltaError(f"weight {name} does not have the shape {[*value.shape]} of {key}")
            ids = {name: self._ids.get(name, lookups.ids[name]) for name in delta.ids}
            ids = {name: ids[name].replace(*each) for name, each in delta.ids.items()}
            if lookups.is_remote:  # a shard that refuses this delta also refuses all later deltas
                for name, each in rows.items():
                    encode_rows(name, each, PRECISIONS[precisions[name]])
                rows = {name: RowChanges(each.rows, torch.empty(0)) for name, each in rows.items()}
        self._ids |= ids
        self._rows.append(rows)
        self._dense, self.position = delta.dense, delta.position

    def finish(self) -> None:
        """Prepare the rows of all added deltas, of which there must be at least one.

        Raises:
            RunError: A value is too large for the precision of its table, the tables cannot be made writable, or a
                table shard cannot apply the deltas.
            UnavailableError: A table shard does not have the new state.
            OutdatedStateError: A table shard keeps only later states.
        """
        with refuse_unusable(self._folder, self.position):
            update = self._scorer.lookups.prepare_update
            self._update_rows = update(self._rows, self.position.version, self.position.number)

    def apply(self) -> None:
        """Change the scorer to the last state. Call this method after `finish`, and only in the thread that scores."""
        self._update_rows()
        self._scorer.update(self.position.manifest.step, self.position.version, self._ids, self._dense)
