"""What a group says, read on the driver's side while Ray Train runs: shown, and written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from threading import Event, Thread
from time import time
from typing import Any

from raytrec.checkpoint.index import reason
from raytrec.cluster.lifeline import RayLost
from raytrec.common.errors import RunError
from raytrec.common.redaction import hide_all, hide_yaml
from raytrec.report.diagnostics import hot_rank, low_utilisation, straggler
from raytrec.tracking.gauges import Gauges
from raytrec.tracking.journal import EVENTS, Journal, write_whole
from raytrec.tracking.ranks import Lines, rank_metrics

METRICS, RANKS, CHECKS = "metrics.jsonl", "ranks.jsonl", "checks.jsonl"
RESULT, TRACKED = "result.json", "mlflow_run_id"
WAIT_S = 0.5  # for messages of the hub


class Watch:
    """Reads what ranks say, while Ray Train runs, and passes it on.

    Args:
        console: shows it.
        record: keeps it; None where nothing is trained.

    Attributes:
        result: the figures of rank 0, once the group has ended well.
        unsaved: why the trained model could not be saved; None: it was.
        stopped_at: the step at which the run has been stopped.
    """

    def __init__(self, console: Any, record: Record | None = None):
        self.console, self.result, self.stopped_at = console, None, None
        self.unsaved: RunError | None = None
        self._record, self._unrecorded = record, set()

    def reading(self, hub: Any) -> _Reading:
        """A block in which a thread reads the hub's messages; at its end nothing is left there."""
        return _Reading(hub, self._receive)

    def failed(self, cause: str, again: bool) -> None:
        """Notes that all workers have ended, of which no hub could tell."""
        self._receive("event", event="failed", cause=cause, rank=None, again=again)

    def _receive(self, kind: str, **message: Any) -> None:
        if kind == "result":
            self.result = finite(message["figures"])
            self.unsaved = RunError(**parts) if (parts := message.get("unsaved")) else None
            return
        if kind == "stopped":
            self.stopped_at = message["step"]
        if self._record:
            for warning in self._keep(kind, message):
                self.console.warn(warning)
        if show := getattr(self.console, kind, None):
            show(**message)

    def _keep(self, kind: str, message: dict[str, Any]) -> list[str]:
        """What is to be said of a message. Whatever goes wrong with one, the next ones must be read."""
        try:
            return self._record.keep(kind, message)
        except Exception as error:
            what = f"messages of kind {kind} are not recorded: {type(error).__name__}: {error}"
            new = what not in self._unrecorded
            self._unrecorded.add(what)
            return [what] if new else []


