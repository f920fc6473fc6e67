"""What ranks exchange for metrics: rows, to the ranks that they belong to, and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

AT_ONCE = 1 << 20  # rows of a rank that an exchange holds on the device


class Exchange:
    """The collectives of metrics. Tensors stay where they are; NCCL, which reads no host memory, is given
    copies.

    Args:
        device: that the process group communicates over.
        at_once: rows that `send` holds on that device at a time.
    """

    def __init__(self, device: torch.device, at_once: int = AT_ONCE):
        self.device, self._at_once = device, at_once
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

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
        came: list[list[torch.Tensor]] = [[] for _ in columns]
        for start in range(0, int(self.most(len(ranks_N))), self._at_once):
            here = slice(start, start + self._at_once)
            order = ranks_N[here].argsort(stable=True)
            outgoing = ranks_N[here].bincount(minlength=self.world).to(self.device)
            incoming = torch.empty_like(outgoing)
            dist.all_to_all_single(incoming, outgoing)
            sizes = incoming.tolist(), outgoing.tolist()
            for column, parts in zip(columns, came, strict=True):
                given = column[here][order].to(self.device)
                taken = torch.empty(sum(sizes[0]), dtype=given.dtype, device=self.device)
                dist.all_to_all_single(taken, given, *sizes)
                parts.append(taken.to(column.device))
        return [
            torch.cat(parts) if parts else column[:0] for column, parts in zip(columns, came, strict=True)
        ]

    def gather(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows of all ranks, rank after rank, on each of them.

        Args:
            columns: [N, …] each, of any dtypes; N may differ between ranks.
        """
        counts = self.stack(torch.tensor([len(columns[0])])).flatten().tolist()
        whole = []
        for column in columns:
            padded = column.new_zeros(max(counts), *column.shape[1:], device=self.device)
            padded[: len(column)] = column.to(self.device)
            parts = [torch.empty_like(padded) for _ in counts]
            dist.all_gather(parts, padded)
            whole.append(
                torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)]).to(column.device)
            )
        return whole

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in host memory."""
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.cpu()

    def most(self, value: float) -> float:
        """The largest of the ranks' numbers."""
        return float(self.stack(torch.tensor([value], dtype=torch.float64)).max())

    def stack(self, values: torch.Tensor) -> torch.Tensor:
        """What each rank gives, [ranks, …] in host memory; of one shape and dtype on all of them."""
        mine = values.to(self.device).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return torch.stack(parts).cpu()

    def tell(self, value: Any) -> list[Any]:
        """What each rank says; small Python values."""
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, value)
        return said


class Alone(Exchange):
    """The same where all rows are in this process; no process group is needed."""

    def __init__(self) -> None:
        self.device, self.rank, self.world = torch.device("cpu"), 0, 1

    def add(self, values: torch.Tensor) -> torch.Tensor:
        return values.cpu()

    def most(self, value: float) -> float:
        return value

    def stack(self, values: torch.Tensor) -> torch.Tensor:
        return values.cpu().unsqueeze(0)

    def tell(self, value: Any) -> list[Any]:
        return [value]


def rank_of(keys_N: torch.Tensor, world: int) -> torch.Tensor:
    """The rank that a key belongs to, int64 [N]: keys that have something in common are spread evenly."""
    return (mix(keys_N) >> 8) % world


def mix(keys_N: torch.Tensor) -> torch.Tensor:
    """A hash of each key, int64 [N] ≥ 0.

    Source: the finalizer of MurmurHash3 (A. Appleby), on 64 bits that wrap around.
    """
    for factor in (-49064778989728563, -4265267296055464877):
        keys_N = (keys_N ^ ((keys_N >> 33) & 0x7FFFFFFF)) * factor
    return (keys_N ^ (keys_N >> 33)) & 0x7FFFFFFFFFFFFFFF
