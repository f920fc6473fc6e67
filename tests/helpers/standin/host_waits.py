"""Waits of the host for the stand-in's GPU, and their places in the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch

import raytrec

# Folders with a trailing separator, because a checkout or its parent can have any name.
RAYTREC_FOLDER, TORCH_FOLDER, STAND_IN_FOLDER = (
    f"{Path(file).parent}/" for file in (raytrec.__file__, torch.__file__, __file__)
)


class HostWait(NamedTuple):
    """Wait of the host for the device.

    Attributes:
        what: name of the operation.
        where: FILE:FUNCTION of the innermost caller outside torch.
        ours: FILE:FUNCTION of the innermost caller in raytrec; "" if there is none.
        callers: FILE:FUNCTION of all callers in raytrec, innermost first.
        drains: True if the wait empties the default stream, on which models compute.
    """

    what: str
    where: str
    ours: str
    callers: tuple[str, ...] = ()
    drains: bool = False


def find_callers() -> tuple[str, tuple[str, ...]]:
    """Return the innermost caller outside torch and this stand-in, and all in raytrec, as FILE:FUNCTION."""
    frame, outside, ours = sys._getframe(2), "", []
    while frame is not None:
        file = frame.f_code.co_filename
        place = f"{'/'.join(file.split('/')[-3:])}:{frame.f_code.co_name}"
        if not file.startswith((TORCH_FOLDER, STAND_IN_FOLDER)) and "contextlib" not in file:
            outside = outside or place
            if file.startswith(RAYTREC_FOLDER):
                ours.append(place)
        frame = frame.f_back
    return outside, tuple(ours)
