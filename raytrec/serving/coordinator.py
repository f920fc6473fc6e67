"""Coordinator actor, through which a service's replicas agree on the served version.

A promotion has two phases. First, all replicas load the new export next to the current one, and compare checksums and
golden rows. When all replicas have loaded the export, all serve it. If a replica fails, all keep the current export.

A command states the desired state, not a change, so a replica may miss commands. A replica misses commands while it
loads an export and another version is promoted, or when the coordinator is restarted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from math import inf
from time import monotonic
from typing import Any

from raytrec.common.errors import RunError
from raytrec.serving.replica_metrics import write_metrics
from raytrec.serving.replica_state import Challenger, Export, ReplicaCommand, ReplicaState

log = logging.getLogger(__name__)

NAMESPACE = "raytrec-serve"  # Ray namespace of coordinator actors
FOLLOW_INTERVAL_S = 5.0  # interval at which a replica without a new command asks again
REPLICA_TIMEOUT_S = 15.0  # time without a report after which a replica counts as ended
LOAD_TIMEOUT_S = 1800.0  # timeout of loading an export on all replicas
MAX_ENDED_REPLICAS = 1  # if more replicas end while an export is loaded, the promotion is aborted


def get_coordinator_name(name: str) -> str:
    """Return the name of a service's coordinator actor."""
    return f"raytrec-serve-{name}"


