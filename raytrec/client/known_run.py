"""A handle to a run identified by its folder alone: the cluster answers every query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raytrec.driver.progress_log import for_people


class Seen:
    """A run on the cluster, known by its folder.

    Args:
        way: ByClient or ByJob, how the cluster is asked.
        folder: of the run.
        polls_s: how often news are worth asking for.
    """

    counts_bytes = True  # of files: what `since` says

    def __init__(self, way: Any, folder: str, polls_s: float):
        self._way, self._folder, self.polls_s = way, folder, polls_s

    def folder(self) -> str:
        return self._folder

    def news(self, since: dict[str, int]) -> dict[str, Any]:
        """As `queries.news`."""
        return self._way.call("news", self._folder, since)

    def logs(self) -> Iterator[str]:
        """The run's log so far."""
        yield from for_people([self.news({})["log"]])

    def stop(self) -> None:
        self._way.call("stop", self._folder)
