"""Which version a service's replicas answer with: agreed on by one actor that all of them follow.

A promotion has two phases. All replicas load the new export next to the old one; when every one of them has
it, with checksums and golden rows compared, all answer with it. If one cannot, none changes.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, time_ns
from typing import Literal

from raytrec.common.errors import RaytrecError, RunError

FOLLOW_S = 5.0  # after which a replica that has nothing to do asks again
GONE_S = 15.0  # after which a replica that has not asked is taken for ended
LOAD_S = 1800.0  # that loading may take


@dataclass(frozen=True)
class Order:
    """What replicas are to do; orders are numbered."""

    number: int
    kind: Literal["stay", "prepare", "commit", "forget"] = "stay"
    uri: str = ""
    """prepare, commit: of the export."""
    version: str = ""
    """commit: its version."""


@dataclass(frozen=True)
class Report:
    """What a replica has done.

    Attributes:
        done: the number of the last order that it has carried out; -1: none.
        uri, version: of what it answers with. prepared: version that it could answer with.
        error: why it could not carry out the order.
    """

    done: int
    uri: str
    version: str
    prepared: str | None = None
    error: RaytrecError | None = None


@dataclass
class Seen:
    """A replica's last report, and when it asked last."""

    report: Report
    at: float = field(default_factory=monotonic)


class Coordinator:
    """An actor; its methods are called by replicas, which may end at any time.

    Args:
        uri: what new replicas load, until another is promoted.
    """

    def __init__(self, uri: str):
        self._uri = uri
        self._before: str | None = None
        # A process that is started in the place of another gives no number again.
        self._order, self._changed = Order(time_ns()), asyncio.Event()
        self._replicas: dict[str, Seen] = {}
        self._busy = asyncio.Lock()

    async def uri(self) -> str:
        """What a new replica loads."""
        return self._uri

    async def follow(self, replica: str, report: Report) -> Order:
        """The order after the one that a replica has carried out; the same when there is none for a while."""
        if self._order.kind == "stay" and report.done not in (-1, self._order.number):
            self._uri = report.uri  # it was promoted while another process was the coordinator
        self._replicas[replica] = Seen(report)
        if report.done == self._order.number:
            changed = self._changed
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), FOLLOW_S)
            self._replicas[replica] = Seen(report)
        return self._order

    async def versions(self) -> dict[str, str]:
        """Replica → the version that it answers with, of those that are there."""
        return {name: seen.report.version for name, seen in self._live().items()}

    async def promote(self, uri: str | None) -> str:
        """Has all replicas answer with an export; the version, when all of them do.

        Args:
            uri: None: the one before.

        Raises:
            RunError: it cannot be used, and all replicas answer as before.
        """
        uri = uri or self._before
        if uri is None:
            raise RunError("there is no version before this one", where="--rollback", expected="a promotion")
        if self._busy.locked():
            raise RunError("another promotion is under way", where=uri, do="wait for its end")
        async with self._busy:
            self._tell("prepare", uri)
            prepared = await self._carried_out()
            failed = [(name, seen.report) for name, seen in prepared.items() if seen.report.error]
            versions = {seen.report.prepared for seen in prepared.values()}
            if failed or len(versions) != 1:
                self._tell("forget")
                other = RunError("replicas have loaded different files", where=uri)
                raise failed[0][1].error if failed else other
            (version,) = versions
            if uri != self._uri:
                self._uri, self._before = uri, self._uri
            self._tell("commit", uri, version)
            await self._carried_out()
            return version

    def _tell(self, kind: Literal["prepare", "commit", "forget"], *of: str) -> None:
        self._order = Order(self._order.number + 1, kind, *of)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _carried_out(self) -> dict[str, Seen]:
        """The replicas that are there, when all of them have carried out the order.

        Raises:
            RunError: it takes too long, or there are none.
        """
        began = monotonic()
        while monotonic() - began < LOAD_S:
            live = self._live()
            if live and all(seen.report.done == self._order.number for seen in live.values()):
                return live
            if not live and monotonic() - began > 2 * GONE_S:
                break
            await asyncio.sleep(0.05)
        self._tell("forget")
        raise RunError("replicas do not answer", where="the service", do="see its log")

    def _live(self) -> dict[str, Seen]:
        """Replicas that still ask."""
        now = monotonic()
        for name, seen in list(self._replicas.items()):
            if now - seen.at > GONE_S:
                del self._replicas[name]
        return dict(self._replicas)
