"""Queue of completed requests that a shadow challenger scores while the replica is idle."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from raytrec.common.errors import get_first_line
from raytrec.serving.replica_metrics import ReplicaMetrics

_log = logging.getLogger(__name__)
MAX_WAITING_BYTES = 2 << 20  # maximum total size of the bodies of waiting requests
IDLE_INTERVAL_S = 0.001  # interval at which the queue checks whether the replica is idle


class ShadowQueue:
    """Queue of completed requests that a challenger scores while no rows wait for a response.

    A request that would exceed MAX_WAITING_BYTES is dropped and counted. Errors are counted and never reach a client.

    Args:
        figures: Metrics of the replica.
        is_busy: Function that returns True if rows wait for a response.
    """

    def __init__(self, figures: ReplicaMetrics, is_busy: Callable[[], bool]):
        self._requests, self._is_busy = figures.shadow_requests, is_busy
        self._queue: deque[tuple[str, int, Callable[[], Awaitable[None]]]] = deque()
        self._waiting_bytes, self._warned = 0, ""

    def add(self, version: str, body_bytes: int, score: Callable[[], Awaitable[None]]) -> None:
        """Add a request to the queue, or drop the request if the queue is full. Must be called in the event loop.

        Args:
            version: Version of the challenger.
            body_bytes: Size of the request's body in bytes.
            score: Function that scores the request.
        """
        if self._waiting_bytes + body_bytes > MAX_WAITING_BYTES:
            self._requests.labels(version, "dropped").inc()
            return
        self._waiting_bytes += body_bytes
        self._queue.append((version, body_bytes, score))
        if len(self._queue) == 1:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Score requests until the queue is empty."""
        while self._queue:
            await asyncio.sleep(IDLE_INTERVAL_S)
            if self._is_busy():
                continue
            version, body_bytes, score = self._queue[0]
            try:
                await score()
                outcome = "scored"
            except Exception as error:
                outcome = "error"
                if version != self._warned:
                    self._warned = version
                    _log.warning("shadow scoring of a request by %s has failed: %s", version, get_first_line(error))
            self._queue.popleft()
            self._waiting_bytes -= body_bytes
            self._requests.labels(version, outcome).inc()
