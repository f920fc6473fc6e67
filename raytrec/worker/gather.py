"""Rows of all ranks on rank 0, and where there is room to compute with them."""

from __future__ import annotations

import torch
import torch.distributed as dist

AT_ONCE = 1 << 22  # values of a rank that a gather holds on the device: 16 MiB
AUC_BYTES = 160  # a row, at most: float64, sorted, with torchmetrics' cumulative counts


def gather_to_first(
    values: torch.Tensor, device: torch.device | None = None, at_once: int = AT_ONCE
) -> torch.Tensor | None:
    """All ranks' values, one after the other, on rank 0, where they lay; None elsewhere. A collective.

    Args:
        values: [n] of one dtype; n may differ between ranks.
        device: that they travel over, as NCCL reads no host memory; default: where they are.
        at_once: values of each rank that are on that device at a time.
    """
    device, world, first = device or values.device, dist.get_world_size(), dist.get_rank() == 0
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([values.numel()], device=device))
    counts = torch.cat(counts).tolist()
    wholes = [torch.empty(n, dtype=values.dtype, device=values.device) for n in counts] if first else []
    for start in range(0, max(counts), at_once):
        padded = torch.zeros(min(at_once, max(counts) - start), dtype=values.dtype, device=device)
        mine = values[start : start + at_once]
        padded[: mine.numel()] = mine.to(device)
        parts = [torch.empty_like(padded) for _ in counts] if first else None
        dist.gather(padded, parts)
        for whole, part in zip(wholes, parts or [], strict=True):
            there = whole[start : start + at_once]
            there.copy_(part[: there.numel()])
    return torch.cat(wholes) if first else None


def place_for(rows: int, device: torch.device, row_bytes: int = AUC_BYTES) -> torch.device:
    """Where something of so many rows is kept or computed, by default their AUC: on a GPU if half of its free
    memory is enough."""
    if device.type == "cuda" and rows * row_bytes > torch.cuda.mem_get_info(device)[0] // 2:
        return torch.device("cpu")
    return device
