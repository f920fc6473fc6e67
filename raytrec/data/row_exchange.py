"""Exchange the rows of a global batch between ranks, so that every rank's rows have about the same total cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from raytrec.config.features import Features
from raytrec.data.canonical import take_rows
from raytrec.data.read_plans import ResolvedReadPlan
from raytrec.data.row_slices import JoinedRows, Rows

EXPONENTS = {"length": 1, "squared_length": 2}  # value of data.balance → exponent of a row's number of ids
CLOSE_INTERVAL_S = 0.1  # interval at which a waiting exchange checks whether its stream has been closed


class RowExchange:
    """Collective that moves the rows of a global batch to the ranks that `assign_rows` selects.

    All ranks must construct the exchange together, in their main threads. The threads of the training stream
    call `exchange`. The assignment depends only on the global batch and the number of ranks, so it does not change if a
    run resumes with as many ranks. No rank gets more than the padded number of rows.

    Args:
        balance: Value of data.balance, a key of EXPONENTS.
        form: Resolved read plan of the rows.
        features: Features of the run; ids beyond the maximum length of a sequence have no cost.
    """

    def __init__(self, balance: str, form: ResolvedReadPlan, features: Features):
        self._exponent, self._waiting = EXPONENTS[balance], set[int]()
        self._max_lengths = {f"ids.{name}": features.sequences.get(name) for name in form.bags}
        # Two consecutive epochs are read at the same time, in separate threads. The timeout is long, because a
        # rank may wait for another rank during a whole evaluation. The coordinator detects hangs.
        self._groups = [dist.new_group(backend="gloo", timeout=timedelta(days=1)) for _ in range(2)]
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    @property
    def is_waiting(self) -> bool:
        """Return True while a thread of this rank waits for other ranks in `exchange`."""
        return bool(self._waiting)

    def exchange(self, pieces: list[Rows], max_rows: int, epoch: int, is_closed: Callable[[], bool]) -> list[Rows]:
        """Return the rows of a global batch that are assigned to this rank, as slices of new chunks.

        This is a collective operation: every rank must call it for each batch.

        Args:
            pieces: Rows that this rank has read.
            max_rows: Maximum number of rows per rank, before and after the exchange; the same on all ranks.
            epoch: Epoch of the rows.
            is_closed: Function that returns True if the stream has been closed.

        Raises:
            RuntimeError: The stream has been closed, or a collective failed, e.g. because another rank has ended.
        """
        own_costs, costs = torch.full((max_rows,), -1), torch.empty(self._world * max_rows, dtype=torch.int64)
        joined, rows = JoinedRows(pieces), sum(map(len, pieces))
        if rows:
            lengths = (joined.lengths(name).clip(max=longest) for name, longest in self._max_lengths.items())
            own_costs.numpy()[:rows] = sum(lengths, np.zeros(rows, np.int64)) ** self._exponent
        self._wait(is_closed, dist.all_gather_into_tensor, epoch, costs, own_costs)
        is_row = costs.numpy() >= 0
        first = int(is_row[: self._rank * max_rows].sum())
        ranks = assign_rows(costs.numpy()[is_row], self._world, max_rows)[first : first + rows]
        parts = [np.zeros(0, np.uint8)] * self._world
        if rows:
            table = pa.Table.from_batches([piece.to_batch() for piece in pieces])
            parts = [_pack(take_rows(table, (ranks == rank).nonzero()[0])) for rank in range(self._world)]
        sent = torch.tensor([len(part) for part in parts])
        received = torch.empty_like(sent)
        self._wait(is_closed, dist.all_to_all_single, epoch, received, sent)
        sizes, incoming = received.tolist(), torch.empty(int(received.sum()), dtype=torch.uint8)
        outgoing = torch.from_numpy(np.concatenate(parts))
        self._wait(is_closed, dist.all_to_all_single, epoch, incoming, outgoing, sizes, sent.tolist())
        tables = [pa.ipc.open_stream(part.numpy()).read_all() for part in incoming.split(sizes) if len(part)]
        return [Rows.of(batch) for table in tables for batch in table.to_batches()]

    def _wait(self, is_closed: Callable[[], bool], collective: Callable, epoch: int, *arguments: object) -> None:
        """Run a collective in the process group of an epoch; raise RuntimeError if the stream is closed meanwhile."""
        work = collective(*arguments, group=self._groups[epoch % 2], async_op=True)
        self._waiting.add(epoch)
        try:
            while not work.is_completed():
                if is_closed():
                    raise RuntimeError("the stream was closed during an exchange of rows")
                with suppress(RuntimeError):  # a timeout; other errors are raised below
                    work.wait(timedelta(seconds=CLOSE_INTERVAL_S))
        finally:
            self._waiting.discard(epoch)
        work.wait()


def assign_rows(costs: np.ndarray, ranks: int, max_rows: int) -> np.ndarray:
    """Assign rows to ranks so that the ranks' sums of costs are nearly equal; return each row's rank, int64 [n].

    In order of decreasing cost, each row is assigned to the rank with the smallest sum among the ranks that
    have fewer than `max_rows` rows (Graham's rule of the longest processing time).

    Args:
        costs: Cost of each row, int64 [n], n ≤ ranks · max_rows.
        ranks: Number of ranks.
        max_rows: Maximum number of rows per rank.
    """
    assigned, order = np.empty(len(costs), np.int64), np.argsort(-costs, kind="stable")
    sums = [(0, rank, max_rows) for rank in range(ranks)]  # heap of (sum of costs, rank, free rows)
    for row, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        total, rank, room = sums[0]
        assigned[row] = rank
        if room > 1:
            heapq.heapreplace(sums, (total + cost, rank, room - 1))
        else:
            heapq.heappop(sums)
    return assigned


def _pack(table: pa.Table) -> np.ndarray:
    """Return a table as an Arrow stream, uint8 [n]; empty if there are no rows."""
    sink = pa.BufferOutputStream()
    if table.num_rows:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return np.frombuffer(sink.getvalue(), np.uint8)
