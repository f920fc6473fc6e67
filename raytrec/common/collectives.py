"""Collectives between ranks: rows to owners and back, gathers, sums.

This module imports torch; the driver does not import it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

AT_ONCE = 1 << 20  # rows of a rank that `send` holds on the device


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device that this rank's collectives take, with an index, as tensors have one: of NCCL its GPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Peers:
    """The ranks of a run. All methods are collectives, which every rank calls in the same order; a process
    without others exchanges nothing.

    Results lie where the values lay. Values travel over `device`, since NCCL reads no host memory.

    Args:
        device: that the process group communicates over; default: `device_of` the group.
        at_once: rows that `send` holds on that device at a time.
        alone: only this process; default: the ranks of the group, where one has been initialized.
        group: of these ranks; default: the default process group.

    Attributes:
        rank, world: of this process; the number of ranks.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        at_once: int = AT_ONCE,
        alone: bool = False,
        group: dist.ProcessGroup | None = None,
    ):
        together = dist.is_initialized() and not alone
        self.world, self.rank = (dist.get_world_size(group), dist.get_rank(group)) if together else (1, 0)
        self.device = device or (device_of(group) if together else None)
        self._at_once, self._group = at_once, group

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of [...], of one shape and dtype on all of them."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def sum_own(self, values: torch.Tensor) -> torch.Tensor:
        """[ranks, ...] of one shape and dtype on all of them → [...], this rank's part of the sum."""
        if self.world == 1:
            return values[0]
        mine = self._travelling(values)
        own = torch.empty_like(mine[0])
        dist.reduce_scatter_single(own.view(-1), mine.view(-1), group=self._group)
        return own.to(values.device)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over ranks of [...], of one shape and dtype on all of them."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        return float(self.max(torch.tensor(number, dtype=torch.float64, device=self.device)))

    def same(self, value: Any) -> bool:
        """Whether a plain value is the same on all ranks, by a hash of its text."""
        digest = hashlib.sha256(repr(value).encode()).digest()
        number = int.from_bytes(digest[:8], signed=True)
        most, least = self.max(torch.tensor([number, ~number], device=self.device)).tolist()
        return most == ~least

    def stack(self, values: torch.Tensor) -> torch.Tensor:
        """[...] of one shape and dtype on all ranks → [ranks, ...]."""
        if self.world == 1:
            return values.unsqueeze(0)
        mine = self._travelling(values)
        everyone = mine.new_empty(self.world, *mine.shape)
        dist.all_gather_into_tensor(everyone.view(-1), mine.view(-1), group=self._group)
        return everyone.to(values.device)

    def gather(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows of all ranks, rank after rank.

        Args:
            columns: [N, ...] each, of any dtypes; N may differ between ranks.
        """
        if self.world == 1:
            return list(columns)
        sizes = self.stack(torch.tensor([len(columns[0])], device=columns[0].device)).flatten().tolist()
        return [self.concatenate(column, sizes) for column in columns]

    def concatenate(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The same of one column, where all ranks know each rank's N.

        Args:
            sizes: N of each rank.
        """
        if self.world == 1 or not sum(sizes):
            return values
        padded = values.new_zeros(max(sizes), *values.shape[1:])
        padded[: len(values)] = values
        return torch.cat([part[:size] for part, size in zip(self.stack(padded), sizes, strict=True)])

    def join(self, values: torch.Tensor, sizes_WT: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The same of values that belong to tables: of each table, those of all ranks.

        Args:
            values: [n, ...], those of a table together.
            sizes_WT: of each rank, how many each table has.
        """
        of_ranks = [sum(of_rank) for of_rank in sizes_WT]
        of_tables = [sum(of_table) for of_table in zip(*sizes_WT, strict=True)]
        if self.world > 1 and sum(of_ranks):
            everything = self.concatenate(values, of_ranks)
            values = everything[regrouped(on_device(sizes_WT, values.device), sum(of_ranks))]
        return list(values.split(of_tables))

    def union(self, keys: torch.Tensor) -> torch.Tensor:
        """The keys of all ranks, int64 [n] each: sorted, each once. Nothing is padded for ranks with few."""
        mine = keys.unique()
        if self.world == 1:
            return mine
        ends = self.stack(torch.tensor([len(mine)], device=mine.device)).cumsum(0).flatten().tolist()
        everyone = mine.new_zeros(ends[-1])
        everyone[ends[self.rank] - len(mine) : ends[self.rank]] = mine
        return self.sum(everyone).unique()

    def send(self, columns: Sequence[torch.Tensor], ranks_N: torch.Tensor) -> list[torch.Tensor]:
        """Every row to a rank.

        Args:
            columns: [N] each, of any dtypes.
            ranks_N: int64, the rank of each row.

        Returns:
            The same columns of the rows that have come to this rank.
        """
        if self.world == 1:
            return list(columns)
        came: list[list[torch.Tensor]] = [[column[:0]] for column in columns]
        for start in range(0, int(self.largest(len(ranks_N))), self._at_once):
            here = slice(start, start + self._at_once)
            order, counts = ranks_N[here].argsort(stable=True), ranks_N[here].bincount(minlength=self.world)
            sizes = counts.tolist(), self.transpose(counts).tolist()
            for column, parts in zip(columns, came, strict=True):
                parts.append(self.exchange(column[here][order], *sizes))
        return [torch.cat(parts) for parts in came]

    def transpose(self, values: torch.Tensor) -> torch.Tensor:
        """[ranks, ...], a part for each rank → [ranks, ...], the part of each rank for this one."""
        return self.exchange(values, [1] * self.world, [1] * self.world)

    def exchange(self, values: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Consecutive parts of [n, ...] to the ranks in their order; the ranks' parts, in their order.

        Args:
            sent, received: the length of each rank's part.
        """
        if self.world == 1:
            return values
        mine = self._travelling(values)
        arrived = mine.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(arrived, mine, received, sent, group=self._group)
        return arrived.to(values.device)

    def objects(self, value: Any) -> list[Any]:
        """The small Python values of all ranks: to name ranks and texts, never for numbers of rows."""
        if self.world == 1:
            return [value]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def _travelling(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device).contiguous()

    def _reduce(self, values: torch.Tensor, how: Any) -> torch.Tensor:
        if self.world == 1:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, how, group=self._group)
        return total.to(values.device)


class RoundTrip:
    """Values of several tables to the ranks that own them, and the answers back; one exchange each way.

    Args:
        values: [n, ...], those of a table together, in the order of the ranks that they go to.
        sent_TW: of each table, how many go to each rank: int64 [tables, ranks].

    Attributes:
        received: values [m, ...] of all ranks, those of a table together, in the ranks' order.
        tables: int64 [m], the number of the table of each.
    """

    def __init__(self, values: torch.Tensor, sent_TW: torch.Tensor, peers: Peers):
        self._peers = peers
        received_WT = peers.transpose(sent_TW.T)
        both = torch.stack([sent_TW.sum(0), received_WT.sum(1)])
        self._sent, self._received = both.tolist()  # at once: the host waits for a GPU here
        self._by_rank, of_all = regrouped(sent_TW, sum(self._sent)), sum(self._received)
        self._by_table = regrouped(received_WT, of_all)
        arrived = peers.exchange(values[self._by_rank], self._sent, self._received)
        self.received = arrived[self._by_table]
        numbers = torch.arange(len(sent_TW), device=values.device)
        self.tables = numbers.repeat_interleave(received_WT.sum(0), output_size=of_all)

    def back(self, answers: torch.Tensor) -> torch.Tensor:
        """The answers to what this rank has sent, in the order of its values.

        Args:
            answers: [m], in the order of `received`.
        """
        by_rank = torch.empty_like(answers)
        by_rank[self._by_table] = answers
        arrived = self._peers.exchange(by_rank, self._received, self._sent)
        by_table = torch.empty_like(arrived)
        by_table[self._by_rank] = arrived
        return by_table


def regrouped(sizes_AB: torch.Tensor, total: int) -> torch.Tensor:
    """Places of values that stand in groups a, and within them in groups b, in the order of b, and within
    them of a: int64 [Σ sizes].

    Args:
        sizes_AB: how many values each group has. total: all.
    """
    flat = sizes_AB.flatten()
    starts_BA = (flat.cumsum(0) - flat).view(sizes_AB.shape).T.flatten()
    sizes_BA = sizes_AB.T.flatten()
    shifts = starts_BA - (sizes_BA.cumsum(0) - sizes_BA)
    return shifts.repeat_interleave(sizes_BA, output_size=total) + torch.arange(total, device=flat.device)


def on_device(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Integers, nested or not, as a tensor: int64 [...]. From page-locked memory, so that the host does not
    wait for a GPU."""
    made = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)
