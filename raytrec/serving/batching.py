"""Rows of several requests, scored together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

from raytrec.common.errors import DataError, RunError
from raytrec.scoring.manifest import ProgramName
from raytrec.scoring.scorer import Scorer
from raytrec.serving.bodies import Asked, Refused

RETRY_S = 1  # after which a request that was turned away may come again
LEAST_ROWS = 32  # that are scored together, however long they take


@dataclass(eq=False)
class _Work:
    """Some rows of a request.

    Attributes:
        asked: the request. rows: those of it, as it has them.
        done: gets their scores.
    """

    scorer: Scorer
    program: ProgramName
    asked: Asked
    rows: Any
    done: asyncio.Future

    def joins(self, other: _Work) -> bool:
        """Whether its rows can be scored together with another's."""
        if (self.scorer, self.program) != (other.scorer, other.program):
            return False
        if self.asked.user is not None or other.asked.user is not None:
            return False
        if isinstance(self.rows, list) or isinstance(other.rows, list):
            return type(self.rows) is type(other.rows)
        return self.rows.schema.equals(other.rows.schema)


class Batcher:
    """Scores rows in the event loop: those that come while it scores are scored together after that. Nothing
    waits while it is idle, and batches grow with the load (`@serve.batch` waits for a time in both cases).

    It takes no thread: a replica has one core, and handing rows over takes longer than scoring a few.

    Args:
        budget_s: what is scored together takes about as long at most. A request of more rows is scored in
            parts, between which others have their turn.
        most_waiting: rows that wait, beyond which requests are turned away.
        observe: is given the number of rows of each batch.

    Attributes:
        waiting: rows that wait.
    """

    def __init__(
        self,
        budget_s: float = 0.02,
        most_waiting: int = 32_768,
        observe: Callable[[int], object] = lambda rows: None,
    ):
        self._budget_s, self._most_waiting, self._observe = budget_s, most_waiting, observe
        self._queue: deque[_Work] = deque()
        self._row_s = budget_s / 1024  # that a row takes, by the last batches
        self._running = False
        self.waiting = 0

    async def score(self, scorer: Scorer, program: ProgramName, asked: Asked) -> list[np.ndarray]:
        """Scores of a request's rows, as Scorer.score; or of a user's candidates, as Scorer.rank.

        Raises:
            Refused: too many rows wait. DataError: what is wrong with the rows.
        """
        rows = asked.given
        self._admit(len(rows))
        loop, most = asyncio.get_running_loop(), self._most_rows
        works = [
            _Work(scorer, program, asked, part, loop.create_future())
            for part in ([rows] if len(rows) <= most else _parts(rows, most))
        ]
        try:
            self._queue.extend(works)
            if not self._running:
                self._running = True
                loop.create_task(self._run())
            if len(works) == 1:
                return await works[0].done
            parts = await asyncio.gather(*(work.done for work in works))
            return [np.concatenate(each) for each in zip(*parts, strict=True)]
        finally:
            self.waiting -= len(rows)
            for work in works:  # what a client that has left, or one with a wrong row, no longer needs
                work.done.cancel()

    @property
    def _most_rows(self) -> int:
        return max(LEAST_ROWS, int(self._budget_s / self._row_s))

    def _admit(self, rows: int) -> None:
        if self.waiting and self.waiting + rows > self._most_waiting:
            raise too_busy(f"{self.waiting:,} rows are waiting", f"at most {self._most_waiting:,}")
        self.waiting += rows

    async def _run(self) -> None:
        """Scores what is in the queue, until it is empty."""
        try:
            while self._queue:
                for _ in range(2):  # requests that have come are received first, then read
                    await asyncio.sleep(0)
                began, batch = perf_counter(), self._next()
                self._score(batch)
                seconds, rows = perf_counter() - began, sum(len(work.rows) for work in batch)
                self._observe(rows)
                if rows >= LEAST_ROWS:
                    self._row_s += (seconds / rows - self._row_s) / 8
        finally:
            self._running = False

    def _next(self) -> list[_Work]:
        """The first of the queue, and those after it that go together with it."""
        batch, rows, most = [], 0, self._most_rows
        while self._queue:
            work = self._queue[0]
            if work.done.cancelled():
                self._queue.popleft()
                continue
            rows += len(work.rows)
            if batch and (rows > most or not work.joins(batch[0])):
                break
            batch.append(self._queue.popleft())
        return batch

    def _score(self, batch: list[_Work]) -> None:
        """Gives a batch its scores, or each request its error."""
        if not batch:
            return
        first = batch[0]
        try:
            found = _scores(first, _joined([work.rows for work in batch]))
        except DataError as error:
            if len(batch) == 1:
                whole = first.rows is first.asked.given
                first.done.set_exception(error if whole else _of_request(first) or error)
            for work in batch if len(batch) > 1 else ():
                self._score([work])
            return
        except Exception as error:
            for work in batch:
                work.done.set_exception(error)
            return
        if len(batch) == 1:
            first.done.set_result(found)
            return
        start = 0
        for work in batch:
            stop = start + len(work.rows)
            work.done.set_result([values[start:stop] for values in found])
            start = stop


def too_busy(what: str, expected: str | None = None) -> Refused:
    """The answer to a request that may come again later."""
    error = RunError(what, where="the service", expected=expected, do=f"try again after {RETRY_S} s")
    return Refused(429, error, **{"Retry-After": str(RETRY_S)})


def _parts(rows: Any, most: int) -> list[Any]:
    cut = rows.slice if isinstance(rows, pa.Table) else lambda at, size: rows[at : at + size]
    return [cut(at, most) for at in range(0, len(rows), most)]


def _joined(parts: list[Any]) -> Any:
    """Rows of several requests: lists, or tables of one schema."""
    if len(parts) == 1:
        return parts[0]
    return [row for part in parts for row in part] if isinstance(parts[0], list) else pa.concat_tables(parts)


def _scores(work: _Work, rows: Any) -> list[np.ndarray]:
    scorer = work.scorer
    if work.asked.user is not None:
        return scorer.rank(work.asked.user, rows)
    return scorer.score([scorer.reader_of(work.program).read(rows)], work.program)


def _of_request(work: _Work) -> DataError | None:
    """What is wrong with a request that is scored in parts: its place is counted from the first of them."""
    try:
        if work.asked.rows is not None:
            work.scorer.reader_of(work.program).read(work.asked.rows)
        else:
            work.scorer.rank(work.asked.user, work.asked.candidates)
    except DataError as error:
        return error
    return None
