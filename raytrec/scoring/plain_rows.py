"""Fast reader of plain rows, i.e. rows of numbers and ids without nulls, in requests.

`PlainRowReader` reads all columns with one call, but only values that are valid and need no conversion. All other
rows, such as rows with nulls, text or invalid values, are read or rejected by `RowReader`, which defines the meaning
of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import GenericAlias
from typing import Any

import numpy as np
import pyarrow as pa

from raytrec.data.arrow import is_list, plain, unnest
from raytrec.data.column_conversion import FIRST_INEXACT_INTEGER, signed_log, standardize
from raytrec.data.read_plans import NO_MANAGED_ID
from raytrec.data.row_slices import Chunk, Rows
from raytrec.scoring.matrices import DENSE_MATRIX, ID_MATRIX, Matrices
from raytrec.scoring.request_rows import RowReader

PYTHON_TYPES: Mapping[pa.DataType, Any] = {pa.int64(): int, pa.float64(): float, pa.list_(pa.int64()): list[int]}


class PlainRowReader:
    """Reader of plain rows for one program of a model.

    Args:
        reader: General reader of the program's rows.

    Raises:
        ValueError: The model's rows are never plain: columns are transformed or of other types, features have
            weights or side features, the schema has candidates, or the program reads no columns.
        ImportError: msgspec is not installed.
    """

    def __init__(self, reader: RowReader):
        form = reader.form
        schema, types = form.schema, {field.name: PYTHON_TYPES.get(field.type) for field in reader.columns}
        columns = {name: schema.get_ids_column(name) for name in schema.sparse}
        self._dense = list(schema.dense)
        self._ids = list(dict.fromkeys(columns[name] for name in form.singles))
        self._lists = list(dict.fromkeys(columns[name] for name in form.bags))
        special = form.plan.transforms or schema.candidates or schema.has_weights or form.features_with_side_features
        is_plain = (
            all(types.get(name) in (int, float) for name in self._dense)
            and all(types.get(name) is int for name in self._ids)
            and all(types.get(name) == list[int] for name in self._lists)
        )
        if special or not types or not is_plain:
            raise ValueError("the rows of this model are not plain")
        self._form = form
        self._single_places = [self._ids.index(columns[name]) for name in form.singles]
        self._bag_places = [self._lists.index(columns[name]) for name in form.bags]
        # As unsigned numbers, negative ids exceed any number of rows. Any number is a valid managed id.
        limits = {
            name: 2**64 - 1 if (table := schema.tables[spec.table]).ids else table.rows
            for name, spec in schema.sparse.items()
        }
        self._single_limits = np.array([limits[name] for name in form.singles], np.uint64).reshape(-1, 1)
        self._bag_limits = [np.uint64(limits[name]) for name in form.bags]
        scales = [schema.scale.get(name) for name in self._dense]
        self._is_log = np.array([scale is not None and scale.log for scale in scales], bool)
        self._means = np.array([[scale.mean if scale else 0.0] for scale in scales])
        self._stds = np.array([[scale.std if scale else 1.0] for scale in scales])
        self._make_decoders(types)

    def _make_decoders(self, types: Mapping[str, Any]) -> None:
        import msgspec

        names = [*self._dense, *self._ids, *self._lists]

        def make_decoder(columns: bool) -> Any:
            kinds = [GenericAlias(list, types[name]) if columns else types[name] for name in names]
            fields = [(f"f{i}", kinds[i], msgspec.field(name=name)) for i, name in enumerate(names)]
            values = msgspec.defstruct("Values", fields, gc=False)
            entry = ("columns", values) if columns else ("rows", GenericAlias(list, values))
            return msgspec.json.Decoder(msgspec.defstruct("Body", [entry], forbid_unknown_fields=True))

        self._row_decoder, self._column_decoder = make_decoder(columns=False), make_decoder(columns=True)
        self._errors, self._as_tuple = (msgspec.MsgspecError, RecursionError), msgspec.structs.astuple
        self._convert = msgspec.convert

    def read_json(self, body: bytes, max_rows: int, max_ids: int) -> Rows | None:
        """Return the rows of a JSON request body with `rows` or `columns`.

        The result is None if the rows are not plain, there are no rows or more than `max_rows`, or a list contains more
        than `max_ids` ids. Other methods of this class use these limits in the same way.
        """
        objects, lists = body.count(b"{"), body.count(b"[")
        if b"\\" in body or objects > max_rows + 1:
            return None
        try:
            if not body.isascii():
                body.decode()  # raises an error if a column, even an ignored one, is not UTF-8
            if objects > 2 or b'"rows"' in body:
                rows = list(map(self._as_tuple, self._row_decoder.decode(body).rows))
                # Additional objects or lists are in ignored columns. The general parser limits their nesting depth.
                if len(rows) != objects - 1 or lists != 1 + len(rows) * len(self._lists) or not rows:
                    return None
                return self._read_values(rows, max_ids)
            columns = self._as_tuple(self._column_decoder.decode(body).columns)
        except (*self._errors, UnicodeDecodeError):
            return None
        count = len(columns[0])
        if lists != len(columns) + count * len(self._lists) or {len(each) for each in columns} != {count}:
            return None
        return self._read_values(list(zip(*columns, strict=True)), max_ids) if 0 < count <= max_rows else None

    def read_objects(self, rows: Sequence[Any], max_ids: int) -> Rows | None:
        """Return rows given as mappings of columns to values, or None as in `read_json`."""
        try:
            values = self._convert({"rows": rows}, self._row_decoder.type).rows
        except (*self._errors, UnicodeEncodeError):  # a name with a surrogate
            return None
        return self._read_values(list(map(self._as_tuple, values)), max_ids) if values else None

    def _read_values(self, rows: Sequence[Sequence[Any]], max_ids: int) -> Rows | None:
        """Return rows from their values, ordered as dense columns, ids and lists; None if they are not plain."""
        count, dense, ids = len(rows), len(self._dense), len(self._dense) + len(self._ids)
        try:
            numbers = np.fromiter(chain.from_iterable([row[:dense] for row in rows]), np.float64).reshape(count, -1).T
            single = np.fromiter(chain.from_iterable([row[dense:ids] for row in rows]), np.int64).reshape(count, -1).T
            lists = []
            for place in range(ids, ids + len(self._lists)):
                values = [row[place] for row in rows]
                lengths = np.fromiter(map(len, values), np.int32, len(values))
                lists.append((lengths, np.fromiter(chain.from_iterable(values), np.int64, int(lengths.sum()))))
        except OverflowError:
            return None
        return self.to_rows(numbers, single, lists, max_ids)

    def read_table(self, table: pa.Table, max_rows: int, max_ids: int) -> Rows | None:
        """Return the rows of a table, or None as in `read_json`."""
        count, names = len(table), table.column_names
        if not 0 < count <= max_rows:
            return None
        dense, ids = len(self._dense), len(self._dense) + len(self._ids)
        numbers, single = np.empty((dense, count)), np.empty((len(self._ids), count), np.int64)
        lists = []
        for place, name in enumerate((*self._dense, *self._ids, *self._lists)):
            column = table.column(name) if names.count(name) == 1 else None
            if column is None or column.null_count or column.num_chunks != 1 or plain(column.type) != column.type:
                return None
            array, kind = column.chunk(0), column.type
            if place < dense and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                numbers[place] = array.to_numpy()
            elif dense <= place < ids and pa.types.is_integer(kind) and kind != pa.uint64():
                single[place - dense] = array.to_numpy()
            elif place >= ids and is_list(kind):
                offsets, flat = unnest(array)
                if flat.null_count or not pa.types.is_integer(flat.type) or flat.type == pa.uint64():
                    return None
                lists.append((np.diff(offsets), flat.to_numpy().astype(np.int64)))
            else:
                return None
        return self.to_rows(numbers, single, lists, max_ids)

    def read_matrices(self, matrices: Matrices, max_rows: int, max_ids: int) -> Rows | None:
        """Return the rows of matrices [B, columns], or None as in `read_json` or if a column is missing."""
        empty = np.empty((max(map(len, matrices.values()), default=0), 0), np.int64)
        dense_BD, ids_BS = matrices.get(DENSE_MATRIX, empty), matrices.get(ID_MATRIX, empty)
        shapes = (len(empty), len(self._dense)), (len(empty), len(self._ids))
        if self._lists or not 0 < len(empty) <= max_rows or (dense_BD.shape, ids_BS.shape) != shapes:
            return None
        if dense_BD.dtype.kind not in "iuf" or ids_BS.dtype.kind != "i":
            return None
        return self.to_rows(dense_BD.T.astype(np.float64), ids_BS.T.astype(np.int64), [], max_ids)

    def to_rows(
        self, numbers_DB: np.ndarray, ids_SB: np.ndarray, lists: Sequence[tuple[np.ndarray, np.ndarray]], max_ids: int
    ) -> Rows | None:
        """Return rows in the canonical form of data.canonical; None if a value is not plain or a list is too long.

        Args:
            numbers_DB: Values of the dense columns, float64 [D, B].
            ids_SB: Ids of the columns with one id per row, int64 [S, B].
            lists: For each column of lists, the lengths of its lists, int32 [B], and their ids, int64 [N].
            max_ids: Maximum number of ids in a list.
        """
        count, matrices = numbers_DB.shape[1] if len(self._dense) else ids_SB.shape[1], {}
        if len(self._dense):
            dense_DB = self._scale(numbers_DB)
            if dense_DB is None:
                return None
            matrices["dense"] = dense_DB.T
        if self._single_places:
            single_SB = ids_SB if self._single_places == list(range(len(ids_SB))) else ids_SB[self._single_places]
            if not (np.ascontiguousarray(single_SB).view(np.uint64) < self._single_limits).all():
                return None
            matrices["ids"] = self._mark_managed(single_SB).T
        offsets, values = np.zeros((count + 1, len(self._bag_places)), np.int32), []
        for bag, place in enumerate(self._bag_places):
            lengths_B, ids_N = lists[place]
            if lengths_B.max(initial=0) > max_ids or not (ids_N.view(np.uint64) < self._bag_limits[bag]).all():
                return None
            np.cumsum(lengths_B, out=offsets[1:, bag])
            values.append(self._mark_managed(ids_N))
        places = {f"ids.{name}": place for place, name in enumerate(self._form.bags)}
        if self._form.accepts_out_of_range_ids:  # no id had to be clamped or hashed into range
            places["changed"] = len(places)
            offsets, values = np.pad(offsets, ((0, 0), (0, 1))), [*values, np.empty(0, np.int32)]
        matrices["lengths"] = np.diff(offsets, axis=0)
        return Rows(Chunk(matrices, places, values, offsets, None), 0, count)

    def _scale(self, numbers_DB: np.ndarray) -> np.ndarray | None:
        """Return scaled numbers as float32 [D, B]; None if a number is not finite or too large to be exact."""
        if not (np.abs(numbers_DB) < FIRST_INEXACT_INTEGER).all():  # also False for NaN
            return None
        if self._is_log.any():
            numbers_DB = numbers_DB.copy()
            numbers_DB[self._is_log] = signed_log(numbers_DB[self._is_log])
        scaled_DB = standardize(numbers_DB, self._means, self._stds)
        return scaled_DB if np.isfinite(scaled_DB).all() else None

    def _mark_managed(self, ids: np.ndarray) -> np.ndarray:
        """Return ids; if the schema has managed ids, NO_MANAGED_ID (no id) is replaced by the next greater number."""
        return np.maximum(ids, NO_MANAGED_ID + 1) if self._form.schema.managed else ids


def make_plain_reader(reader: RowReader) -> PlainRowReader | None:
    """Return a PlainRowReader, or None if the program's rows are never plain or msgspec is not installed."""
    try:
        return PlainRowReader(reader)
    except (ValueError, ImportError):
        return None
