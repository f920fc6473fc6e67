"""Runs that are Ray jobs, which are submitted through Ray's Job API and followed through their logs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from raytrec.client.jobs import STATES, Jobs
from raytrec.client.package import Source, code
from raytrec.client.run import ENDED, Run
from raytrec.common.documents import from_line
from raytrec.common.errors import RunError
from raytrec.common.messages import EVENTS, METRICS
from raytrec.config.overrides import to_override_texts
from raytrec.tracking.progress_log import ERROR, FOLDER, RESULT, parse

JOB_START_TIMEOUT_S = 600  # time for a job to start its run; the job may first wait for nodes
FAILED_LOG_LINES = 3  # last log lines shown for a job that failed without a raytrec error
STOPPED_LOG_LINES = 4  # last log lines shown for a stopped job: signal, save, step, advice to resume


class JobApi(Jobs):
    """Client that starts and opens runs as Ray jobs, through the job API of a cluster's dashboard."""

    def train(self, source: Source, overrides: list[str], include: tuple[Path, ...]) -> Run:
        """Submit a run, and return it. If the same run was submitted and interrupted before, resume it.

        Raises:
            ConfigError, RunError: As for `Jobs.submit`.
        """
        return JobRun(self, self.submit(source, overrides, include))

    def run(self, job: str) -> Run:
        """Return the run that a job trains, given the job id.

        Raises:
            RunError: There is no such job, or as for all methods of Jobs.
        """
        ids = [each["name"] for each in self.runs()]
        if job not in ids:
            raise RunError(
                f"there is no job '{job}'",
                where=self.address,
                expected=f"a job id, such as {', '.join(ids[:5])}" if ids else "a job id; no jobs exist yet",
                do="pass the job id (run.job), or open the run by its name with Cluster('ray://HOST:10001')",
            )
        return JobRun(self, job)

    def close(self) -> None:
        """Do nothing: the job API keeps no connection open."""


class JobRun(Run):
    """Run that is a Ray job, followed through the job's log (tracking/progress_log.py).

    Between the lines for users, the log contains JSON lines with metrics and results.

    Args:
        jobs: Jobs of the cluster.
        job: Job id.
    """

    def __init__(self, jobs: Jobs, job: str):
        super().__init__()
        self.job, self._jobs, self._folder, self._offset, self._partial = job, jobs, "", 0, ""

    @property
    def folder(self) -> str:
        """Return the run folder on the cluster; wait until the job has started its run.

        Raises:
            RaytrecError: The job ended without starting a run (if it failed, its error is raised), or has not
                started a run within ten minutes of this call; or the cluster does not respond.
        """
        deadline = monotonic() + JOB_START_TIMEOUT_S
        while not self._folder and self._poll() not in ENDED:
            if monotonic() > deadline:
                raise RunError(f"no run has started in {JOB_START_TIMEOUT_S} s", where=self.job, do="see run.logs()")
            sleep(self.poll_s)
        if not self._folder:
            self._outcome()  # raises an error unless the job succeeded
            raise RunError("the job has ended without starting a run", where=self.job, do="read its result with wait()")
        return self._folder

    def stop(self) -> None:
        """Ask the job to save a checkpoint and end.

        Raises:
            RunError: The job has already ended.
        """
        if not self._jobs.stop(self.job):
            raise RunError("the job has already ended", where=self.job)

    def _read(self) -> None:
        text, status = self._jobs.read(self.job, self._offset)
        self._offset += len(text)
        self.poll_s = 1 + self._offset / 250_000  # the job API sends the whole log each time
        *lines, self._partial = (self._partial + text).split("\n")
        if status in STATES and self._partial:  # the log ends without a line break
            lines.append(self._partial)
        for line in lines:
            self._handle_line(line)
        self.state = STATES.get(status) or ("running" if self._folder else "starting")
        if self.state == "failed" and self.error is None:
            last = [line.strip() for line in self.log if line.strip()][-FAILED_LOG_LINES:]
            why = " | ".join(last) or self._jobs.message(self.job) or "its log is empty"
            self.error = RunError(f"the job failed: {why}", where=self.job)

    def _command(self, name: str, places: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
        """Run a command such as evaluate as a separate job, wait for the end of the job, and return its metrics."""
        words = ["python", "-m", "raytrec", name, self.folder]
        options = {key: value for key, value in options.items() if value is not None and value is not False}
        for override in to_override_texts(options.pop("overrides", None)):
            words += ["--set", override]
        if (columns := options.pop("columns", None)) is not None:
            options["columns"] = ",".join(columns)
        for key, value in (places | options).items():
            words.append(f"--{key.replace('_', '-')}")
            if value is not True:
                words.append(str(value))
        with code() as folder:
            job = self._jobs.start(shlex.join(words), {"working_dir": str(folder)}, name)
        return JobRun(self._jobs, job).wait()

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        raise RunError(
            "the job API cannot read the run folder, which report, pictures, file, tables and rows need",
            where=self._jobs.address,
            expected="a Ray client connection: Cluster('ray://HOST:10001').run('NAME')",
            do="connect with ray://, or run a `raytrec` command as a job of the cluster",
        )

    def _handle_line(self, line: str) -> None:
        kind, values = parse(line) or ("", {})
        if not kind:
            self.log.append(f"{line}\n")
        elif kind == FOLDER:
            self._folder = values[FOLDER]
        elif kind == RESULT:
            self.history.result = values
        elif kind == ERROR:
            self.error = RunError(**values)
        else:
            file, tag = (EVENTS, "event") if kind == "start" else (METRICS, "kind")
            with suppress(ValueError):  # not a message of this file
                self.history.add(from_line(file, {tag: kind, **values}))


def follow(jobs: Jobs, job: str) -> int:
    """Print the log of a job from its beginning until the job ends, and its outcome to stderr.

    After Ctrl-C, the job continues. Errors are as for all methods of Jobs.

    Returns:
        Exit code of the job as in `Jobs.exit_code`; 130 after Ctrl-C.
    """
    try:
        for line in JobRun(jobs, job).logs():
            print(line, end="", flush=True)
        code = jobs.exit_code(job)
    except KeyboardInterrupt:
        detached = f"\ndetached; the job continues; reattach: raytrec follow {job} --address {jobs.address}"
        print(detached, file=sys.stderr)
        return 130
    status = jobs.status(job)
    print(f"job {job} {'succeeded' if code == 0 else status.lower()}", file=sys.stderr)
    if status == "FAILED" and (why := jobs.message(job)) and "exit code" not in why:
        print(f"Ray reports: {why}", file=sys.stderr)  # the program itself has reported nothing
    return code


def stop(jobs: Jobs, job: str) -> None:
    """Ask a job to save a checkpoint and end, wait until the job has ended, and print the last lines of its log.

    Raises:
        RunError: The job has already ended, or as for all methods of Jobs.
    """
    if (status := jobs.status(job)) in STATES:
        raise RunError(f"the job has already ended: {status}", where=job)
    jobs.stop(job)
    jobs.exit_code(job)
    print("".join([*JobRun(jobs, job).logs()][-STOPPED_LOG_LINES:]), end="")
    print(f"job {job} {jobs.status(job).lower()}", file=sys.stderr)
