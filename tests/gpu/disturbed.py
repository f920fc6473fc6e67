"""Models of runs that are disturbed or watched from inside: model.name="disturbed:CLASS" in a config.

They are DLRMs that do something more at a step of training; model.options.folder is where they leave word.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

import raytrec
from raytrec.config.models import PythonSection
from raytrec.config.models.ranking import DlrmSection
from raytrec.config.schema import Schema
from raytrec.models.dlrm import DLRM

CYCLES = 1 << 40  # of a GPU's clock: some ten minutes
STUCK_S = 600
PACKAGE = str(Path(raytrec.__file__).parent)
# Frames that run for another function: their caller is the one that waits.
LIBRARIES = (
    "/torch/",
    "/lib/python3",
    "<frozen",
    "/disturbed.py",
    "/standin/",
    "<string>",
    "<eval_with_key>",
)


class Counting(DLRM):
    """A DLRM that counts the steps of training that this process has made."""

    def __init__(self, schema: Schema, config: PythonSection):
        super().__init__(schema, DlrmSection(bottom_mlp=[32], top_mlp=[32]))
        self.options, self.count = config.options, 0

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.at(self.count, dense)
        return super().forward(dense, pooled)

    def at(self, count: int, dense: torch.Tensor) -> None:
        """Called before each forward of training, from 1."""


class Disturbed(Counting):
    """Is stuck in a kernel (on CPU: a sleep) in its first process, and killed in its second, at step `at`."""

    def at(self, count: int, dense: torch.Tensor) -> None:
        if count != self.options["at"]:
            return
        if self._first("stuck"):
            if dense.is_cuda:
                torch.cuda._sleep(CYCLES)
            else:
                time.sleep(STUCK_S)
        elif self._first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _first(self, what: str) -> bool:
        """Whether this has not happened yet; notes the process that it happens to."""
        note = Path(self.options["folder"]) / f"{what}.json"
        if note.exists():
            return False
        note.write_text(json.dumps({"pid": os.getpid(), "unix_s": time.time()}))
        return True


class Watching(Counting):
    """Notes where the host waits for the GPU, from step `first` to step `last`."""

    def at(self, count: int, dense: torch.Tensor) -> None:
        if count == self.options["first"]:
            self.waits: list[list[str]] = []
            warnings.simplefilter("always")
            self._show, warnings.showwarning = warnings.showwarning, self._note
            torch.cuda.set_sync_debug_mode("warn")
        elif count == self.options["last"]:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self._show
            (Path(self.options["folder"]) / "waits.json").write_text(json.dumps(self.waits))

    def _note(self, message, category, filename, lineno, *more) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.waits.append(who_waits(traceback.extract_stack(sys._getframe(1))))


def who_waits(stack: traceback.StackSummary) -> list[str]:
    """[raytrec or upstream, file:line of the innermost frame that asked for what was waited for]."""
    asked = [f for f in stack if not _is_library(f.filename)]
    if not asked:
        return ["upstream", "?"]
    inner = asked[-1]
    whose = "raytrec" if inner.filename.startswith(PACKAGE) else "upstream"
    return [whose, f"{'/'.join(inner.filename.split('/')[-3:])}:{inner.lineno}"]


def _is_library(filename: str) -> bool:
    """torch and Python's own; torchrec and fbgemm_gpu ask for themselves."""
    inside = "/site-packages/" in filename
    return any(part in filename for part in LIBRARIES if not (inside and part == "/lib/python3"))
