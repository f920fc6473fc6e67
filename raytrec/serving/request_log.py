"""Log of a sample of requests and their scores in Parquet files, written by a background thread."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from random import random
from threading import Lock, Thread
from time import monotonic
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.output_folder import OutputFolder
from raytrec.common.redaction import hide
from raytrec.common.storage import make_absolute
from raytrec.data.arrow import pick_columns
from raytrec.serving.batching import VersionedScores
from raytrec.serving.bodies import Query
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.skew.samples import REQUEST_COLUMN, VERSION_KEY

_log = logging.getLogger(__name__)
FILE_INTERVAL_S, MAX_FILE_ROWS = 60.0, 10_000  # a file is closed after this time or number of rows
MAX_WAITING_ROWS = 20_000  # maximum number of rows waiting for the thread
CLOSE_TIMEOUT_S = 15.0  # timeout for the last files; Serve kills a replica after 20 s


@dataclass(frozen=True)
class LoggedRequest:
    """Request with its scores.

    Attributes:
        path: Path of the URL; "shadow" if a challenger in shadow mode computed the scores.
        query: Rows of the request.
        scores: Scores of these rows.
        id: Id of the request, which its response contains (X-Request-Id). A shadow's scores have the same id.
        time: Time at which the request was logged, in UTC.
    """

    path: str
    query: Query
    scores: VersionedScores
    id: str
    time: datetime = field(default_factory=lambda: datetime.now(UTC))


class RequestLog:
    """Log that writes a sample of requests to a folder.

    A file contains the rows with the model's columns and types, their scores, and the columns `_request` (id), `_time`
    (UTC), `_path` and `_version`. All rows of a file have the same version. Rows are dropped and counted if too many
    rows are waiting, or with a warning if they cannot be converted or written.

    Args:
        uri: Folder; local, s3:// or gs://.
        sample: Share of requests that are written, in (0, 1].
        writer: Part of the file names that identifies this process.
        figures: Metrics that count written and dropped rows.
    """

    def __init__(self, uri: str, sample: float, writer: str, figures: ReplicaMetrics):
        self._uri, self._sample, self._writer = make_absolute(uri), sample, writer
        self._written, self._dropped = figures.logged, figures.not_logged
        self._queue: SimpleQueue[LoggedRequest | None] = SimpleQueue()  # None ends the thread
        self._waiting, self._lock, self._files = 0, Lock(), 0
        self._thread = Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def offer(self, path: str, query: Query, scores: VersionedScores, id: str | None = None) -> str | None:
        """Add a completed request to the log if it is in the sample, and return its id in the log.

        Args:
            path: Path of the URL; see LoggedRequest.
            query: Rows of the request.
            scores: Scores of the rows.
            id: Id of the request if the log already contains it with other scores; None: a new request.

        Returns:
            Id of the request; None if it is not in the sample, or too many rows are waiting.
        """
        if id is None and random() >= self._sample:
            return None
        logged, rows = LoggedRequest(path, query, scores, id or uuid4().hex), len(scores[0])
        with self._lock:
            fits = self._waiting + rows <= MAX_WAITING_ROWS
            self._waiting += rows if fits else 0
        if not fits:
            self._dropped.inc(rows)
            return None
        self._queue.put(logged)
        return logged.id

    def close(self) -> None:
        """Write the waiting requests and end the thread; wait for at most CLOSE_TIMEOUT_S seconds."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        tables: dict[str, list[pa.Table]] = defaultdict(list)
        rows, due, has_ended = 0, monotonic() + FILE_INTERVAL_S, False
        while not has_ended:
            logged = None
            with suppress(Empty):
                logged = self._queue.get(timeout=max(0.0, due - monotonic()))
                has_ended = logged is None
            if logged is not None and (table := self._as_table(logged)) is not None:
                tables[logged.scores.version].append(table)
                rows += len(table)
            if has_ended or rows >= MAX_FILE_ROWS or monotonic() >= due:
                for version, parts in tables.items():
                    self._write(version, pa.concat_tables(parts))
                tables.clear()
                rows, due = 0, monotonic() + FILE_INTERVAL_S

    def _as_table(self, logged: LoggedRequest) -> pa.Table | None:
        try:
            return to_logged_rows(logged)
        except Exception as error:  # one request must not end the log
            _log.warning("a request cannot be logged: %s", error)
            self._dropped.inc(len(logged.scores[0]))
            return None
        finally:
            with self._lock:
                self._waiting -= len(logged.scores[0])

    def _write(self, version: str, table: pa.Table) -> None:
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self._writer}-{self._files}.parquet"
        self._files += 1
        try:
            folder = OutputFolder(self._uri)
            if folder.is_local:
                os.makedirs(folder.uri, 0o700, exist_ok=True)  # the folder contains data of real users
            with folder.stream(name, f"{folder.partial}/{name}") as stream:
                pq.write_table(table.replace_schema_metadata({VERSION_KEY: version}), stream, compression="zstd")
            self._written.inc(len(table))
        except Exception as error:
            _log.warning("rows of the request log (%s) cannot be written to %s: %s", len(table), hide(self._uri), error)
            self._dropped.inc(len(table))


def to_logged_rows(logged: LoggedRequest) -> pa.Table:
    """Return the rows of a request as described in RequestLog.

    Raises:
        ArrowException, RaytrecError: A value does not fit the type of its column.
    """
    scorer, table = logged.query.scorer, logged.query.to_table()
    columns = scorer.reader.columns
    table = pick_columns(table, columns.names).cast(columns)
    scores = scorer.as_table(logged.scores)
    for name in scores.column_names:
        table = table.append_column(name, scores[name])
    about = {
        REQUEST_COLUMN: (logged.id, pa.string()),
        "_time": (logged.time, pa.timestamp("us", "UTC")),
        "_path": (logged.path, pa.string()),
        "_version": (logged.scores.version, pa.string()),
    }
    for name, (value, kind) in about.items():
        table = table.append_column(name, pa.repeat(pa.scalar(value, kind), len(table)))
    return table
