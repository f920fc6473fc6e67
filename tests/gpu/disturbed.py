"""DLRMs that inject faults or record host waits at a training step: model.name="disturbed:CLASS".

They write their notes to model.options.folder.
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
from raytrec.models.interactions import DLRM

STUCK_CYCLES = 1 << 40  # GPU clock cycles, about ten minutes
STUCK_S = 600
PACKAGE_FOLDER = str(Path(raytrec.__file__).parent)
# Frames in these paths are attributed to their caller.
LIBRARY_PATHS = ("/torch/", "/lib/python3", "<frozen", "/disturbed.py", "/standin/", "<string>", "<eval_with_key>")


class StepCountingModel(DLRM):
    """DLRM that counts the training steps of this process."""

    def __init__(self, schema: Schema, config: PythonSection):
        super().__init__(schema, DlrmSection(bottom_mlp=[32], top_mlp=[32]))
        self.options, self.count = config.options, 0

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.at(self.count, dense)
        return super().forward(dense, pooled)

    def at(self, count: int, dense: torch.Tensor) -> None:
        """Run before each training forward; `count` starts at 1."""


class FaultyModel(StepCountingModel):
    """DLRM that hangs at step `at` in its first process and is killed at step `at` in its second process.

    It hangs in a kernel on CUDA and in a sleep on CPU.
    """

    def at(self, count: int, dense: torch.Tensor) -> None:
        if count != self.options["at"]:
            return
        if self._first("stuck"):
            if dense.is_cuda:
                torch.cuda._sleep(STUCK_CYCLES)
            else:
                time.sleep(STUCK_S)
        elif self._first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _first(self, what: str) -> bool:
        """Return True on the first call for a fault, and write the process id and time to a note."""
        note = Path(self.options["folder"]) / f"{what}.json"
        if note.exists():
            return False
        note.write_text(json.dumps({"pid": os.getpid(), "unix_s": time.time()}))
        return True


class WaitRecordingModel(StepCountingModel):
    """DLRM that records where the host waits for the GPU from step `first` to step `last`."""

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
            self.waits.append(find_waiting_caller(traceback.extract_stack(sys._getframe(1))))


def find_waiting_caller(stack: traceback.StackSummary) -> list[str]:
    """Return ["raytrec" or "upstream", FILE:LINE of the innermost frame outside libraries]."""
    asked = [f for f in stack if not _is_library(f.filename)]
    if not asked:
        return ["upstream", "?"]
    inner = asked[-1]
    whose = "raytrec" if inner.filename.startswith(PACKAGE_FOLDER) else "upstream"
    return [whose, f"{'/'.join(inner.filename.split('/')[-3:])}:{inner.lineno}"]


def _is_library(filename: str) -> bool:
    """Return True for files of torch and Python. torchrec and fbgemm_gpu are not libraries here."""
    inside = "/site-packages/" in filename
    return any(part in filename for part in LIBRARY_PATHS if not (inside and part == "/lib/python3"))
