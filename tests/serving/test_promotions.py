"""Promotions by the coordinator, with replicas that only report their state, without Ray."""

import asyncio
import re
from dataclasses import replace

import pytest

from raytrec.common.errors import RunError
from raytrec.serving.coordinator import Coordinator
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.serving.replica_state import Challenger, Export, ReplicaState

FIRST, SECOND = Export("a", "films-1"), Export("b", "films-2")


class InMemoryState:
    """In-memory replacement of the coordinator's persistent state."""

    value = None

    def read(self):
        return self.value

    def write(self, value):
        self.value = value


def make_coordinator(kept=None):
    kept = kept or InMemoryState()
    return Coordinator(FIRST, kept.read, kept.write)


async def run_replica(of, name, loads=(FIRST, SECOND), failing=None, orders=None, challenger_error=None):
    """Follow the coordinator and report every order as carried out, apart from the errors.

    Args:
        of: Coordinator.
        name: Name of the replica.
        loads: Exports that the replica can load.
        failing: Error of loading another export.
        orders: List to which orders are appended.
        challenger_error: Error of loading a challenger.
    """
    versions, report, given = {each.uri: each.version for each in loads}, ReplicaState(-1, FIRST.version), -1
    while True:
        order = await of.follow(name, report, given)
        (orders if orders is not None else []).append(order)
        given, prepared = order.number, versions.get(order.prepare)
        error = failing if order.prepare and not prepared else None
        challenger = challenger_error if order.challenger else None
        report = ReplicaState(order.number, order.answer.version, prepared, error, challenger)


def run_with_replicas(scenario, *replicas):
    """Run a scenario while replicas follow the coordinator, from 0.1 s after their start."""

    async def whole():
        following = [asyncio.create_task(each) for each in replicas]
        await asyncio.sleep(0.1)
        try:
            return await asyncio.wait_for(scenario, 20)
        finally:
            for task in following:
                task.cancel()

    return asyncio.run(whole())


def test_problems_of_replicas_are_announced():
    async def report_problems():
        made, problem, seen = make_coordinator(), "delta 3 cannot be applied: it is missing", []
        for each in (None, problem, problem, None):
            await made.record_report("one", ReplicaState(-1, "films-7", problem=each))
            seen.append(await made.news())
        return seen

    kept = "replica one keeps films-7: delta 3 cannot be applied: it is missing"
    assert asyncio.run(report_problems()) == ["", kept, kept, "replica one follows the run again"]


def test_promotion_and_rollback_reach_all_replicas():
    made = make_coordinator()

    async def scenario():
        for nothing in (None, ""):
            with pytest.raises(RunError, match="no previous version"):
                await made.promote(nothing)
        assert (await made.promote("b"))["version"] == "films-2"
        assert await made.versions() == {"one": "films-2", "two": "films-2"}
        assert (await made.promote(None))["version"] == "films-1"
        return await made.versions()

    found = run_with_replicas(scenario(), run_replica(made, "one"), run_replica(made, "two"))
    assert found == {"one": "films-1", "two": "films-1"}


def test_failed_load_on_one_replica_cancels_the_promotion():
    made, orders = make_coordinator(), []

    async def scenario():
        with pytest.raises(RunError, match="no room"):
            await made.promote("b")
        await asyncio.sleep(0.1)
        return await made.versions(), (await made.exports())[0]

    refusing = run_replica(made, "two", loads=[FIRST], failing=RunError("no room"))
    found = run_with_replicas(scenario(), run_replica(made, "one", orders=orders), refusing)
    assert found == ({"one": "films-1", "two": "films-1"}, FIRST)
    assert {order.answer for order in orders} == {FIRST}


async def run_crashing_replicas(of, name):
    """Run replicas that end when they load an export; each one replaces the previous one."""
    for number in range(99):
        versions = ReplicaState(-1, FIRST.version)
        order = await of.follow(f"{name} {number}", versions, -1)
        while not order.prepare:
            order = await of.follow(f"{name} {number}", ReplicaState(order.number, FIRST.version), order.number)


def test_promotion_fails_if_the_export_ends_replicas(monkeypatch):
    for name, seconds in (("FOLLOW_INTERVAL_S", 0.1), ("REPLICA_TIMEOUT_S", 0.3)):
        monkeypatch.setattr(f"raytrec.serving.coordinator.{name}", seconds)
    made = make_coordinator()

    async def scenario():
        with pytest.raises(RunError, match=r"\d+ replicas ended while they loaded the export") as error:
            await made.promote("b")
        assert error.value.where == "b"
        await asyncio.sleep(0.5)
        return set((await made.versions()).values()), await made.exports()

    found = run_with_replicas(scenario(), run_replica(made, "one"), run_crashing_replicas(made, "two"))
    assert found == ({FIRST.version}, (FIRST, None))


def test_restarted_coordinator_keeps_the_promotion():
    kept = InMemoryState()
    first, orders = make_coordinator(kept), []

    run_with_replicas(first.promote("b"), run_replica(first, "one", orders=orders))
    again = make_coordinator(kept)
    assert asyncio.run(again.exports()) == (SECOND, FIRST)
    assert asyncio.run(again.overview())["before"] == FIRST.version
    last = orders[-1].number
    order = asyncio.run(again.follow("one", ReplicaState(last, SECOND.version), last_command=last))
    assert order.number > last and order.answer == SECOND, "the restarted coordinator repeats an order number"


