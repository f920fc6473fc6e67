"""Which version a service's replicas answer with: agreed on by one actor that all of them follow.

A promotion has two phases. All replicas load the new export next to the old one; when every one of them has
it, with checksums and golden rows compared, all answer with it. If one cannot, none changes.

An order states what holds, not what changes, so it does not matter which ones a replica has missed: one that
loaded while another version was promoted, or that follows a coordinator that was started again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from prometheus_client.metrics_core import Metric

from raytrec.common.errors import RaytrecError, RunError
from raytrec.serving.figures import write_metrics

log = logging.getLogger(__name__)

FOLLOW_S = 5.0  # after which a replica that has nothing to do asks again
GONE_S = 15.0  # after which a replica that has not asked is taken for ended
LOAD_S = 1800.0  # that loading may take
MAX_ENDED = 1  # replicas that may end while an export is loaded: with more, loading is taken for the cause


@dataclass(frozen=True)
class Export:
    """Where an export is, and its manifest's version."""

    uri: str
    version: str


@dataclass(frozen=True)
class Order:
    """What replicas are to do; orders are numbered.

    Attributes:
        answer: the export to answer with.
        prepare: the URI of one to load next to it; None: none.
    """

    number: int
    answer: Export
    prepare: str | None = None


@dataclass(frozen=True)
class Report:
    """What a replica has done.

    Attributes:
        done: the number of the last order that it has carried out.
        version: that it answers with. prepared: that it could answer with.
        error: why it could not carry out the order.
        figures: what it has counted.
    """

    done: int
    version: str
    prepared: str | None = None
    error: RaytrecError | None = None
    figures: tuple[Metric, ...] = ()


class Coordinator:
    """An actor; its methods are called by replicas, which may end at any time.

    Args:
        export: what replicas answer with, until another is promoted.
        read, keep: read and write what it needs to know when Ray starts it again.
    """

    def __init__(self, export: Export, read: Callable[[], bytes | None], keep: Callable[[bytes], None]):
        self._keep = keep
        self._now, self._before, self._declared, again = export, None, export, read()
        if again:
            of_before = (each and Export(**each) for each in json.loads(again))
            self._now, self._before, self._declared = of_before
        else:
            self._remember(export, None, export)
        # When all replicas have reported, which may be there when this begins again.
        self._complete = monotonic() + 2 * FOLLOW_S if again else 0.0
        # Other numbers than before it was started again, which replicas may still report.
        self._order, self._changed = Order(int(time.time() * 1000), self._now), asyncio.Event()
        self._replicas: dict[str, tuple[Report, float]] = {}  # last report of each, and its time
        self._news = ""
        self._busy = asyncio.Lock()

    async def exports(self) -> tuple[Export, Export | None]:
        """Return the export that answers, which a new replica loads, and the one that answered before."""
        return self._now, self._before

    async def fall_back(self, failed: Export, why: str) -> None:
        """Answer with the export before the current one, which a starting replica could not load.

        Args:
            failed: Export that could not be loaded.
            why: Reason.

        Raises:
            RunError: Other replicas still answer with it, or have ended less than GONE_S ago.
        """
        if failed == self._now and self._before:
            if self._live():
                raise RunError(why, where=failed.uri, do="promote another export")
            self._remember(self._before, failed, self._declared)
            self._news = f"{self._now.version} answers again, because {failed.uri} cannot be loaded: {why}"
            log.warning(self._news)
            self._tell()

    async def news(self) -> str:
        """Return the last change of the version that answers, for the console; empty: none."""
        return self._news

    async def declare(self, export: Export) -> None:
        """What a deployment names: promoted, unless it is what the last deployment has named.

        Raises:
            RaytrecError: as `promote`.
        """
        if export == self._declared:
            return
        if self._live():
            await self.promote(export.uri)
        else:
            self._now = export
            self._tell()
        self._remember(self._now, self._before, export)

    async def follow(self, replica: str, report: Report, given: int) -> Order:
        """The order after the one that a replica was given; the same when there is none for a while."""
        await self.hear(replica, report)
        if given == self._order.number:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), FOLLOW_S)
        return self._order

    async def hear(self, replica: str, report: Report) -> None:
        """Takes a replica's report."""
        self._replicas[replica] = report, monotonic()

    async def versions(self) -> dict[str, str]:
        """Replica → the version that it answers with, of those that are there."""
        return {name: report.version for name, report in self._live().items()}

    async def metrics(self) -> bytes:
        """The text of /metrics, of all replicas as they have last reported: all through here, as a replica's
        counter would fall if the replica itself answered one scrape and another one the next."""
        return write_metrics({name: report.figures for name, report in self._live().items()})

    async def overview(self) -> dict[str, Any]:
        """Return the version of each replica, and the version that answered before."""
        return {"replicas": await self.versions(), "before": self._before and self._before.version}

    async def promote(self, uri: str | None) -> str:
        """Has all replicas answer with an export; the version, when all of them do.

        Args:
            uri: None: the one before.

        Raises:
            RunError: it cannot be used, and all replicas answer as before.
        """
        if not uri and self._before:
            uri = self._before.uri
        if not uri:
            raise RunError("there is no version before this one", where="--rollback", expected="a promotion")
        if self._busy.locked():
            raise RunError("another promotion is under way", where=uri, do="wait for its end")
        async with self._busy:
            self._tell(prepare=uri)
            prepared = await self._carried_out()
            errors = [report.error for report in prepared.values() if report.error]
            versions = {report.prepared for report in prepared.values()}
            if errors or len(versions) != 1:
                self._tell()
                raise errors[0] if errors else RunError("replicas have loaded different files", where=uri)
            export = Export(uri, versions.pop())
            if export != self._now:
                self._remember(export, self._now, self._declared)
                self._news = f"{export.version} answers ({uri})"
            self._tell()
            await self._carried_out()
            return export.version

    def _remember(self, now: Export, before: Export | None, declared: Export) -> None:
        """Keeps them first, so that where this fails nothing has changed."""
        self._keep(json.dumps([each and asdict(each) for each in (now, before, declared)]).encode())
        self._now, self._before, self._declared = now, before, declared

    def _tell(self, prepare: str | None = None) -> None:
        self._order = Order(self._order.number + 1, self._now, prepare)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _carried_out(self) -> dict[str, Report]:
        """The replicas that are there, when all of them have carried out the order.

        Raises:
            RunError: it takes too long, replicas end meanwhile, or there are none.
        """
        began, seen_ones = monotonic(), set[str]()
        while monotonic() - began < LOAD_S:
            live = self._live()
            seen_ones |= live.keys()
            if self._order.prepare and len(seen_ones - live.keys()) > MAX_ENDED:
                where = self._order.prepare
                self._tell()
                raise RunError(
                    f"{MAX_ENDED + 1} replicas ended while they loaded it, and all others answer as before",
                    where=where,
                    do="see the service's log; an export may need more memory than there is",
                )
            done = all(report.done == self._order.number for report in live.values())
            if live and done and monotonic() > self._complete:
                return live
            if not live and monotonic() - began > 2 * GONE_S:
                break
            await asyncio.sleep(0.05)
        self._tell()
        raise RunError("replicas do not answer", where="the service", do="see its log")

    def _live(self) -> dict[str, Report]:
        """Return the last report of each replica that still reports."""
        oldest = monotonic() - GONE_S
        self._replicas = {name: seen for name, seen in self._replicas.items() if seen[1] > oldest}
        return {name: report for name, (report, _) in self._replicas.items()}