class Coordinator:
    """Actor that determines the version that replicas serve. Replicas report to it, and may end at any time.

    Args:
        export: Export that replicas serve until another export is promoted.
        read_state: Function that returns the state stored before Ray restarted the actor, or None.
        store_state: Function that stores the state for a restart.
    """

    def __init__(self, export: Export, read_state: Callable[[], bytes | None], store_state: Callable[[bytes], None]):
        self._store, saved_state = store_state, read_state()
        if saved_state:
            *exports, challenger = json.loads(saved_state)
            self._current, self._previous, self._declared = (each and Export(**each) for each in exports)
            self._challenger = challenger and Challenger(**challenger)
        else:
            self._remember(export, None, export)
        # Time at which all existing replicas have reported; after a restart, replicas already exist.
        self._complete = monotonic() + 2 * FOLLOW_INTERVAL_S if saved_state else 0.0
        # Commands are numbered from the current time, because replicas may still report numbers from before a restart.
        self._order = ReplicaCommand(time.time_ns(), self._current, None, self._challenger)
        self._replicas: dict[str, tuple[ReplicaState, float]] = {}  # last report of each replica, and its time
        self._news = ""
        self._busy, self._changed = asyncio.Lock(), asyncio.Event()

    async def exports(self) -> tuple[Export, Export | None]:
        """Return the current export, which a new replica loads, and the previous export, or None."""
        return self._current, self._previous

    async def fall_back(self, failed: Export, why: str) -> None:
        """Return to the previous export, without a challenger, because a starting replica cannot load the current one.

        Args:
            failed: Export that could not be loaded. The call is ignored if another export is the current one, or if
                there is no previous export.
            why: Reason why the export could not be loaded.

        Raises:
            RunError: Other replicas, which serve the failed export, have reported within REPLICA_TIMEOUT_S seconds.
        """
        if failed == self._current and self._previous:
            if self._live():
                raise RunError(why, where=failed.uri, do="promote another export")
            self._remember(self._previous, failed, self._declared)
            self._news = f"rolled back to {self._current.version}: {failed.uri} cannot be loaded: {why}"
            log.warning(self._news)
            self._publish_order()

    async def news(self) -> str:
        """Return the last message about a change of the version or a problem with deltas; "" if there is none."""
        return self._news

    async def declare(self, export: Export) -> None:
        """Make the export of a deployment the current one, unless the last deployment named the same export.

        If replicas exist, and neither this nor the current export is a folder of deltas, the export is promoted.
        Otherwise, replicas load the export when they start.

        Raises:
            RaytrecError: The promotion failed; see `promote`.
        """
        if export == self._declared:
            return
        if self._live() and export.version and self._current.version:
            await self.promote(export.uri)
        else:
            self._current, self._challenger = export, None
            self._publish_order()
        self._remember(self._current, self._previous, export, self._challenger)

    async def follow(self, replica: str, report: ReplicaState, last_command: int) -> ReplicaCommand:
        """Record a replica's report, and return the next command, or the last one if none follows in FOLLOW_INTERVAL_S.

        Args:
            replica: Id of the replica.
            report: State of the replica.
            last_command: Number of the last command that the replica received.
        """
        await self.record_report(replica, report)
        if last_command == self._order.number:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), FOLLOW_INTERVAL_S)
        beside = (each.connections for each in self._live().values() if each.node == report.node)
        counts = [count for count in beside if count is not None]
        # The only replica of a node keeps all connections, because its reported count may be outdated.
        return replace(self._order, fair_connections=sum(counts) / len(counts) if len(counts) > 1 else inf)

    async def record_report(self, replica: str, report: ReplicaState) -> None:
        """Record a replica's report, and update `news` if the replica's problem with deltas has changed or ended."""
        before = self._replicas[replica][0].problem if replica in self._replicas else None
        self._replicas[replica] = report, monotonic()
        if report.problem != before:
            reports = {replica: report} | self._live()
            news = [f"replica {name} keeps {r.version}: {r.problem}" for name, r in reports.items() if r.problem]
            self._news = news[0] if news else f"replica {replica} follows the run again"

    async def versions(self) -> dict[str, str]:
        """Return id → version of each replica that has reported within REPLICA_TIMEOUT_S."""
        return {name: report.version for name, report in self._live().items()}

    async def metrics(self) -> bytes:
        """Return the body of /metrics with the last reported metrics of all replicas, in Prometheus' text format.

        If replicas responded to scrapes in turn, counters would seem to fall. Therefore, all metrics pass through the
        coordinator.
        """
        return write_metrics({name: report.figures for name, report in self._live().items()})

    async def overview(self) -> dict[str, Any]:
        """Return a dict with the keys `replicas`, `before` and `challenger`.

        `replicas` is the result of `versions`, and `before` is the previous version or None. `challenger` is None, or a
        dict of the challenger's fields and `failed_replicas`, the ids of the replicas that could not load it.
        """
        failed = sorted(name for name, report in self._live().items() if report.challenger_error)
        challenger = self._challenger and asdict(self._challenger) | {"failed_replicas": failed}
        before = self._previous and self._previous.version
        return {"replicas": await self.versions(), "before": before, "challenger": challenger}

    async def promote(self, uri: str | None, share: float | None = None, shadow: bool = False) -> dict[str, Any]:
        """Make an export the current one or the challenger on all replicas, and return the new state.

        Args:
            uri: URI of the export; None: remove the challenger or, if there is no challenger, promote the previous
                export.
            share: Share of requests for the challenger, in (0, 1]; None: all requests with `shadow`. Without `share`
                and `shadow`, the export becomes the current one.
            shadow: True for a challenger in shadow mode.

        Returns:
            The dict of `overview`, with the current version as `version` and a message as `news`, once all replicas
            have the new state.

        Raises:
            RunError: There is no export to return to, another promotion is in progress, the challenger would be the
                current export, or the replicas do not respond.
            RaytrecError: A replica cannot load the export, or replicas have loaded different files. All replicas keep
                their version.
        """
        if not (uri or self._previous or self._challenger):
            expected = "a promotion before the rollback"
            raise RunError("there is no previous version and no challenger", where="the service", expected=expected)
        if self._busy.locked():
            raise RunError("another promotion is in progress", where=uri or "the service", do="retry after its end")
        async with self._busy:
            export = await self._prepare(uri or self._previous.uri) if uri or not self._challenger else self._current
            if share is None and not shadow:
                news = f"{export.version} ({export.uri}) serves all requests"
                self._remember(export, self._previous if export == self._current else self._current, self._declared)
            elif export.version != self._current.version:
                challenger = Challenger(export.uri, export.version, share or 1.0, "shadow" if shadow else "canary")
                news = f"{export.version} ({uri}) is the challenger: {challenger.mode}, share {challenger.share:g}"
                self._remember(self._current, self._previous, self._declared, challenger)
            else:
                self._publish_order()
                raise RunError(f"{export.version} is already the current version", where=uri, do="name another export")
            self._news = news
            self._publish_order()
            await self._wait_for_replicas()
            return await self.overview() | {"version": self._current.version, "news": news}

    async def _prepare(self, uri: str) -> Export:
        """Return an export once all replicas have loaded it.

        Raises:
            RaytrecError: A replica cannot load the export, or the replicas have loaded different versions.
        """
        self._publish_order(prepare=uri)
        prepared = await self._wait_for_replicas()
        errors = [report.error for report in prepared.values() if report.error]
        versions = {report.prepared for report in prepared.values()}
        if errors or len(versions) != 1:
            self._publish_order()
            what, do = "the replicas have loaded different versions", "write the export to a new folder, and promote it"
            raise errors[0] if errors else RunError(what, where=uri, do=do)
        return Export(uri, versions.pop())

    def _remember(
        self, current: Export, previous: Export | None, declared: Export, challenger: Challenger | None = None
    ) -> None:
        """Store the new state before adopting it, so that a failure to store it changes nothing."""
        state = (current, previous, declared, challenger)
        self._store(json.dumps([each and asdict(each) for each in state]).encode())
        self._current, self._previous, self._declared, self._challenger = state

    def _publish_order(self, prepare: str | None = None) -> None:
        self._order = ReplicaCommand(self._order.number + 1, self._current, prepare, self._challenger)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_replicas(self) -> dict[str, ReplicaState]:
        """Wait until all live replicas have executed the command, and return id → report of each replica.

        Raises:
            RunError: A replica takes longer than LOAD_TIMEOUT_S, more than MAX_ENDED_REPLICAS replicas end while they
                load an export, or there are no replicas.
        """
        began, seen_replicas = monotonic(), set[str]()
        while monotonic() - began < LOAD_TIMEOUT_S:
            live = self._live()
            seen_replicas |= live.keys()
            if self._order.prepare and len(seen_replicas - live.keys()) > MAX_ENDED_REPLICAS:
                what = f"{len(seen_replicas - live.keys())} replicas ended while they loaded the export"
                do = "read the log of the service; the export may need more memory than is available"
                error = RunError(f"{what}; all others keep their version", where=self._order.prepare, do=do)
                self._publish_order()
                raise error
            done = all(report.completed_command == self._order.number for report in live.values())
            if live and done and monotonic() > self._complete:
                return live
            if not live and monotonic() - began > 2 * REPLICA_TIMEOUT_S:
                break
            await asyncio.sleep(0.05)
        live = self._live()
        late = next((name for name, report in live.items() if report.completed_command != self._order.number), None)
        self._publish_order()
        what = f"replica {late} has not" if late else "the replicas have not"
        what = f"{what} completed the promotion within {LOAD_TIMEOUT_S:g} s" if live else "no replica responds"
        raise RunError(what, where="the service", do="read the log of the service")

    def _live(self) -> dict[str, ReplicaState]:
        """Return the last report of each replica that has reported within REPLICA_TIMEOUT_S."""
        oldest = monotonic() - REPLICA_TIMEOUT_S
        self._replicas = {name: report for name, report in self._replicas.items() if report[1] > oldest}
        return {name: report for name, (report, _) in self._replicas.items()}