def test_challenger_reaches_all_replicas_until_a_rollback_or_promotion():
    made, orders = make_coordinator(), []

    async def scenario():
        result = await made.promote("b", 0.1)
        canary = Challenger(SECOND.uri, SECOND.version, 0.1, "canary")
        assert result["news"] == "films-2 (b) is the challenger: canary, share 0.1"
        assert (result["version"], result["challenger"]) == ("films-1", vars(canary) | {"failed_replicas": ["two"]})
        assert await made.versions() == {"one": "films-1", "two": "films-1"}
        assert orders[-1].challenger == canary and [order.prepare for order in orders[-2:]] == ["b", None]
        result = await made.promote("b", None, True)
        assert orders[-1].challenger == Challenger("b", "films-2", 1.0, "shadow") and result["version"] == "films-1"
        result = await made.promote(None)
        assert result["news"] == "films-1 (a) serves all requests"
        assert orders[-1].challenger is None and (await made.exports()) == (FIRST, None)
        await made.promote("b", 0.5)
        result = await made.promote("b")
        assert (result["version"], result["challenger"], orders[-1].challenger) == ("films-2", None, None)
        assert (await made.promote("a", 0.5))["version"] == "films-2", "the previous version cannot be the challenger"
        return await made.exports()

    replicas = run_replica(made, "one", orders=orders), run_replica(made, "two", challenger_error="no room")
    assert run_with_replicas(scenario(), *replicas) == (SECOND, FIRST)


def test_rejected_challenger_changes_nothing():
    made, orders = make_coordinator(kept := InMemoryState()), []

    async def scenario():
        state = kept.value
        with pytest.raises(RunError, match="films-1 is already the current version"):
            await made.promote("a", 0.1)
        with pytest.raises(RunError, match="no room"):
            await made.promote("b", 0.1)
        await asyncio.sleep(0.1)
        assert kept.value == state and orders[-1].prepare is None
        return {order.challenger for order in orders}

    refusing = run_replica(made, "two", loads=[FIRST], failing=RunError("no room"))
    assert run_with_replicas(scenario(), run_replica(made, "one", orders=orders), refusing) == {None}


def test_restarted_coordinator_keeps_the_challenger_unless_another_export_is_deployed():
    kept = InMemoryState()
    first, orders = make_coordinator(kept), []

    run_with_replicas(first.promote("b", 0.25, True), run_replica(first, "one", orders=orders))
    again, challenger = make_coordinator(kept), Challenger("b", "films-2", 0.25, "shadow")
    order = asyncio.run(again.follow("one", ReplicaState(orders[-1].number, "films-1"), last_command=orders[-1].number))
    assert (order.answer, order.challenger) == (FIRST, challenger)
    asyncio.run(again.declare(FIRST))
    assert asyncio.run(make_coordinator(kept).overview())["challenger"] == vars(challenger) | {"failed_replicas": []}
    again = make_coordinator(kept)
    asyncio.run(again.declare(SECOND))
    for coordinator in (again, make_coordinator(kept)):
        assert asyncio.run(coordinator.overview())["challenger"] is None


def test_coordinator_rolls_back_if_no_replica_loads_the_export(monkeypatch, caplog):
    for name, seconds in (("FOLLOW_INTERVAL_S", 0.1), ("REPLICA_TIMEOUT_S", 0.5)):
        monkeypatch.setattr(f"raytrec.serving.coordinator.{name}", seconds)
    made = make_coordinator(kept := InMemoryState())

    async def promote():
        await made.promote("b")
        with pytest.raises(RunError, match="the table was cut"):
            await made.fall_back(SECOND, "the table was cut")
        return await made.exports()

    assert run_with_replicas(promote(), run_replica(made, "one")) == (SECOND, FIRST)

    async def end():
        await asyncio.sleep(0.6)
        await asyncio.gather(*(made.fall_back(SECOND, "the table was cut") for _ in range(2)))
        return await made.exports()

    assert run_with_replicas(end()) == (FIRST, SECOND), "the coordinator has not rolled back exactly once"
    assert "rolled back to films-1" in caplog.text and "the table was cut" in caplog.text
    assert asyncio.run(make_coordinator(kept).exports()) == (FIRST, SECOND)


def test_metrics_include_only_reporting_replicas(monkeypatch):
    now = 1000.0  # on the coordinator's clock
    monkeypatch.setattr("raytrec.serving.coordinator.monotonic", lambda: now)
    made, about = make_coordinator(), {"version": FIRST.version, "age_s": 1.0}

    async def report(name, requests):
        figures = ReplicaMetrics()
        figures.requests.labels("/predict", 200, FIRST.version).inc(requests)
        counted = tuple(figures.collect(about, 0))
        await made.record_report(name, replace(ReplicaState(1, FIRST.version), figures=counted))

    def shown():
        text = asyncio.run(made.metrics()).decode()
        return dict(re.findall(r'raytrec_requests_total{.*replica="(\w+)".*} (\S+)', text))

    for name, requests in (("one", 5), ("two", 7), ("one", 9)):
        asyncio.run(report(name, requests))
    assert shown() == {"one": "9.0", "two": "7.0"}
    now += 10
    asyncio.run(report("two", 8))
    now += 10
    assert shown() == {"two": "8.0"}
