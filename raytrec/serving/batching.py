"""Dynamic batching: score the rows of several requests together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

from raytrec.common.errors import DataError, RunError
from raytrec.data.row_slices import Rows
from raytrec.scoring.request_rows import ObjectRows
from raytrec.serving.bodies import Query, RefusedRequest

RETRY_AFTER_S = 1  # seconds after which a refused client may try again
MAX_QUEUED_ROWS = 32_768  # maximum number of waiting rows; further requests are refused unless no rows are waiting
MIN_FULL_BATCH_ROWS = 32  # batches may have this many rows even if scoring them exceeds the time budget


class UnavailableError(RunError):
    """Error for a request that cannot be served now, because a part of the service is unavailable."""

    def to_refusal(self) -> RefusedRequest:
        """Return the refusal of the request, with status 503 and Retry-After."""
        return RefusedRequest(503, self, **{"Retry-After": str(RETRY_AFTER_S)})


class VersionedScores(list[np.ndarray]):
    """Scores of each task, or vectors of a tower, with the version of the model that computed them.

    Args:
        values: Scores of each task, float32 [rows] or [rows, classes]; for a tower, one array [rows, width].
        version: Version of the model when it computed the scores.
    """

    def __init__(self, values: Iterable[np.ndarray], version: str):
        super().__init__(values)
        self.version = version


@dataclass(eq=False)
class _BatchPart:
    """Consecutive rows of a query that are scored in one batch. `done` receives their scores or an error."""

    query: Query
    rows: pa.Table | ObjectRows | Rows
    done: asyncio.Future

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """Return a value that is equal for parts that can be scored together."""
        parts = self.rows, self.query.user
        schemas = [None if isinstance(part, Rows | None) else part.schema for part in parts]
        return self.query.scorer, self.query.program, self.query.split, type(self.rows), schemas


class Batcher:
    """Queue of rows to score; rows that arrive while a batch is being scored form the next batch.

    An idle batcher scores immediately, and batches grow with the load. (By default, `@serve.batch` waits up to 10 ms.)
    By default, the event loop scores, because a replica has one core, and handing rows to a thread takes longer than
    scoring a few rows. With table shards, threads score, so that requests are read and scored while lookups wait.

    Args:
        budget_s: Approximate maximum time of a batch in seconds. Larger requests are scored in parts, between
            which the event loop receives and answers other requests.
        observe: Function that is called with the number of rows of each batch.
        threads: Number of threads that score, each one batch at a time; 0: the event loop scores.

    Attributes:
        waiting: Number of rows that wait or are being scored.
    """

    def __init__(self, budget_s: float = 0.02, observe: Callable[[int], object] = lambda rows: None, threads: int = 0):
        self._budget_s, self._observe = budget_s, observe
        self._queue: deque[_BatchPart | Callable[[], object]] = deque()
        self._row_s = budget_s / 1024  # seconds per row, averaged over recent batches
        self._threads = ThreadPoolExecutor(threads, "score") if threads else None
        self._running, self._max_running = 0, threads or 1  # number of tasks that take batches from the queue
        self._in_threads = 0  # number of batches that threads are scoring
        self.waiting = 0

    def call_between(self, action: Callable[[], object]) -> None:
        """Call a function that may change a model once the rows that now wait are scored.

        This method must be called in the event loop. The function must not raise an error.
        """
        if self._running:
            self._queue.append(action)
        else:
            action()

    async def score(self, query: Query) -> VersionedScores:
        """Return the scores of a query's rows, as Scorer.score does.

        Raises:
            RefusedRequest: Too many rows are waiting.
            DataError: A column or value is missing or does not fit the model.
            UnavailableError: A table shard is unavailable or late.
        """
        rows, max_rows = query.rows, self._max_batch_rows
        if self.waiting and self.waiting + len(rows) > MAX_QUEUED_ROWS:
            what = f"{self.waiting:,} rows are waiting, in addition to the {len(rows):,} of this request"
            raise make_busy_refusal(what, f"at most {MAX_QUEUED_ROWS:,} waiting rows")
        self.waiting += len(rows)
        loop, is_whole = asyncio.get_running_loop(), len(rows) <= max_rows
        parts = [rows] if is_whole else [rows[at : at + max_rows] for at in range(0, len(rows), max_rows)]
        pieces = [_BatchPart(query, part, loop.create_future()) for part in parts]
        try:
            self._queue.extend(pieces)
            if self._running < self._max_running:
                self._running += 1
                loop.create_task(self._run())
            if is_whole:
                return await pieces[0].done
            scores = await asyncio.gather(*(piece.done for piece in pieces))
            return VersionedScores([np.concatenate(each) for each in zip(*scores, strict=True)], scores[0].version)
        finally:
            self.waiting -= len(rows)
            for piece in pieces:  # not needed if the client has disconnected or a row is invalid
                piece.done.cancel()

    @property
    def _max_batch_rows(self) -> int:
        return max(MIN_FULL_BATCH_ROWS, int(self._budget_s / self._row_s))

    async def _run(self) -> None:
        """Score batches until no more parts can be taken from the queue."""
        try:
            while self._queue:
                for _ in range(2):  # lets the event loop receive and then read requests that have arrived
                    await asyncio.sleep(0)
                began, batch = perf_counter(), self._take_batch()
                if not batch:  # clients have disconnected, another task has the rows, or an action waits for threads
                    return
                if self._threads:
                    self._in_threads += 1
                    try:
                        results = await asyncio.get_running_loop().run_in_executor(self._threads, self._score, batch)
                    finally:
                        self._in_threads -= 1
                else:
                    results = self._score(batch)
                for piece, result in zip(batch, results, strict=True):
                    done: Any = piece.done
                    if not done.done():  # else the client has disconnected while a thread scored
                        (done.set_exception if isinstance(result, Exception) else done.set_result)(result)
                seconds, rows = perf_counter() - began, sum(len(piece.rows) for piece in batch)
                self._observe(rows)
                if rows >= MIN_FULL_BATCH_ROWS:
                    self._row_s += (seconds / rows - self._row_s) / 8
        finally:
            self._running -= 1

    def _take_batch(self) -> list[_BatchPart]:
        """Call functions at the head of the queue; return the next parts of one kind, or [] if none can be scored."""
        batch, rows, max_rows = [], 0, self._max_batch_rows
        while self._queue:
            piece = self._queue[0]
            if not isinstance(piece, _BatchPart):
                if batch or self._in_threads:
                    break
                self._queue.popleft()
                piece()
                continue
            if piece.done.cancelled():
                self._queue.popleft()
                continue
            rows += len(piece.rows)
            if batch and (rows > max_rows or piece.kind != batch[0].kind):
                break
            batch.append(piece)
            self._queue.popleft()
        return batch

    def _score(self, batch: list[_BatchPart]) -> list[VersionedScores | Exception]:
        """Return the scores or the error of each part of a batch."""
        parts = [piece.rows for piece in batch]
        batch[0].query.scorer.lookups.take_missing_shards()  # discard the result of a batch that failed
        try:
            scores = batch[0].query.score(parts, [piece.query.user for piece in batch])
        except DataError as error:
            if len(batch) == 1:
                return [_to_query_error(batch[0]) or error]
            return [self._score([piece])[0] for piece in batch]
        except Exception as error:
            return [error] * len(batch)
        scorer = batch[0].query.scorer
        missing, start = scorer.lookups.take_missing_shards(), 0
        results: list[VersionedScores | Exception] = []
        for piece in batch:
            stop = start + len(piece.rows)
            results.append(VersionedScores((values[start:stop] for values in scores), scorer.version))
            piece.query.missing_shards.update(missing)
            start = stop
        return results


def make_busy_refusal(what: str, expected: str | None = None) -> RefusedRequest:
    """Return the refusal, with status 429 and Retry-After, of a request that the client can retry later."""
    error = RunError(what, where="the service", expected=expected, do=f"retry after {RETRY_AFTER_S} s")
    return RefusedRequest(429, error, **{"Retry-After": str(RETRY_AFTER_S)})


def _to_query_error(piece: _BatchPart) -> DataError | None:
    """Return a failed part's DataError with row numbers of its query; None for a whole query or if there is none."""
    if piece.rows is piece.query.rows:
        return None
    try:
        piece.query.score([piece.query.rows], [piece.query.user])
    except Exception as error:  # on other errors, such as a missing table shard, the error of the part is reported
        return error if isinstance(error, DataError) else None
    return None
