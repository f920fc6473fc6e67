"""Spans of input files, and the order in which ranks predict them.

A file is cut into spans, which consist of complete row groups (or pieces of large row groups). A span is written when
all of its rows have been predicted, and is predicted again from its first row after a failure. All spans are assigned
to ranks, including spans that are already done, and a batch never contains rows of two spans. With the same number of
ranks, a row is therefore always at the same position of the same batch on the same rank. Its score is bitwise
identical, regardless of interruptions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby, zip_longest

from raytrec.data.fragments import Dataset
from raytrec.data.order import LaneItem, Order, Part

MIN_SPAN_ROWS = 65_536  # minimum number of rows in a span, except the last span of a file
MIN_SPAN_BATCHES = 8  # minimum number of batches in a span, which limits the share of padding in the last batch


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
    """Return the spans of a dataset, in the order of its rows.

    Args:
        dataset: Dataset to cut into spans.
        batch_rows: Maximum number of rows in one rank's batch.
        span_rows: Minimum number of rows in a span; see MIN_SPAN_ROWS.
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
    """Return the spans of each rank. A span is assigned to the rank with the fewest batches so far."""
    dealt: list[list[Span]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for span in spans:
        load, rank = heappop(loads)
        dealt[rank].append(span)
        heappush(loads, (load - (-span.rows // batch_rows), rank))
    return dealt


class SpanOrder:
    """Order in which ranks read their spans. It has the methods of data.order.Order that Stream calls.

    All ranks take as many steps as the rank with the most batches. Every batch is padded to `batch_rows` rows.

    Args:
        dealt: Remaining spans of each rank.
        batch_rows: Maximum number of rows in one rank's batch.
    """

    def __init__(self, dealt: list[list[Span]], batch_rows: int):
        self.rank_spans, self.batch_rows = dealt, batch_rows
        self._sizes = [_list_batch_sizes(spans, batch_rows) for spans in dealt]
        self._whole = [sum(sizes) for sizes in zip_longest(*self._sizes, fillvalue=0)]

    def steps(self, rows: int | None = None) -> int:
        """Return the number of steps that all ranks take."""
        return len(self._whole)

    def local_rows(self, rank: int, step: int) -> int:
        """Return the number of rows in a rank's batch at a step; 0 if the rank has finished its spans."""
        sizes = self._sizes[rank]
        return sizes[step] if step < len(sizes) else 0

    def global_rows(self, rows: int | None, step: int) -> int:
        """Return the total number of rows in the batches of all ranks at a step."""
        return self._whole[step]

    def shares(self, rows: int | None, step: int, rank: int, world: int) -> list[tuple[int, int]]:
        """Return [(0, number of rows in the rank's batch)], because lane 0 is the only lane."""
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
