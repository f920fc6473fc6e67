"""Export checkpoints of a run in child processes, for services that follow the run's deltas (export.deltas).

A delta contains the weights that have changed since the previous delta. A service begins with a full export.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from subprocess import DEVNULL, Popen
from tempfile import TemporaryFile
from time import sleep

from raytrec.checkpoint.files import get_step_folder, pin, steps, unpin
from raytrec.common.errors import get_last_line
from raytrec.common.messages import Saved
from raytrec.config.run_config import RunConfig
from raytrec.deltas.chain import list_exports, open_stream, remove_old_files
from raytrec.deltas.format import get_export_uri
from raytrec.driver.track import start_command

EXPORT_POLL_INTERVAL_S = 0.2


class DeltaExports:
    """Exporter of full models to export.deltas.to, at the first delta and then every export.deltas.full_every deltas.

    One child process at a time runs `raytrec export`. Without export.deltas, nothing is exported.

    Args:
        config: Configuration of the run.
        warn: Function called with warnings for the user.

    Raises:
        ConfigError: The folder contains deltas of another or an unknown run, or is the run or checkpoint folder.
        RunError, DataError: The folder or the run folder cannot be read or written (DataError: opened).
    """

    def __init__(self, config: RunConfig, warn: Callable[[str], None]):
        self._config, self._section, self._warn = config, config.export.deltas, warn
        self._saved: Saved | None = None  # newest checkpoint with a delta that is not exported yet
        self._exporting: Saved | None = None
        self._process: Popen | None = None
        self._newest: int | None = None  # number of the delta whose state the newest export contains
        if self._section is None:
            return
        self._errors = TemporaryFile()  # noqa: SIM115 (it is used until the end of the run)
        open_stream(config)
        self._clean_up()
        with suppress(OSError):
            for step in steps(config.checkpoint_root):  # pins of an earlier driver that was killed
                unpin(get_step_folder(config.checkpoint_root, step))

    def add(self, saved: Saved) -> None:
        """Remember a saved checkpoint as the next to export, unless the save failed or wrote no delta."""
        if saved.delta is not None and saved.error is None:
            self._saved = saved

    def poll(self) -> None:
        """Handle the end of an export, and start the next export if it is due; do not wait.

        If an export fails, the user is warned, and the next checkpoint with a delta is exported when it is due.
        """
        if self._process is not None and self._process.poll() is not None:
            self._end_export(self._process.returncode)
        saved = self._saved
        is_due = self._newest is None or (saved and saved.delta - self._newest >= self._section.full_every)
        if self._process is None and saved is not None and is_due:
            self._saved = None
            self._start_export(saved)

    def finish(self, show_phase: Callable[[str, bool], None]) -> None:
        """Wait for the export in progress and, if it is due, for one more export.

        `show_phase` is called repeatedly with a text for the user, and with False (RunConsole.phase).
        """
        self.poll()
        while self._process is not None:
            show_phase(f"exporting step {self._exporting.step} for services that follow the run", False)
            sleep(EXPORT_POLL_INTERVAL_S)
            self.poll()

    def close(self) -> None:
        """Terminate the export in progress, if any, and wait for the end of its process."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._unpin()

    def _start_export(self, saved: Saved) -> None:
        arguments = ["export", self._config.run.dir, "--out", get_export_uri(self._section.to, saved.delta)]
        arguments += ["--checkpoint", str(saved.step)]
        arguments += ["--quantize", self._section.quantize] if self._section.quantize else []
        with suppress(OSError):  # the checkpoint has been removed
            pin(saved.folder)
            self._errors.seek(0)
            self._errors.truncate()
            streams = {"stdin": DEVNULL, "stdout": DEVNULL, "stderr": self._errors}
            self._process = start_command(arguments, {"OMP_NUM_THREADS": "1"}, **streams)
            self._exporting = saved

    def _end_export(self, code: int) -> None:
        saved = self._exporting
        self._unpin()
        if code:
            self._errors.seek(0)
            output = "\n" + self._errors.read().decode(errors="replace")
            _, marker, rest = output.rpartition("\nerror: ")
            # The parts of an error follow in further lines.
            ended = f"exit code {code}; last output: {get_last_line(rest, 'none')}"
            reason = rest.partition("\n")[0] if marker else ended
            self._warn(f"step {saved.step} was not exported for services that follow the run: {reason}")
        self._clean_up()

    def _unpin(self) -> None:
        self._process = None
        with suppress(OSError):
            unpin(self._exporting.folder)

    def _clean_up(self) -> None:
        """Remove old exports and deltas (export.deltas.keep), and find the newest export."""
        with suppress(OSError):  # the store is unavailable
            remove_old_files(self._section.to, self._section.keep)
            self._newest = max(list_exports(self._section.to), default=None)
