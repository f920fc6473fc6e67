"""Rows of several requests, scored together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytrec.common.errors import RunError
from raytrec.data.assemble import Rows
from raytrec.scoring.manifest import ProgramName
from raytrec.scoring.scorer import Scorer
from raytrec.serving.bodies import Refused

RETRY_S = 1  # after which a request that was turned away may come again


@dataclass
class _Waiting:
    """A request's work: rows for a program of a scorer, or a call that goes alone."""

    scorer: Scorer
    program: ProgramName
    rows: Rows
    done: asyncio.Future


class Batcher:
    """Scores rows in one thread: those that come while it is busy are scored together after it. Nothing waits
    while it is idle, and batches grow with the load (`@serve.batch` waits for a time in both cases).

    Args:
        most_rows: of a batch, so that none takes long.
        most_waiting: rows that wait, beyond which requests are turned away.
    """

    def __init__(self, most_rows: int = 2048, most_waiting: int = 32_768):
        self._most_rows, self._most_waiting = most_rows, most_waiting
        self._queue: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self.waiting, self._busy = 0, False

    async def score(self, scorer: Scorer, program: ProgramName, rows: Rows) -> list[np.ndarray]:
        """As `Scorer.score` of these rows.

        Raises:
            Refused: too many rows wait.
        """
        self._admit(len(rows))
        work = _Waiting(scorer, program, rows, asyncio.get_running_loop().create_future())
        self._queue.append(work)
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().create_task(self._run())
        return await work.done

    async def call(self, rows: int, function: Callable[[], Any]) -> Any:
        """What a function gives that is called in the thread, for so many rows."""
        self._admit(rows)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        finally:
            self.waiting -= rows

    def _admit(self, rows: int) -> None:
        if self.waiting and self.waiting + rows > self._most_waiting:
            raise Refused(
                429,
                RunError(
                    f"{self.waiting:,} rows are waiting",
                    where="the service",
                    expected=f"at most {self._most_waiting:,}",
                    do=f"try again after {RETRY_S} s",
                ),
                **{"Retry-After": str(RETRY_S)},
            )
        self.waiting += rows

    async def _run(self) -> None:
        """Scores what is in the queue, until it is empty."""
        try:
            while self._queue:
                await self._score(self._next())
        finally:
            self._busy = False

    def _next(self) -> list[_Waiting]:
        """The first of the queue, and those after it that go together with it."""
        batch = [self._queue.popleft()]
        rows, first = len(batch[0].rows), batch[0]
        while self._queue:
            work = self._queue[0]
            rows += len(work.rows)
            if rows > self._most_rows or (work.scorer, work.program) != (first.scorer, first.program):
                break
            batch.append(self._queue.popleft())
        return batch

    async def _score(self, batch: list[_Waiting]) -> None:
        first, pieces = batch[0], [work.rows for work in batch]
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._thread, first.scorer.score, pieces, first.program
            )
        except Exception as error:
            for work in batch:
                work.done.set_exception(error) if not work.done.done() else None
            return
        finally:
            self.waiting -= sum(map(len, pieces))
        ends = np.cumsum([len(piece) for piece in pieces])[:-1]
        of_requests = zip(*(np.split(values, ends) for values in found), strict=True)
        for work, values in zip(batch, of_requests, strict=True):
            if not work.done.done():  # a client that has left cancels it
                work.done.set_result(list(values))
