"""Deliver a run to MLflow in a child process during the run, or with `raytrec track`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from select import select
from subprocess import DEVNULL, PIPE, Popen
from time import monotonic
from typing import Any

from raytrec.common.errors import ConfigError, RunError
from raytrec.common.redaction import hide
from raytrec.common.storage import quote_for_shell
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.trust import describe_foreign_file, is_own_file
from raytrec.tracking.run_folder import CONFIG, check_run_folder

SERVER_ANSWER_TIMEOUT_S = 5.0  # time that a finished run waits for the first response of an MLflow server
FILE_ANSWER_TIMEOUT_S = 60.0  # time that a finished run waits for a SQLite file, which responds unless load is high
DELIVERY_TIMEOUT_S = 30.0  # time to deliver missing records at the end of a run
SILENT_SERVER_TIMEOUT_S = 15.0  # time for which `raytrec track` retries a store that does not respond
NICENESS = 19  # of the child processes
# The delivery process computes nothing, so additional threads and memory arenas would only use memory.
LOW_MEMORY_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


def start_command(arguments: list[str], environment: dict[str, str], **streams: Any) -> Popen:
    """Start `raytrec` with --allow-code at low priority, and return its process.

    Args:
        arguments: Command and its arguments.
        environment: Additional environment variables; variables that this process has are not replaced.
        **streams: Arguments stdin, stdout and stderr of Popen.
    """
    process = Popen(
        # --allow-code: this process has already accepted the code of the configuration.
        [sys.executable, "-P", "-m", "raytrec", *arguments, "--allow-code"],
        env=environment | os.environ,
        start_new_session=True,  # Ctrl-C must not reach the process
        **streams,
    )
    with suppress(OSError):  # the process has already ended
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    return process


class DeliveryProcess:
    """Child process that delivers a run to MLflow during the run (tracking.delivery.follow).

    The child process runs at low priority, and ends soon after the driver. Without tracking.enabled, no process is
    started. Only `ready` and `close` block.

    Args:
        config: Configuration of the run.
        notify: Function that `check`, `ready` and `close` call with messages to show.

    Attributes:
        run_id: Id of the MLflow run; None until the child process has reported the id.
    """

    def __init__(self, config: RunConfig, notify: Callable[[str], None]):
        self.run_id: str | None = None
        self._uri, self._folder, self._notify = config.tracking.uri, Path(config.run.dir), notify
        self._refusal: ConfigError | None = None
        self._answered, self._read = False, b""
        self._missing: str | None = "MLflow lacks the end of the run (the delivery process has exited)"
        self._process: Popen | None = None
        if config.tracking.enabled:
            arguments = ["track", str(self._folder), "--follow"]
            self._process = start_command(arguments, LOW_MEMORY_ENV, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)

    def check(self) -> None:
        """Handle the reports that the child process has sent, without waiting for more.

        Raises:
            ConfigError: The store cannot be opened, e.g. because the address is wrong or the server refuses the
                credentials.
        """
        self._read_reports(0.0)
        if self._refusal:
            raise self._refusal

    def ready(self) -> str | None:
        """Wait until the tracking store responds, at most FILE_ANSWER_TIMEOUT_S (SQLite) or SERVER_ANSWER_TIMEOUT_S.

        Returns:
            Id of the MLflow run; None if the store does not respond, or without tracking.enabled.

        Raises:
            ConfigError: As in `check`.
        """
        deadline = monotonic() + (FILE_ANSWER_TIMEOUT_S if self._uri.startswith("sqlite") else SERVER_ANSWER_TIMEOUT_S)
        while self._process and not self._answered and (remaining_s := deadline - monotonic()) > 0:
            if not self._read_reports(remaining_s):
                break
        self.check()
        return self.run_id

    def close(self, status: str, patience_s: float = DELIVERY_TIMEOUT_S) -> str | None:
        """Let the child process write the remaining records, and wait until it exits. Ctrl-C ends the wait early.

        Args:
            status: Final status of the MLflow run, FINISHED, FAILED or KILLED.
            patience_s: Maximum time to wait in seconds, after which the process is killed.

        Returns:
            Sentence that states what MLflow lacks, with the command that delivers it. None if MLflow has everything,
                without tracking.enabled, or if the store could not be opened (`check` raises that error).
        """
        if self._process is None:
            return None
        deadline = monotonic() + patience_s
        try:
            with suppress(OSError):  # the process has already ended
                self._process.stdin.write(status.encode())
                self._process.stdin.close()
            while self._read_reports(max(0.0, deadline - monotonic())):
                if monotonic() >= deadline:
                    self._missing = f"MLflow lacks the end of the run (not written within {patience_s:g} s)"
                    break
        except KeyboardInterrupt:
            self._missing = "MLflow lacks the end of the run (interrupted)"
        finally:
            self._process.kill()
            self._process.wait()
        if self._refusal or not self._missing:
            return None
        return f"{self._missing}; the run folder contains all records: raytrec track {quote_for_shell(self._folder)}"

    def _read_reports(self, wait_s: float) -> bool:
        """Wait at most `wait_s` seconds for reports, and handle them. Return False if the process has ended."""
        while self._process and select([self._process.stdout], [], [], wait_s)[0]:
            if not (data := os.read(self._process.stdout.fileno(), 1 << 16)):
                return False
            *lines, self._read = (self._read + data).split(b"\n")
            for line in lines:
                self._handle_report(json.loads(line))
            if lines:
                return True
        return True

    def _handle_report(self, values: dict[str, Any]) -> None:
        """Handle one line written by tracking.delivery.follow."""
        self._answered = True
        if "note" in values:
            self._notify(values["note"])
        self.run_id = values.get("run_id", self.run_id)
        self._missing = values.get("missing", self._missing)
        if "refused" in values:
            self._refusal = ConfigError(**values["refused"])


def load_tracked_config(run: str | Path, allow_code: bool) -> RunConfig:
    """Load the configuration of a run, check tracking.enabled, and set run.dir to the run's current folder.

    Raises:
        RunError: The folder contains no run, or cannot be accessed.
        ConfigError: The configuration is invalid, names code or a server that is not allowed, or tracking.enabled is
            false.
    """
    folder = check_run_folder(run).absolute()
    file = folder / CONFIG
    elsewhere = None if is_own_file(file) else describe_foreign_file(file)
    config = load_config(file, elsewhere=elsewhere, allow_code=allow_code)
    config.run.dir = str(folder)  # the folder may have been moved
    if not config.tracking.enabled:
        raise ConfigError("this run is not tracked in MLflow", where=str(file), expected="tracking.enabled=true")
    return config


def track(run: str | Path, allow_code: bool = False, follow: bool = False) -> RunConfig:
    """Deliver the records of a run folder that the MLflow store lacks; records are not delivered twice.

    Args:
        run: Run folder.
        allow_code: True if a configuration written by another user may name a server and code (config/trust.py).
        follow: True to deliver until standard input ends, while the driver that started this process runs.

    Returns:
        Configuration of the run.

    Raises:
        RunError: The folder contains no run, is not writable or is in use, or MLflow does not accept all records.
        ConfigError: tracking.enabled is false, the configuration names code that is not allowed, or the store cannot
            be opened.
    """
    from raytrec.tracking import delivery

    config = load_tracked_config(run, allow_code)
    folder = Path(config.run.dir)
    if follow:
        delivery.follow(folder, config)
        return config
    from raytrec.driver.console import RunConsole
    from raytrec.driver.driver_state import hold_run_lock

    with (
        RunConsole(config.run.name) as console,
        hold_run_lock(folder, 0, console.phase),
        delivery.hold_delivery_lock(folder),
    ):
        made = delivery.Delivery(folder, config, console.warn)
        if lost := made.finish(delivery.read_final_status(folder), SILENT_SERVER_TIMEOUT_S):
            raise RunError(
                lost,
                where=f"{folder}, tracking.uri={hide(config.tracking.uri)}",
                do="fix the error or start the server, then run the same command again",
            )
    return config
