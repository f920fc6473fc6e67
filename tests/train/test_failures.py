"""Root causes, what is tried again, and who is named when nothing goes on."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from raytrec.errors import DataError
from raytrec.train.causes import Kind, Restart, find_cause
from raytrec.train.hub import Command, Hub

GLOO = RuntimeError("[../third_party/gloo/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]")
OURS = DataError("label 'y' is 7", where="part-0.parquet")


@pytest.mark.parametrize(
    "failures,kind,sentence",
    [
        ({0: GLOO, 1: ActorDiedError()}, Kind.DEATH, "rank 1 died: its process was ended, or crashed"),
        ({0: GLOO, 1: KeyError("user"), 2: GLOO}, Kind.ERROR, "rank 1 raised KeyError: 'user'"),
        ({0: KeyError("x"), 1: OURS}, Kind.OURS, "label 'y' is 7"),
        ({0: GLOO, 2: NodeDiedError("gone")}, Kind.NODE, "rank 2 lost its node"),
        ({0: ActorDiedError(), 1: NodeDiedError("gone")}, Kind.NODE, "rank 1 lost its node"),
        ({0: Restart("at step 3"), 1: GLOO}, Kind.RESTART, "at step 3"),
        ({0: GLOO, 1: OutOfMemoryError("the node was")}, Kind.DEATH, "rank 1 was ended by Ray, because"),
        ({1: RuntimeError("Timed out waiting 60000ms")}, Kind.FOLLOWED, "rank 1 raised RuntimeError"),
    ],
)
def test_the_root_cause(failures, kind, sentence):
    cause = find_cause(failures)
    assert cause.kind == kind and cause.sentence.startswith(sentence)


@pytest.fixture
def hub(ray_cluster):
    import ray

    from raytrec.train.hub import start_hub

    actor = start_hub(5, 60)
    yield actor
    ray.kill(actor)


def decisions(hub, budget, *failures):
    """What the policy decides on one group error after the other."""
    import ray.train

    from raytrec.train.policies import FailuresWithReason

    policy = FailuresWithReason(ray.train.FailureConfig(), hub, budget)
    errors = [f if isinstance(f, Exception) else WorkerGroupError("", f) for f in failures]
    return [policy.make_decision(training_failed_error=e).value for e in errors]


def test_what_is_tried_again(hub):
    died, node = {0: GLOO, 1: ActorDiedError()}, {1: NodeDiedError("gone")}
    assert decisions(hub, 2, died, node, died, node, {0: Restart("x")}, died) == ["RETRY"] * 5 + ["RAISE"]
    assert decisions(hub, 8, {1: OURS}) == ["RAISE"], "it would come again"
    assert decisions(hub, 0, died) == ["RAISE"]
    same = {0: GLOO, 1: KeyError("user")}
    assert decisions(hub, 8, same, same) == ["RETRY", "RAISE"], "twice in the same way at the same step"
    assert decisions(hub, 8, same, died, same) == ["RETRY"] * 3
    assert decisions(hub, 8, ControllerError(ValueError("a bug"))) == ["RAISE"]


def said(hub):
    import ray

    return [m for m in ray.get(hub.get.remote(1)) if m["kind"] == "event"]


def test_the_driver_is_told(hub):
    import ray

    decisions(hub, 1, {0: GLOO, 1: ActorDiedError()})
    (event,) = said(hub)
    assert event["cause"] == "rank 1 died: its process was ended, or crashed" and event["again"]
    assert ray.get(hub.cause.remote()) == event["cause"]


def ranks(*states):
    """A hub whose ranks have sent (ticks, step, phase, where, waiting); `None` has sent nothing for long."""
    hub = Hub(hang_s=5, patience_s=60)

    async def meet():
        hub._keep_looking = lambda: asyncio.sleep(0)
        for rank in range(len(states)):
            await hub.enter("a", rank, len(states), 100 + rank, "10.0.0.1")
        for rank, state in enumerate(states):
            await hub.beat("a", rank, *(state or (9, 57, "step", "", False)))
        assert await hub.beat("before", 0, 1, 1, "step", "", False) == Command.ABORT
        for member, state in zip(hub._members.values(), states, strict=True):
            member.progress_at -= 8
            member.beat_at -= 0 if state else 8

    asyncio.run(meet())
    return hub._hang()


def test_who_is_named():
    waits = (9, 57, "step", "wait, distributed/comm_ops.py:12", True)
    busy = (9, 57, "step", "forward, mine/model.py:3", False)
    found = ranks(waits, busy, waits)
    assert found.startswith("rank 1 (pid 101 on 10.0.0.1) has made no progress for 8 s at step 57, computing")
    assert "forward, mine/model.py:3" in found and "rank 0 waits at wait, distributed" in found
    found = ranks(waits, waits, None)
    assert found.startswith("rank 2 (pid 102 on 10.0.0.1) stands still: no sign of life for 8 s")
    behind = (8, 56, "step", "wait, distributed/x.py:1", True)
    assert ranks(waits, behind).startswith("rank 1")
    assert ranks(waits, waits).startswith("all ranks wait for one another for 8 s; rank 0")
    assert ranks(waits, (9, 56, "data", "", False)) is None, "reading may take longer"
    assert ranks((9, 57, "save", "", False), waits) is None
