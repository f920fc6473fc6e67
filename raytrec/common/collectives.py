"""Collectives between ranks: exchanges of rows, gathers and reductions.

This module imports torch, so the driver must not import it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

ROWS_PER_EXCHANGE = 1 << 20  # maximum number of rows per rank that `send` exchanges at a time


def get_collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for tensors in a group's collectives: this rank's current GPU for NCCL, else the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Peers:
    """Collectives among the ranks of a process group.

    Every rank must call the same methods in the same order. With one rank, nothing is exchanged, and results can
    share memory with the arguments. Tensors are copied to `device` for the exchange, because NCCL cannot read host
    memory, and results are copied back to the device of the arguments.

    Args:
        device: Device of the exchanged tensors; default: `get_collective_device` of the group.
        alone: True to act as a single rank, even if a process group is initialized.
        group: Process group; default: torch's default group, or a single rank if none is initialized.

    Attributes:
        rank: Rank of this process in the group.
        world: Number of ranks in the group.
        device: Device of the exchanged tensors; None for a single rank if the argument is None.
    """

    def __init__(self, device: torch.device | None = None, alone: bool = False, group: dist.ProcessGroup | None = None):
        is_grouped = dist.is_initialized() and not alone
        self.world, self.rank = (dist.get_world_size(group), dist.get_rank(group)) if is_grouped else (1, 0)
        self.device = device or (get_collective_device(group) if is_grouped else None)
        self._group = group

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over ranks of a tensor, which must have the same shape and dtype on all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def reduce_scatter_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return entry `rank` of the sum over ranks of values [ranks, ...], as a tensor [...]."""
        if self.world == 1:
            return values[0]
        sent = self._to_device(values)
        part = torch.empty_like(sent[0])
        dist.reduce_scatter_single(part.view(-1), sent.view(-1), group=self._group)
        return part.to(values.device)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum over ranks of a tensor, which must have one shape and dtype on all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def max_number(self, number: float) -> float:
        """Return the largest of the ranks' numbers."""
        return float(self.max(torch.tensor(number, dtype=torch.float64, device=self.device)))

    def is_same_on_all(self, value: Any) -> bool:
        """Return True if a value's repr has the same hash (first 64 bits of SHA-256) on all ranks."""
        digest = hashlib.sha256(repr(value).encode()).digest()
        number = int.from_bytes(digest[:8], signed=True)
        maximum, complement = self.max(torch.tensor([number, ~number], device=self.device)).tolist()
        return maximum == ~complement

    def stack(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tensors [...] of all ranks, which must have the same shape and dtype, as [ranks, ...]."""
        if self.world == 1:
            return values.unsqueeze(0)
        sent = self._to_device(values)
        gathered = sent.new_empty(self.world, *sent.shape)
        dist.all_gather_into_tensor(gathered.view(-1), sent.view(-1), group=self._group)
        return gathered.to(values.device)

    def gather(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each column with the rows of all ranks, concatenated in rank order.

        Args:
            columns: At least one tensor [N, ...]. N may differ between ranks, but not between columns. The number, the
                dtypes and the other dimensions of the columns must be the same on all ranks.
        """
        if self.world == 1:
            return list(columns)
        sizes = self.stack(torch.tensor([len(columns[0])], device=columns[0].device)).flatten().tolist()
        return [self.concatenate(column, sizes) for column in columns]

    def concatenate(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks, concatenated in rank order, given the number of rows on each rank.

        Args:
            values: This rank's rows, [N, ...].
            sizes: Number of rows on each rank, the same on all ranks.
        """
        if self.world == 1 or not sum(sizes):
            return values
        padded = values.new_zeros(max(sizes), *values.shape[1:])
        padded[: len(values)] = values
        return torch.cat([part[:size] for part, size in zip(self.stack(padded), sizes, strict=True)])

    def join(self, values: torch.Tensor, sizes_WT: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return one tensor per table with the values of all ranks, concatenated in rank order.

        Args:
            values: This rank's values [n, ...], grouped by table.
            sizes_WT: Number of values of each table on each rank, as one list per rank; the same on all ranks.
        """
        of_ranks = [sum(of_rank) for of_rank in sizes_WT]
        of_tables = [sum(of_table) for of_table in zip(*sizes_WT, strict=True)]
        if self.world > 1 and sum(of_ranks):
            gathered = self.concatenate(values, of_ranks)
            values = gathered[compute_regrouping(to_device_tensor(sizes_WT, values.device), sum(of_ranks))]
        return list(values.split(of_tables))

    def union(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the sorted distinct keys of all ranks, int64 [n]; the ranks may have different numbers of keys."""
        own_keys = keys.unique()
        if self.world == 1:
            return own_keys
        ends = self.stack(torch.tensor([len(own_keys)], device=own_keys.device)).cumsum(0).flatten().tolist()
        all_keys = own_keys.new_zeros(ends[-1])
        all_keys[ends[self.rank] - len(own_keys) : ends[self.rank]] = own_keys
        return self.sum(all_keys).unique()

    def send(self, columns: Sequence[torch.Tensor], ranks_N: torch.Tensor) -> list[torch.Tensor]:
        """Send each row to its destination rank.

        Args:
            columns: Tensors [N, ...] of any dtypes; N may differ between ranks.
            ranks_N: Destination rank of each row, int64.

        Returns:
            The received rows of each column. Each exchange of up to ROWS_PER_EXCHANGE rows per rank appends its rows
            by sending rank, in their original order.
        """
        if self.world == 1:
            return list(columns)
        received: list[list[torch.Tensor]] = [[column[:0]] for column in columns]
        for start in range(0, int(self.max_number(len(ranks_N))), ROWS_PER_EXCHANGE):
            part = slice(start, start + ROWS_PER_EXCHANGE)
            order, counts = ranks_N[part].argsort(stable=True), ranks_N[part].bincount(minlength=self.world)
            sizes = counts.tolist(), self.transpose(counts).tolist()
            for column, parts in zip(columns, received, strict=True):
                parts.append(self.exchange(column[part][order], *sizes))
        return [torch.cat(parts) for parts in received]

    def transpose(self, values: torch.Tensor) -> torch.Tensor:
        """Send entry r of values [ranks, ...] to rank r; return the entries received from all ranks, [ranks, ...]."""
        return self.exchange(values, [1] * self.world, [1] * self.world)

    def exchange(self, values: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send rows of values [n, ...] to each rank; return the rows received from all ranks, in rank order.

        Args:
            values: Rows, sorted by destination rank.
            sent: Number of rows to send to each rank.
            received: Number of rows to receive from each rank.
        """
        if self.world == 1:
            return values
        outgoing = self._to_device(values)
        incoming = outgoing.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(incoming, outgoing, received, sent, group=self._group)
        return incoming.to(values.device)

    def objects(self, value: Any) -> list[Any]:
        """Return a list of all ranks' values in rank order; the values are pickled, and should be small.

        With one rank, the list contains the value itself.
        """
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device).contiguous()

    def _reduce(self, values: torch.Tensor, how: Any) -> torch.Tensor:
        if self.world == 1:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, how, group=self._group)
        return total.to(values.device)


class RoundTrip:
    """Exchange that sends values of several tables to other ranks, and returns the replies of these ranks.

    The constructor exchanges the counts and the values; `send_answers` takes one more all-to-all. Every rank must call
    both.

    Args:
        values: Values [n, ...], grouped by table and, within a table, ordered by destination rank.
        sent_TW: Number of values to send to each rank for each table, int64 [tables, ranks].
        peers: Ranks that exchange values.

    Attributes:
        received: Values [m, ...] received from all ranks, grouped by table and, within a table, ordered by rank.
        tables: Table number of each received value, int64 [m].
    """

    def __init__(self, values: torch.Tensor, sent_TW: torch.Tensor, peers: Peers):
        self._peers = peers
        received_WT = peers.transpose(sent_TW.T)
        both = torch.stack([sent_TW.sum(0), received_WT.sum(1)])
        self._sent, self._received = both.tolist()  # one transfer, because the host waits for the GPU here
        self._by_rank, of_all = compute_regrouping(sent_TW, sum(self._sent)), sum(self._received)
        self._by_table = compute_regrouping(received_WT, of_all)
        arrived = peers.exchange(values[self._by_rank], self._sent, self._received)
        self.received = arrived[self._by_table]
        numbers = torch.arange(len(sent_TW), device=values.device)
        self.tables = numbers.repeat_interleave(received_WT.sum(0), output_size=of_all)

    def send_answers(self, answers: torch.Tensor) -> torch.Tensor:
        """Send replies to the ranks that sent the received values, and return the replies to this rank's values.

        Args:
            answers: Reply to each received value, [m], in the order of `received`.

        Returns:
            Reply to each value that this rank sent, [n], in the order of the constructor's `values`.
        """
        by_rank = torch.empty_like(answers)
        by_rank[self._by_table] = answers
        arrived = self._peers.exchange(by_rank, self._received, self._sent)
        by_table = torch.empty_like(arrived)
        by_table[self._by_rank] = arrived
        return by_table


def compute_regrouping(sizes_AB: torch.Tensor, total: int) -> torch.Tensor:
    """Return the indices, int64 [total], that reorder values grouped by (a, b) into groups ordered by (b, a).

    Args:
        sizes_AB: Number of values in each group (a, b), int64 [A, B].
        total: Sum of the sizes, so that the host need not wait for a GPU.
    """
    flat = sizes_AB.flatten()
    starts_BA = (flat.cumsum(0) - flat).view(sizes_AB.shape).T.flatten()
    sizes_BA = sizes_AB.T.flatten()
    shifts = starts_BA - (sizes_BA.cumsum(0) - sizes_BA)
    return shifts.repeat_interleave(sizes_BA, output_size=total) + torch.arange(total, device=flat.device)


def to_device_tensor(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Copy nested lists of integers to a device, as an int64 tensor; the host does not wait for a GPU."""
    tensor = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