class Record:
    """Writes what ranks say into the run folder, to MLflow, and to Ray's metrics.

    Args:
        tracker: of tracking.mlflow.
        folder: of the run.
        name: of the run.
        cells: tracking.max_rank_table_series.

    Attributes:
        checks: check → [passed, failed], counted.
    """

    def __init__(self, tracker: Any, folder: Path, name: str, cells: int):
        self.checks: dict[str, list[int]] = {}
        self._tracker, self._folder, self._cells = tracker, folder, cells
        self._gauges, self._lines, self._advised = Gauges(name), Lines(), set()
        self._said: list[str] = []  # of the run folder
        self._journal = Journal(folder, self._said.append)
        self._remembered = False
        self._attempt: int | None = None  # whose first interval is over

    def summary(self) -> dict[str, int]:
        """How many checks have passed and failed."""
        passed, failed = map(sum, zip(*self.checks.values(), strict=True)) if self.checks else (0, 0)
        return {"train.checks_passed": passed, "train.checks_failed": failed}

    def remember_run(self) -> None:
        """Notes the MLflow run, once there is one, for whoever resumes this run."""
        if self._tracker.run_id and not self._remembered:
            self._journal.put(TRACKED, self._tracker.run_id)
            self._remembered = True

    def result(self, metrics: dict[str, Any], unsaved: RunError | None) -> RunError | None:
        """Writes result.json, by which a run counts as finished, if the trained model has been saved.

        Args:
            unsaved: why it has not.

        Returns:
            Why there is no result.json; the run can be resumed then.
        """
        figures = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
        self._log("", figures, metrics["train.steps"])
        if unsaved:
            return unsaved
        try:
            write_json(self._folder / RESULT, metrics)
        except OSError as error:
            return RunError(
                f"the result cannot be written: {reason(error)}",
                where=str(self._folder / RESULT),
                expected="room in the run folder; the model has been saved",
                do=f"make room, then have it evaluated again: raytrec train --resume {self._folder}",
            )
        self._tracker.file(self._folder / RESULT)
        return None

    def close(self, status: str) -> list[str]:
        """Writes what is left; what is missing in the end, in the run folder and in MLflow."""
        self._gauges.close()
        lost = self._tracker.close(status)
        self.remember_run()
        missing = self._journal.missing()
        said, self._said[:] = list(self._said), []
        if lost and not missing:
            lost += "; the run folder has everything"
        return [*said, *filter(None, (missing, lost))]

    def keep(self, kind: str, message: dict[str, Any]) -> list[str]:
        """Writes one message down; what people should be told of it."""
        advice = self._keep(kind, message)
        said, self._said[:] = list(self._said), []
        return said + advice

    def _keep(self, kind: str, message: dict[str, Any]) -> list[str]:
        self.remember_run()
        if kind in ("event", "saved", "start", "stopped"):
            self._append(EVENTS, {"event": kind, "unix_s": time(), **message}, without="plan")
        elif kind in ("train", "eval", "final"):
            self._append(METRICS, {"kind": kind, "unix_s": time(), **message})
            self._measured(kind, message)
        elif kind == "check":
            self._append(CHECKS, message)
            self._checked(message)
        elif kind == "rank":
            self._append(RANKS, message)
            return self._spoken(message)
        if kind == "start":
            text = json.dumps(message["plan"], indent=2) + "\n"
            self._journal.put("plan.json", text, lambda: self._tracker.file(self._folder / "plan.json"))
        return []

    def _measured(self, kind: str, message: dict[str, Any]) -> None:
        figures = {k: v for k, v in message.items() if k not in ("step", "curves")}
        self._gauges.set({"step": message["step"], **figures})
        if kind != "final":  # whose figures the driver logs with the result
            self._log(f"{kind}.", figures, message["step"])

    def _log(self, prefix: str, figures: dict[str, Any], step: int) -> None:
        """To MLflow, whose pages have a section for each train/…, eval/… and so on."""
        named = {(prefix + name).replace(".", "/", 1): value for name, value in figures.items()}
        self._tracker.metrics(named, step)

    def _checked(self, message: dict[str, Any]) -> None:
        name, passed = message["check"], message["passed"]
        self.checks.setdefault(name, [0, 0])[not passed] += 1
        figures = {f"watch/check/{name}": int(passed), f"watch/check/{name}_figure": message["figure"]}
        self._tracker.metrics(figures, message["step"])

    def _spoken(self, line: dict[str, Any]) -> list[str]:
        """What the lines of all ranks, once they are there, tell; each kind of advice is given once."""
        lines = self._lines.add(line)
        if lines is None:
            return []
        self._tracker.metrics(rank_metrics(lines, self._cells), line["step"], line["unix_s"])
        waited = sum(each["phases_s"]["data"] for each in lines)
        self._gauges.set({"data_wait_share": waited / max(1e-9, sum(each["seconds"] for each in lines))})
        found = []
        if line["attempt"] != self._attempt:  # the first interval waits for readers that are only starting
            self._attempt = line["attempt"]
            return found
        for advise in (straggler, low_utilisation, hot_rank):
            if advise not in self._advised and (sentence := advise(lines)):
                self._advised.add(advise)
                found.append(sentence)
        return found

    def _append(self, name: str, entry: dict[str, Any], without: str = "") -> None:
        """A line of JSON, which has no NaN."""
        entry = hide_all(finite({key: value for key, value in entry.items() if key != without}))
        self._journal.add(name, entry)


class _Reading:
    """Reads the hub's messages in a thread.

    No call of it to Ray lasts: a thread that is still in one while Ray is shut down, after a part of Ray was
    lost, crashes the process.
    """

    def __init__(self, hub: Any, receive: Callable):
        self._hub, self._receive, self._over, self._lost = hub, receive, Event(), Event()
        self._thread = Thread(target=self._read, name="hub", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        if isinstance(error, RayLost):  # the hub is gone, too, and Ray may not say so
            self._lost.set()
        self._over.set()
        self._thread.join()
        if not self._lost.is_set():
            import ray

            ray.kill(self._hub)

    def _read(self) -> None:
        last = False
        while not last:
            last = self._over.is_set()
            for message in self._messages(0 if last else WAIT_S):
                self._receive(**message)

    def _messages(self, wait_s: float) -> list[dict[str, Any]]:
        """Those that are there, or come within so many seconds."""
        import ray

        if self._lost.is_set():
            return []
        try:
            answer = self._hub.get.remote(wait_s)
            while not self._lost.is_set():
                with suppress(ray.exceptions.GetTimeoutError):
                    return ray.get(answer, timeout=WAIT_S)
        except ray.exceptions.RayError:  # it has ended, and Ray starts it again; or all of Ray has
            self._over.wait(WAIT_S)
        return []


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON can hold it: a figure that is not defined (NE and AUC of labels that are all equal) is None."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}


def write_json(path: Path, values: Any) -> None:
    """Written whole or not at all."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Written whole or not at all; a configuration that holds a password, for this user alone to read."""
    shown = hide_yaml(text) if path.suffix == ".yaml" else text
    write_whole(path, text.encode(), 0o666 if shown == text else 0o600)
