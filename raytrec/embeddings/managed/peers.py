"""What ranks tell one another about managed ids; a rank by itself tells nobody."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Peers:
    """The ranks that share keys. All methods but those of `alone` are collectives.

    Args:
        alone: only this process; default: the default process group, where there is one.
    """

    def __init__(self, alone: bool = False):
        together = dist.is_initialized() and not alone
        self.world, self.rank = (dist.get_world_size(), dist.get_rank()) if together else (1, 0)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[n, ...], of one shape on all ranks → [ranks, n, ...]."""
        if self.world == 1:
            return values.unsqueeze(0)
        out = values.new_empty(self.world, *values.shape)
        dist.all_gather_into_tensor(out.view(-1), values.contiguous().view(-1))
        return out

    def concatenate(self, values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """[n, ...] of each rank, one after the other.

        Args:
            sizes: each rank's n, which all know.
        """
        if self.world == 1 or not sum(sizes):
            return values
        padded = values.new_zeros(max(sizes), *values.shape[1:])
        padded[: len(values)] = values
        gathered = self.gather(padded)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; changes what it is given."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def exchange(self, values: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Consecutive parts of [n, ...] to the ranks in their order; what those have sent, in their order.

        Args:
            sent, received: the length of each rank's part.
        """
        if self.world == 1:
            return values
        out = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(out, values.contiguous(), received, sent)
        return out
