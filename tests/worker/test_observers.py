"""What a rank records and checks around real steps on real ranks: intervals, probes, errors, phases."""

import json

import pytest
import small
from loop import Heartbeat
from ranks import on_ranks


class Said(list):
    """In the place of the coordinator's handle."""

    put = property(lambda self: self)

    def remote(self, message):
        self.append(json.loads(json.dumps(message)))  # messages must be JSON


def run(rank, world, steps, changes, disturb=None, plan="row_wise"):
    """(this rank's messages, the error that ended it) of a loop as in worker.py."""
    from itertools import count

    import torch

    from raytrec.checkpoint.state import LogicalState
    from raytrec.common.errors import RunError
    from raytrec.config.run_config import load_config
    from raytrec.metrics.selection import Selection
    from raytrec.metrics.sums import Sums
    from raytrec.worker.build import build_step
    from raytrec.worker.context import WorkerContext, WorkerTask
    from raytrec.worker.nonfinite import RecentBatches
    from raytrec.worker.observers import make_observers
    from raytrec.worker.progress import Progress

    config = load_config(small.config(world, {"sharding_type": plan}), changes)
    device, said = torch.device("cpu"), Said()
    step, _ = build_step(config, small.SCHEMA, device)
    _, local = small.batches(steps, rank, world)
    for number, batch in zip(count(), local):
        batch.step = number
    sums = Sums(Selection.of_config(config, small.SCHEMA), device)
    batches, progress = RecentBatches(iter(local), 0), Progress(sums)
    task = WorkerTask(config, small.SCHEMA, {}, said, "")
    context = WorkerContext(rank, world, device, task, Heartbeat(), 0)
    state = LogicalState(step.model, step.optimizer)
    observers = make_observers(context, step, state, progress, batches, steps)
    try:
        observers.begin()
        for outputs in step.train(batches, steps):
            progress.count(12, outputs)
            if disturb:
                disturb(rank, progress.step, step, state)
            observers.after_step(12)
            if progress.step == 5:
                observers.before_save()
    except RunError as error:
        return said, str(error)
    return said, None


def test_what_is_said_and_when():
    changes = ["tracking.every_steps=3", "checks.every_steps=4"]
    for rank, (said, error) in enumerate(on_ranks(2, run, 8, changes)):
        assert error is None
        lines = [m for m in said if m["kind"] == "rank"]
        assert [(m["first_step"], m["step"]) for m in lines] == [(0, 3), (3, 6), (6, 8)]  # and at the end
        for line in lines:
            assert (line["rank"], line["world"], set(line["tables"])) == (rank, 2, {"user", "tag"})
            assert sum(line["phases_s"].values()) == pytest.approx(line["seconds"])
            assert line["phases_s"]["backward"] > 0 and line["phases_s"]["forward"] > 0
            assert line["tables"]["user"]["gradient_norm"] > 0
        checks = [m for m in said if m["kind"] == "check"]
        if rank:
            assert not checks  # one warning, not one a rank
            continue
        assert all(m["passed"] for m in checks)
        at = {
            name: [m["step"] for m in checks if m["check"] == name] for name in {m["check"] for m in checks}
        }
        assert at["same_environment"] == [0]
        assert at["parity"] == [2, 4, 8]  # the first step for which there is a batch ahead, then each 4
        assert at["replicas"] == [0, 2, 4, 5, 8]  # 5: before a checkpoint


def flip_a_bit(rank, number, step, state):
    import torch

    if rank == 1 and number == 4:
        values = next(v for name, v in state.dense.items() if name.endswith("weight/value"))
        values.view(torch.int32).view(-1)[3] ^= 1


def test_a_failed_check_stops_all_ranks():
    changes = ["tracking.every_steps=null", "checks.every_steps=4"]
    for said, error in on_ranks(2, run, 8, changes, flip_a_bit):
        assert "a check failed" in error and "replicas" in error and "step 4" in error
        assert not any(m["kind"] == "rank" for m in said)


def test_a_failed_check_keeps_a_state_from_being_saved():
    changes = ["tracking.every_steps=null", "checks.every_steps=100"]
    for _, error in on_ranks(2, run, 8, changes, flip_a_bit):
        assert "replicas" in error and "step 5" in error


def test_a_failed_check_warns():
    changes = ["tracking.every_steps=null", "checks.every_steps=4", "checks.replicas=warn"]
    (said, error), _ = on_ranks(2, run, 8, changes, flip_a_bit)
    assert error is None
    assert {m["step"] for m in said if m["kind"] == "check" and not m["passed"]} == {4, 5, 8}


def test_all_off():
    changes = ["tracking.every_steps=null"] + [
        f"checks.{name}=off"
        for name in ("same_environment", "shards", "replicas", "parity", "conservation", "finite", "numerics")
    ]
    assert on_ranks(2, run, 4, changes, flip_a_bit) == [([], None), ([], None)]


def slow_start(rank, number, step, state):
    from time import sleep

    if rank == 1:
        sleep(0.03)  # between steps: its own time


def test_who_waits_for_whom():
    """A rank that is slow spends that time itself; the other one waits for it in collectives."""
    from raytrec.common.messages import RankLine
    from raytrec.report.findings import straggler

    results = on_ranks(2, run, 12, ["tracking.every_steps=6"], slow_start)
    fast, slow = ([m for m in said if m["kind"] == "rank"][1] for said, _ in results)
    assert slow["phases_s"]["other"] > 0.18 > fast["phases_s"]["other"]
    waits = [m["phases_s"]["collectives"] + m["phases_s"]["input_exchange"] for m in (fast, slow)]
    assert waits[0] > waits[1] + 0.1
    seconds = [1000 * m["seconds"] for m in (fast, slow)]
    longer = [{p: 1000 * s for p, s in m["phases_s"].items()} for m in (fast, slow)]
    long = [
        RankLine(**{k: v for k, v in m.items() if k != "kind"} | {"seconds": s, "phases_s": p})
        for m, s, p in zip((fast, slow), seconds, longer, strict=True)
    ]
    assert "rank 1" in straggler(long)
