"""Which rows a rank predicts at which step: spans of files.

A file is cut into spans of whole row groups (large ones in pieces); a span is what is written, and done
again after a failure, as a whole. Spans are dealt to the ranks once, whichever of them are done already, and
a batch never holds rows of two: so a row is always at the same place of the same batch, on the same rank, and
its score is the same to the last bit, however often the work was interrupted (with as many ranks as before).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby, zip_longest

from raytrec.data.fragments import Dataset
from raytrec.data.order import Item, Order, Part

SPAN_ROWS = 65_536  # of a span, at least, where its file has so many
SPAN_BATCHES = 8  # likewise: what its last batch lacks is padding


@dataclass(frozen=True)
class Span:
    """Rows [first, first + rows) of a file.

    Attributes:
        path: of the file.
        parts: those rows, in order.
        of_file: rows of the whole file.
    """

    path: str
    first: int
    rows: int
    parts: tuple[Part, ...]
    of_file: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its file."""
        return self.rows == self.of_file


def cut_spans(dataset: Dataset, batch_rows: int, span_rows: int = SPAN_ROWS) -> list[Span]:
    """A dataset's spans, in the order of its rows.

    Args:
        batch_rows: rows of one rank's batch.
        span_rows: see SPAN_ROWS.
    """
    least = max(span_rows, SPAN_BATCHES * batch_rows)
    all_pieces, spans = Order.evaluation(batch_rows, 1).pieces(dataset), []
    for path, of_file in groupby(all_pieces, key=lambda piece: piece.path):
        pieces, first, rows, parts = list(of_file), 0, 0, []
        whole = sum(piece.rows for piece in pieces)
        for number, piece in enumerate(pieces):
            rows += piece.rows
            parts.append(piece)
            if rows >= least or number == len(pieces) - 1:
                spans.append(Span(path, first, rows, tuple(parts), whole))
                first, rows, parts = first + rows, 0, []
    return spans


def deal(spans: Iterable[Span], world: int, batch_rows: int) -> list[list[Span]]:
    """Each rank's spans: the next one goes to the rank with the fewest batches so far."""
    dealt: list[list[Span]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for span in spans:
        load, rank = heappop(loads)
        dealt[rank].append(span)
        heappush(loads, (load - (-span.rows // batch_rows), rank))
    return dealt


class SpanOrder:
    """The order in which ranks read their spans; what Stream asks of an Order (raytrec/data/order.py).

    All ranks take as many steps as the one with the most batches. Every batch is padded to `batch_rows`.

    Args:
        dealt: each rank's spans that are still to do.
        batch_rows: rows of one rank's batch, at most.
    """

    def __init__(self, dealt: list[list[Span]], batch_rows: int):
        self.dealt, self.batch_rows = dealt, batch_rows
        self._sizes = [_batch_sizes(spans, batch_rows) for spans in dealt]
        self._whole = [sum(sizes) for sizes in zip_longest(*self._sizes, fillvalue=0)]

    def steps(self, rows: int | None = None) -> int:
        """Steps of all spans."""
        return len(self._whole)

    def local_rows(self, rank: int, step: int) -> int:
        """Rows of a rank's batch at a step; 0 when it has done its own."""
        sizes = self._sizes[rank]
        return sizes[step] if step < len(sizes) else 0

    def global_rows(self, rows: int | None, step: int) -> int:
        """Rows of all ranks' batches at a step."""
        return self._whole[step]

    def shares(self, rows: int | None, step: int, rank: int, world: int) -> list[tuple[int, int]]:
        """(lane, rows that the rank takes of it): there is one lane, 0."""
        return [(0, self.local_rows(rank, step))]

    def padded_rows(self, rows: int | None, step: int, world: int) -> int:
        """Rows that every rank pads its batch to."""
        return self.batch_rows

    def items(self, dataset: Dataset, epoch: int, rank: int, world: int, start_step: int = 0) -> list[Item]:
        """A rank's work, one item a part, in order."""
        return [Item(0, 0, (part,), None) for span in self.dealt[rank] for part in span.parts]


def _batch_sizes(spans: list[Span], batch_rows: int) -> list[int]:
    """Rows of each batch; none has rows of two spans."""
    return [min(batch_rows, span.rows - start) for span in spans for start in range(0, span.rows, batch_rows)]


def still_to_do(dealt: list[list[Span]], done: Collection[Span]) -> list[list[Span]]:
    """The same without what is done."""
    return [[span for span in spans if span not in done] for spans in dealt]
