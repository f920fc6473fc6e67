"""Show messages from workers and the coordinator, and record the messages in the run folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from time import time
from typing import Any

from raytrec.checkpoint.index import reason
from raytrec.cluster.lifeline import RayLost
from raytrec.common import messages
from raytrec.common.errors import RunError
from raytrec.common.formatting import null_nonfinite
from raytrec.common.messages import CHECKS, ENDED_EARLY, RANKS, Message, RankLine
from raytrec.common.redaction import hide_all, hide_yaml
from raytrec.common.storage import quote_for_shell
from raytrec.report.findings import MIN_INTERVAL_S, Times, find_hot_rank, find_low_utilization, find_straggler
from raytrec.tracking.aggregate import sum_over_time
from raytrec.tracking.history import StepBuffer
from raytrec.tracking.journal import Journal, write_atomically
from raytrec.tracking.run_folder import PLAN, RESULT, read_messages

WAIT_S = 0.5  # interval at which the reader checks whether Ray is lost
MESSAGE_WAIT_S = 5.0  # maximum wait of a call for messages; each call costs driver and coordinator a few milliseconds


@dataclass
class Watch:
    """Reader that shows and records messages from the ranks and the coordinator while Ray Train runs.

    Args:
        console: RunConsole that shows the messages.
        record: Record that stores the messages in the run folder; None if nothing is trained.
        ended: Function called when rank 0 has reported its result, before the workers end.
        saved: Function called with each message about a saved or failed checkpoint.

    Attributes:
        result: Metrics of rank 0; None until rank 0 has reported its result.
        unsaved: Error that prevented the trained model from being saved; None if the model was saved.
        ended_early_at: Step at which train.early_stopping ended training; None if training was not ended early.
    """

    console: Any
    record: Record | None = None
    ended: Callable[[], None] = lambda: None
    saved: Callable[[messages.Saved], None] = lambda saved: None
    result: dict[str, Any] | None = None
    ended_early_at: int | None = None
    unsaved: RunError | None = None
    _unrecorded: set[str] = field(default_factory=set)

    @contextmanager
    def reading(self, coordinator: Any) -> Iterator[None]:
        """Read the coordinator's messages in a thread while the block runs, then the rest, and end the coordinator.

        After a RayLost, the rest is not read. Every Ray call of the thread has a short timeout: a thread that is still
        in a call when Ray is shut down after the loss of one of its processes would crash the driver.
        """
        import ray

        over, lost = Event(), Event()
        thread = Thread(target=self._read, args=(coordinator, over, lost), name="coordinator", daemon=True)
        thread.start()
        try:
            yield
        except RayLost:  # the coordinator is lost as well, which Ray may not report
            lost.set()
            raise
        finally:
            over.set()
            if not lost.is_set():
                coordinator.release.remote()
            thread.join()
            if not lost.is_set():
                ray.kill(coordinator)

    def _read(self, coordinator: Any, over: Event, lost: Event) -> None:
        is_last = False
        while not is_last and not lost.is_set():
            is_last = over.is_set()
            for message in _fetch_messages(coordinator, 0 if is_last else MESSAGE_WAIT_S, over, lost):
                self.receive(message)

    def failed(self, cause: str, again: bool) -> None:
        """Show and record a failure of Ray that the coordinator cannot report, because the failure also ended it.

        Args:
            cause: Clause that states the failure.
            again: True if the run continues in a new Ray session.
        """
        self.receive(messages.Event(event="failed", details={"cause": cause, "rank": None, "again": again}))

    def receive(self, message: Message) -> None:
        """Show and record one message.

        A messages.Result is neither shown nor recorded; it sets `result` and `unsaved`, and `ended` is called.
        """
        if isinstance(message, messages.Result):
            self.result = null_nonfinite(message.figures)
            self.unsaved = RunError(**message.unsaved) if message.unsaved else None
            self.ended()
            return
        if isinstance(message, messages.Saved):
            self.saved(message)
        if isinstance(message, messages.Event) and message.event == ENDED_EARLY:
            self.ended_early_at = message.details["step"]
        if self.record:
            self._record_message(message)
        if show := getattr(self.console, message.KIND, None):
            show(**{name: value for name, value in message.values().items() if name != "unix_s"})

    def _record_message(self, message: Message) -> None:
        """Record a message. Show any exception as a warning, because later messages must still be read."""
        try:
            self.record.store_message(message)
        except Exception as error:
            warning = f"messages of kind {message.KIND} are not recorded: {type(error).__name__}: {error}"
            if warning not in self._unrecorded:
                self._unrecorded.add(warning)
                self.console.warn(warning)


class Record:
    """Writer of messages into the run folder, from which another process delivers them to MLflow.

    Args:
        folder: Run folder.
        warn: Function called with warnings about the run folder, and with advice on performance.

    Attributes:
        checks: True → number of passed live checks, False → number of failed ones, since the beginning of the run.
        times: Average time that ranks spent in each phase of the run's steps (report.findings).

    Raises:
        OSError: checks.jsonl or ranks.jsonl of an earlier driver cannot be read.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]):
        self.checks = Counter(check.passed for check in read_messages(folder, CHECKS))
        self.times = Times()
        for line in read_messages(folder, RANKS):
            self.times.add(line)
        self._folder, self._warn, self._journal = folder, warn, Journal(folder, warn)
        self._groups, self._advised = StepBuffer(), set()
        self._attempt: int | None = None  # worker group whose first interval has ended
        self._recent: list[RankLine] = []  # each rank's intervals since then, up to MIN_INTERVAL_S seconds

    def result(self, metrics: dict[str, Any], unsaved: RunError | None) -> RunError | None:
        """Append the metrics to metrics.jsonl. If the model is saved, mark the run as finished by writing result.json.

        Args:
            metrics: Content of result.json; must contain train.steps. Only its numbers are written to metrics.jsonl.
            unsaved: Error that prevented the model from being saved; None if it was saved.

        Returns:
            Error that prevented the model or result.json from being written, after which the run can be resumed; None
                on success.
        """
        figures = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
        self._append(messages.Result(step=metrics["train.steps"], unix_s=time(), figures=figures))
        if unsaved:
            return unsaved
        try:
            write_json(self._folder / RESULT, metrics)
        except OSError as error:
            return RunError(
                f"cannot write the result: {reason(error)}",
                where=str(self._folder / RESULT),
                expected="a writable run folder with free space; the model has been saved",
                do=f"correct the error, then complete the run: raytrec train --resume {quote_for_shell(self._folder)}",
            )
        return None

    def close(self) -> None:
        """Write buffered lines, and warn about lines that could not be written."""
        if missing := self._journal.missing():
            self._warn(missing)

    def store_message(self, message: Message) -> None:
        """Write one message to its file, and the plan in a Start to plan.json; warn about performance problems."""
        if message.FILE and message.values().get("unix_s") is None:
            message = replace(message, unix_s=time())  # type: ignore[call-arg]
        if message.FILE:
            self._append(message)
        if isinstance(message, messages.Outcome):
            self.checks[message.passed] += 1
        elif isinstance(message, messages.RankLine):
            self.times.add(message)
            self._advise(message)
        elif isinstance(message, messages.Start):
            self._journal.put(PLAN, json.dumps(message.plan, indent=2) + "\n")

    def _advise(self, line: RankLine) -> None:
        """Warn about performance problems once all ranks have reported an interval; give each kind of advice once."""
        lines = self._groups.add(line)
        if lines is None:
            return
        if line.attempt != self._attempt:  # in the first interval, ranks wait for readers that are starting
            self._attempt, self._recent = line.attempt, []
            return
        if any(each.seconds >= MIN_INTERVAL_S for each in self._recent):
            self._recent = []
        self._recent = sum_over_time([*self._recent, *lines])
        for advise in (find_straggler, find_low_utilization, find_hot_rank):
            if advise not in self._advised and (sentence := advise(self._recent)):
                self._advised.add(advise)
                self._warn(sentence)

    def _append(self, message: Message) -> None:
        """Append a message to its file as a line of JSON; NaN and infinity become null, and secrets are hidden."""
        self._journal.add(message.FILE, hide_all(null_nonfinite(message.line())))


def _fetch_messages(coordinator: Any, wait_s: float, over: Event, lost: Event) -> list[Message]:
    """Return the coordinator's new messages; wait at most `wait_s` seconds for the first. Return [] if it has ended."""
    import ray

    try:
        answer = coordinator.get.remote(wait_s)
        while not lost.is_set():
            with suppress(ray.exceptions.GetTimeoutError):
                return ray.get(answer, timeout=WAIT_S)
    except ray.exceptions.RayError:  # the coordinator has ended and is being restarted, or all of Ray has ended
        over.wait(WAIT_S)
    return []


def write_json(path: Path, values: Any) -> None:
    """Replace a file atomically with values as JSON.

    Raises:
        OSError: The file cannot be written, and is unchanged.
    """
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically with a text. A YAML file (*.yaml) that contains a secret is readable by this user only.

    Raises:
        OSError: The file cannot be written, and is unchanged.
    """
    shown = hide_yaml(text) if path.suffix == ".yaml" else text
    write_atomically(path, text.encode(), 0o666 if shown == text else 0o600)
