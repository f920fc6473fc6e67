"""Export checkpoints of a run with deltas in full, every export.deltas.full_every deltas."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryFile
from time import sleep

from raytrec.checkpoint.files import get_step_folder, steps
from raytrec.checkpoint.retention import pin, unpin
from raytrec.common.errors import get_last_line
from raytrec.common.messages import Saved
from raytrec.config.run_config import RunConfig
from raytrec.deltas.chain import list_exports, open_stream, remove_old_files
from raytrec.deltas.format import get_export_uri

EXPORT_NICENESS = 19
EXPORT_POLL_INTERVAL_S = 0.2


class DeltaExports:
    """Exporter of checkpoints to the folder of deltas.

    Each export runs in a child process at low priority; only one runs at a time.

    Args:
        config: Configuration of the run, with export.deltas.
        warn: Function called with warnings for the user.

    Raises:
        ConfigError, RunError: The run cannot or must not write to the folder; see `deltas.chain.open_stream`.
    """

    def __init__(self, config: RunConfig, warn: Callable[[str], None]):
        open_stream(config)
        self._config, self._section, self._warn = config, config.export.deltas, warn
        self._saved: Saved | None = None  # newest checkpoint with a delta
        self._exporting: Saved | None = None
        self._process: subprocess.Popen | None = None
        self._errors = TemporaryFile()  # noqa: SIM115 (it is used until the object is freed)
        self._newest: int | None = None  # number of the delta whose state the newest export has
        self._clean_up()
        with suppress(OSError):
            for step in steps(config.checkpoint_root):  # pins of an earlier driver that was killed
                unpin(get_step_folder(config.checkpoint_root, step))

    def add(self, saved: Saved) -> None:
        """Remember a saved checkpoint as the next to export, if it was saved successfully and has a delta."""
        if saved.delta is not None and saved.error is None:
            self._saved = saved

    def poll(self) -> None:
        """Handle the end of an export, and start the next one if it is due."""
        if self._process is not None and self._process.poll() is not None:
            self._end_export(self._process.returncode)
        saved = self._saved
        is_due = self._newest is None or (saved and saved.delta - self._newest >= self._section.full_every)
        if self._process is None and saved is not None and is_due:
            self._saved = None
            self._start_export(saved)

    def finish(self, show_phase: Callable[[str, bool], None]) -> None:
        """Wait for the export in progress, and run another one if it is due.

        Args:
            show_phase: RunConsole.phase, which shows the wait.
        """
        self.poll()
        while self._process is not None:
            show_phase(f"exporting step {self._exporting.step} for services that follow the run", False)
            sleep(EXPORT_POLL_INTERVAL_S)
            self.poll()

    def close(self) -> None:
        """Stop the export in progress, if any."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._unpin()

    def _start_export(self, saved: Saved) -> None:
        with suppress(OSError):  # the checkpoint has been removed
            pin(saved.folder)
            place = get_export_uri(self._section.to, saved.delta)
            command = [sys.executable, "-P", "-m", "raytrec", "export", self._config.run.dir, "--out", place]
            command += ["--checkpoint", str(saved.step), "--allow-code"]  # this process has already accepted the code
            command += ["--quantize", self._section.quantize] if self._section.quantize else []
            self._errors.truncate(0)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # Ctrl-C must not reach the process
            )
            self._exporting = saved
            os.setpriority(os.PRIO_PROCESS, self._process.pid, EXPORT_NICENESS)

    def _end_export(self, code: int) -> None:
        saved = self._exporting
        self._unpin()
        if code:
            self._errors.seek(0)
            reason = get_last_line(self._errors.read().decode(errors="replace"), f"exit code {code}")
            self._warn(f"step {saved.step} was not exported for services that follow the run: {reason}")
        self._clean_up()

    def _unpin(self) -> None:
        self._process = None
        with suppress(OSError):
            unpin(self._exporting.folder)

    def _clean_up(self) -> None:
        """Remove old exports and deltas, and find the newest export."""
        with suppress(OSError):  # the store is unavailable
            remove_old_files(self._section.to, self._section.keep)
            self._newest = max(list_exports(self._section.to), default=None)
