"""Input of predictions: its columns that predictions carry over, and its spans. Does not import torch.

A file is cut into spans, which consist of complete row groups (or pieces of large row groups). A span is written when
all of its rows have been predicted, and is predicted again from its first row after a failure. All spans are assigned
to ranks, including spans that are already done, and a batch never contains rows of two spans. With the same number of
ranks, a row is therefore always at the same position of the same batch on the same rank. Its score is bitwise
identical, regardless of interruptions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby, zip_longest

import pyarrow as pa

from raytrec.common.errors import ConfigError, DataError, make_unknown_word_error
from raytrec.config.features import resolve_input_columns, select_needed_transforms
from raytrec.config.transforms import Transform
from raytrec.data.arrow import empty_table, find_column, leaf_names, select_schema, type_at
from raytrec.data.fragments import Dataset, read_footer
from raytrec.data.order import LaneItem, Order, Part
from raytrec.data.pages.decode import decode_columns
from raytrec.data.transform import Draw, apply_transforms

MAX_CACHED_SCHEMAS = 8  # maximum number of files whose schemas are cached
MIN_SPAN_ROWS = 65_536  # minimum number of rows in a span, except the last span of a file
MIN_SPAN_BATCHES = 8  # minimum number of batches in a span, which limits the share of padding in the last batch


@dataclass(frozen=True)
class CarriedColumns:
    """Columns that predictions carry over from their input.

    A column is read from the files or the names of their key=value folders. If neither contains the column, the
    column is created by data.transforms.

    Attributes:
        names: Column names, in order; struct fields are named as in a schema, such as `user.id`.
        transforms: Transforms of the run; only those that create one of the columns are applied.
        folders: Key in the names of key=value folders → type of its values; each file must be in folders of all keys.
        code: Folder from which modules of transforms can be imported, in addition to Python's path; None: no folder.
    """

    names: tuple[str, ...]
    transforms: tuple[Transform, ...] = ()
    folders: Mapping[str, pa.DataType] = field(default_factory=dict)
    code: str | None = None
    _schemas: dict[str, tuple[pa.Schema, dict[str, pa.DataType]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def schema(self, uri: str) -> pa.Schema:
        """Return the schema of the carried columns of a file, without dictionary types; empty without columns.

        Raises:
            DataError: The file cannot be read, a column or an input of its transforms does not exist or exists twice,
                or a transform fails.
        """
        if not self.names:
            return pa.schema([])
        do = "correct the file, or select other columns with --columns"
        try:
            arrow, _ = self._read_schema(uri)
            raw, created, transforms, sources = self._split_columns(arrow)
            kinds = {name: type_at(arrow, find_column(arrow, name)) for name in raw}
            inputs = select_schema(arrow, sources)
        except KeyError as error:  # a name that several columns have, or a missing input of the transforms
            expected = "one column or struct field for each carried column and each input of its transforms"
            raise DataError(error.args[0], where=uri, expected=expected, do=do) from None
        if created:
            outputs = apply_transforms(empty_table(inputs), transforms, uri, self.code)
            kinds |= {name: outputs.schema.field(name).type for name in created}
        if missing := [name for name in self.names if name not in kinds]:
            what = f"column '{missing[0]}' does not exist in the input"
            raise make_unknown_word_error(what, missing[0], leaf_names(arrow), uri, do=do, kind=DataError)
        return pa.schema([(name, _unwrap_dictionary(kinds[name])) for name in self.names])

    def read(self, part: Part) -> pa.Table:
        """Read the carried columns of a part of a row group, with the types of `schema`.

        Raises:
            DataError: As for `schema`, or a column cannot be decoded.
        """
        schema, (arrow, folders) = self.schema(part.path), self._read_schema(part.path)
        raw, created, transforms, sources = self._split_columns(arrow)
        names = list(dict.fromkeys([*raw, *sources]))
        table = decode_columns(part.path, part.group, part.first, part.rows, names, folders)
        columns = {name: table[name] for name in raw}
        if created:
            where, draw = f"{part.path}, row group {part.group}", Draw(first=part.number)
            outputs = apply_transforms(table.select(sources), transforms, where, self.code, draw)
            columns |= {name: outputs[name] for name in created}
        return pa.table([columns[name].cast(schema.field(name).type) for name in schema.names], schema)

    def _read_schema(self, uri: str) -> tuple[pa.Schema, dict[str, pa.DataType]]:
        """Return the schema of a file with the columns from its folders, and name → type of the columns from folders.

        Raises:
            DataError: The file cannot be read.
            AmbiguousColumnError: Several columns have the name of a folder's key.
        """
        if uri not in self._schemas:
            if len(self._schemas) >= MAX_CACHED_SCHEMAS:
                self._schemas.clear()
            arrow = read_footer(uri).schema.to_arrow_schema()
            added = {name: kind for name, kind in self.folders.items() if find_column(arrow, name) is None}
            self._schemas[uri] = pa.schema([*arrow, *map(pa.field, added, added.values())]), added
        return self._schemas[uri]

    def _split_columns(self, arrow: pa.Schema) -> tuple[list[str], list[str], tuple[Transform, ...], list[str]]:
        """Return (columns that a file or its folders contain, columns that transforms create, transforms, inputs)."""
        written = {name for transform in self.transforms for name in transform.writes}
        raw = [name for name in self.names if find_column(arrow, name) is not None]
        created = [name for name in self.names if name not in raw and name in written]
        transforms = select_needed_transforms(self.transforms, created)
        return raw, created, transforms, resolve_input_columns(transforms, created)


def _unwrap_dictionary(kind: pa.DataType) -> pa.DataType:
    """Return the value type of a dictionary type, so that all parts of a file have the same type; keep other types."""
    return _unwrap_dictionary(kind.value_type) if pa.types.is_dictionary(kind) else kind


def split_names(column_options: Sequence[str]) -> list[str]:
    """Return the column names in the values of --columns; a value contains one or more names, separated by commas."""
    return [name.strip() for each in column_options for name in each.split(",") if name.strip()]


def choose_columns(requested_columns: Sequence[str] | None, carry: Sequence[str], scores: Sequence[str]) -> list[str]:
    """Return the names of the columns to carry over.

    Args:
        requested_columns: Values of --columns (see `split_names`); None: `carry` is returned; []: no columns.
        carry: Default columns, which are data.reserve_columns of the run.
        scores: Names of the score columns.

    Raises:
        ConfigError: A column is named twice, or has the name of a score column.
    """
    names = list(carry) if requested_columns is None else split_names(requested_columns)
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"column '{min(repeated)}' is repeated", where="--columns", expected="unique names")
    if conflicts := set(names) & set(scores):
        raise ConfigError(
            f"column '{min(conflicts)}' conflicts with an output column of the same name",
            where="data.reserve_columns" if requested_columns is None else "--columns",
            expected=f"names other than {', '.join(scores)}",
            do="select only other columns with --columns ('' selects no columns)",
        )
    return names


@dataclass(frozen=True)
class Span:
    """Rows [first, first + rows) of a file.

    Attributes:
        path: Path of the file.
        first: Index of the first row in the file.
        rows: Number of rows.
        parts: Parts of row groups that contain the rows, in order.
        num_file_rows: Number of rows in the file.
    """

    path: str
    first: int
    rows: int
    parts: tuple[Part, ...]
    num_file_rows: int

    @property
    def is_whole(self) -> bool:
        """Return True if the span contains all rows of its file."""
        return self.rows == self.num_file_rows


def cut_spans(dataset: Dataset, batch_rows: int, span_rows: int = MIN_SPAN_ROWS) -> list[Span]:
    """Return the spans of a dataset, in the order of its rows; a file without rows has no span.

    Args:
        dataset: Dataset to cut into spans.
        batch_rows: Maximum number of rows in one rank's batch.
        span_rows: Minimum number of rows in a span, except the last of a file; MIN_SPAN_BATCHES batches if larger.
    """
    min_rows = max(span_rows, MIN_SPAN_BATCHES * batch_rows)
    all_pieces, spans = Order.evaluation(batch_rows, 1).pieces(dataset), []
    for path, of_file in groupby(all_pieces, key=lambda piece: piece.path):
        pieces, first, rows, parts = list(of_file), 0, 0, []
        file_rows = sum(piece.rows for piece in pieces)
        for number, piece in enumerate(pieces):
            rows += piece.rows
            parts.append(piece)
            if rows >= min_rows or number == len(pieces) - 1:
                spans.append(Span(path, first, rows, tuple(parts), file_rows))
                first, rows, parts = first + rows, 0, []
    return spans


def assign_spans(spans: Iterable[Span], world: int, batch_rows: int) -> list[list[Span]]:
    """Return the spans of each rank: in order, each span is assigned to the rank with the fewest batches so far.

    Args:
        spans: Spans to assign.
        world: Number of ranks; of several with the fewest batches, the lowest rank gets the span.
        batch_rows: Maximum number of rows in one rank's batch.
    """
    dealt: list[list[Span]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for span in spans:
        load, rank = heappop(loads)
        dealt[rank].append(span)
        heappush(loads, (load - (-span.rows // batch_rows), rank))
    return dealt


class SpanOrder:
    """Order in which ranks read their spans, with the methods of data.order.Order that data.stream.Stream calls.

    All ranks take as many steps as the rank with the most batches. Every batch is padded to `batch_rows` rows. The
    methods ignore the arguments `rows`, `dataset`, `epoch`, `world` and `start_step`: predictions begin at step 0.

    Args:
        dealt: Remaining spans of each rank.
        batch_rows: Maximum number of rows in one rank's batch.
    """

    def __init__(self, dealt: list[list[Span]], batch_rows: int):
        self.rank_spans, self.batch_rows = dealt, batch_rows
        self._sizes = [_list_batch_sizes(spans, batch_rows) for spans in dealt]
        self._whole = [sum(sizes) for sizes in zip_longest(*self._sizes, fillvalue=0)]

    def steps(self, rows: int | None = None) -> int:
        """Return the number of steps that all ranks take; 0 if no span remains."""
        return len(self._whole)

    def local_rows(self, rank: int, step: int) -> int:
        """Return the number of rows in a rank's batch at a step; 0 if the rank has finished its spans."""
        sizes = self._sizes[rank]
        return sizes[step] if step < len(sizes) else 0

    def global_rows(self, rows: int | None, step: int) -> int:
        """Return the total number of rows in the batches of all ranks at a step."""
        return self._whole[step]

    def shares(self, rows: int | None, step: int, rank: int, world: int) -> list[tuple[int, int]]:
        """Return [(0, number of rows in the rank's batch)]: the rank has one lane (data/order.py), number 0."""
        return [(0, self.local_rows(rank, step))]

    def padded_rows(self, rows: int | None, step: int, world: int) -> int:
        """Return the number of rows to which every rank pads its batch."""
        return self.batch_rows

    def items(self, dataset: Dataset, epoch: int, rank: int, world: int, start_step: int = 0) -> list[LaneItem]:
        """Return the items that a rank reads, in order, with one item per part of a row group."""
        return [LaneItem(0, 0, (part,), None) for span in self.rank_spans[rank] for part in span.parts]


def _list_batch_sizes(spans: list[Span], batch_rows: int) -> list[int]:
    """Return the number of rows in each batch of some spans. A batch contains rows of a single span."""
    return [min(batch_rows, span.rows - start) for span in spans for start in range(0, span.rows, batch_rows)]


def select_remaining(dealt: list[list[Span]], done: Collection[Span]) -> list[list[Span]]:
    """Return the spans of each rank that are not in `done`."""
    return [[span for span in spans if span not in done] for spans in dealt]
