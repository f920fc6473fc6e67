"""Ray's Job API (http://): runs as jobs, which outlive whoever started them. Only their logs come back."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from threading import Condition, Thread
from time import monotonic, sleep
from typing import Any

from raytrec.client.answers import answer_in
from raytrec.client.jobs import ENDED, Jobs
from raytrec.client.known_run import Seen
from raytrec.client.package import code
from raytrec.common.errors import RunError
from raytrec.config.overrides import as_texts
from raytrec.config.run_config import RunConfig
from raytrec.driver.progress_log import FOLDER, for_people, parse

Source = str | Path | dict | RunConfig
LOOK_S = 10.0  # how often news of a run that is no job are worth a job that asks
FOLDER_S = 600  # until a job says where its run is: it may wait for nodes
STATES = {"SUCCEEDED": "finished", "FAILED": "failed", "STOPPED": "stopped"}


class ByJob:
    """A cluster behind http://HOST:PORT of its dashboard.

    Args:
        address: of the dashboard.
    """

    def __init__(self, address: str):
        self.address, self.jobs = address, Jobs(address)

    def call(self, name: str, *arguments: Any) -> Any:
        """What a function of `peek` gives, asked by a job of its own: that takes some seconds."""
        command = f"python -m raytrec.client.answers {shlex.quote(json.dumps([name, *arguments]))}"
        return answer_in(self._run(command, f"look-{name}"))

    def begin(self, source: Source, overrides: list[str], include: tuple[Path, ...]) -> Job:
        """Submits a run; submitting the same again resumes it."""
        return Job(self, self.jobs.submit(source, overrides, include))

    def attach(self, news: dict[str, Any]) -> Job | Seen:
        """A run that somebody has started, as a job or otherwise, of which this is the news."""
        if news["job"] and news["state"] == "running":
            return Job(self, news["job"], news["folder"])
        return Seen(self, news["folder"], LOOK_S)

    def evaluate(self, run: str, data: str, options: dict[str, Any]) -> dict[str, Any]:
        """Evaluates a run's newest checkpoint."""
        return self._figures("evaluate", run, ["--data", data], options)

    def predict(self, run: str, data: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
        """Predicts with a checkpoint of a run."""
        return self._figures("predict", run, ["--data", data, "--out", out], options)

    def index(self, run: str, items: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
        """Writes an index of items."""
        return self._figures("index", run, ["--items", items, "--out", out], options)

    def _figures(self, command: str, run: str, words: list[str], options: dict[str, Any]) -> dict[str, Any]:
        """What a command prints as JSON, run as a job."""
        words = [command, self.call("news", run, {})["folder"], *words, "--json"]
        options = {key: value for key, value in options.items() if value is not None}
        overrides = as_texts(options.pop("overrides", None))
        words += [word for override in overrides for word in ("--set", override)]
        if (columns := options.pop("columns", None)) is not None:
            words += ["--columns", ",".join(columns)]
        words += [
            word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        log = self._run("python -m raytrec " + shlex.join(words), command)
        try:
            return json.loads(log.rstrip().rpartition("\n")[2])
        except ValueError:
            raise error_in(log, command) from None

    def close(self) -> None:
        """Nothing of this stays open."""

    def _run(self, command: str, name: str) -> str:
        """A job to its end; its log."""
        with code() as folder:
            job = self.jobs.start(command, {"working_dir": str(folder)}, name)
        return "".join(self.jobs.logs(job))


class Job:
    """A run that is a job: its progress is read in its log, by a thread.

    Args:
        job: its id.
        folder: of the run, where it is known.
    """

    polls_s = 1.0
    counts_bytes = False

    def __init__(self, way: ByJob, job: str, folder: str | None = None):
        self._way, self.job, self._folder = way, job, folder
        self._told: list[dict[str, Any]] = []  # lines as metrics.jsonl has them
        self._starts: list[dict[str, Any]] = []  # as events.jsonl has them
        self._log, self._over, self._changed = "", False, Condition()
        Thread(target=self._read, name=f"log of {job}", daemon=True).start()

    def folder(self) -> str:
        """Waits until the job has said it.

        Raises:
            RunError: it ended before.
        """
        deadline = monotonic() + FOLDER_S
        with self._changed:
            while self._folder is None and not self._over:
                if not self._changed.wait(max(0.0, deadline - monotonic())):
                    raise RunError(f"the job has not begun a run for {FOLDER_S} s", where=self.job)
        if self._folder is None:
            raise error_in(self._log, self.job)
        return self._folder

    def news(self, since: dict[str, int]) -> dict[str, Any]:
        """As `queries.news`, as far as the job's log tells: figures now and then."""
        with self._changed:
            over, told, folder = self._over, self._told[since.get("log", 0) :], self._folder
            starts = self._starts[since.get("starts", 0) :]
        state = STATES.get(self._way.jobs.status(self.job), "running") if over else "running"
        if state == "running" and folder is None:
            state = "starting"
        error = error_in(self._log, self.job) if state == "failed" else None
        return {
            "metrics": told,
            "events": starts,
            "since": {
                "log": since.get("log", 0) + len(told),
                "starts": since.get("starts", 0) + len(starts),
            },
            "state": state,
            "folder": folder,
            "error": error and error.parts,
        }

    def logs(self) -> Iterator[str]:
        """What the job writes for people, from its beginning until its end."""
        return for_people(self._way.jobs.logs(self.job))

    def stop(self) -> None:
        if not self._way.jobs.stop(self.job):
            raise RunError("the job has ended", where=self.job)

    def _read(self) -> None:
        rest = ""
        try:
            for piece in self._way.jobs.logs(self.job):
                *lines, rest = (rest + piece).split("\n")
                with self._changed:
                    self._log = (self._log + piece)[-(1 << 20) :]
                    for line in lines:
                        self._take(line)
                    self._changed.notify_all()
            while self._way.jobs.status(self.job) not in ENDED:
                sleep(0.5)
        except RunError:  # the cluster has gone: whoever asks for news is told so
            pass
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _take(self, line: str) -> None:
        kind, said = parse(line) or ("", {})
        if kind == FOLDER:
            self._folder = said[FOLDER]
        elif kind == "start":
            self._starts.append({"event": kind, **said})
        elif kind:
            self._told.append({"kind": kind, **said})


def error_in(log: str, job: str) -> RunError:
    """The error of ours that a command has written last, or the end of its log."""
    log = "".join(for_people([log]))
    before, mark, text = log.rpartition("error: ")
    if not mark or not (not before or before.endswith("\n")):
        last = [line for line in log.splitlines() if line.strip()][-3:]
        return RunError("the job failed", where=job, expected=" | ".join(last) or None)
    what, parts = [], {}
    for line in text.splitlines():
        label, colon, value = line.strip().partition(":")
        if line.startswith("  ") and colon and label in ("where", "expected", "do"):
            parts[label] = value.strip()
        elif not parts:
            what.append(line)
    return RunError("\n".join(what).strip(), **parts)
