"""Figures from the device to the host: one copy, and so one wait, for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read(tensors: Sequence[torch.Tensor]) -> list[list[int | float | bool]]:
    """The values of each tensor as plain numbers, flat.

    They may be of several devices (torch keeps the count of an optimizer's steps in host memory) and dtypes:
    the tensors of each are copied at once.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(number)
    out: list[list[int | float | bool]] = [[]] * len(tensors)
    for numbers in groups.values():
        values = torch.cat([tensors[n].detach().reshape(-1) for n in numbers]).tolist()
        start = 0
        for n in numbers:
            out[n] = values[start : start + tensors[n].numel()]
            start += tensors[n].numel()
    return out
