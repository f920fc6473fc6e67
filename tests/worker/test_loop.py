"""The training loop of one rank: records, checks, agreement between ranks, and phases of saving."""

from pathlib import Path
from time import sleep
from types import SimpleNamespace

import loop
import pytest
import torch
from operators import OperatorCounter
from ranks import run_on_ranks

from raytrec.checkpoint.files import get_step_folder, steps
from raytrec.checkpoint.index import InsufficientSpaceError
from raytrec.common.errors import RunError
from raytrec.common.messages import RankLine
from raytrec.driver.coordinator import SLOW_PHASES
from raytrec.report.findings import find_straggler
from raytrec.worker.checkpointing import CheckpointManager
from raytrec.worker.step import derive_seed

NO_RECORDS = "tracking.every_steps=null"
CHECKS = ("same_environment", "shards", "replicas", "parity", "conservation", "finite", "numerics")
WITHOUT_RECORDS = [NO_RECORDS, *(f"checks.{name}=off" for name in CHECKS)]


def run(rank, world, steps, changes, folder, disturb=None):
    """Train with a checkpoint at step 5; return (this rank's records and checks, the error that ended the
    run)."""
    changes = ["checkpoint.every_s=null", "checkpoint.every_steps=5", *changes]
    made = loop.make_worker_loop(rank, world, steps, changes, folder).train(steps, disturb)
    return [message for message in made.said if message["kind"] in ("rank", "check")], made.error


def flip_bit(made):
    """Flip one bit of a dense weight on rank 1, before the fourth step."""
    if made.context.index == 1 and made.progress.step == 3:
        dense = made.checkpoints._state.dense
        values = next(v for name, v in dense.items() if name.endswith("weight/value"))
        values.view(torch.int32).view(-1)[3] ^= 1


@pytest.mark.slow
def test_records_and_checks_follow_their_intervals(tmp_path):
    changes = ["tracking.every_steps=3", "checks.every_steps=4"]
    for rank, (said, error) in enumerate(run_on_ranks(2, run, 8, changes, str(tmp_path))):
        assert error is None
        lines = [m for m in said if m["kind"] == "rank"]
        # The last record is written at the end of training.
        assert [(m["first_step"], m["step"]) for m in lines] == [(0, 3), (3, 6), (6, 8)]
        for line in lines:
            assert (line["rank"], line["world"], set(line["tables"])) == (rank, 2, {"user", "tag"})
            assert sum(line["phases_s"].values()) == pytest.approx(line["seconds"])
            assert line["phases_s"]["backward"] > 0 and line["phases_s"]["forward"] > 0
            assert line["tables"]["user"]["gradient_norm"] > 0
        checks = [m for m in said if m["kind"] == "check"]
        if rank:
            assert not checks  # only rank 0 reports checks
            continue
        assert all(m["passed"] for m in checks)
        at = {name: [m["step"] for m in checks if m["check"] == name] for name in {m["check"] for m in checks}}
        assert at["same_environment"] == [0]
        assert at["parity"] == [2, 4, 8]  # first step with a prefetched batch, then every 4 steps
        assert at["replicas"] == [0, 2, 4, 5, 8]  # 5: before a checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("every,step", [(4, 4), (100, 5)])
def test_failed_check_stops_all_ranks_and_prevents_saving(every, step, tmp_path):
    for said, error in run_on_ranks(2, run, 8, [NO_RECORDS, f"checks.every_steps={every}"], str(tmp_path), flip_bit):
        assert "a check failed" in error and "replicas" in error and f"step {step}" in error
        assert not any(m["kind"] == "rank" for m in said)
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.slow
def test_failed_check_warns_when_configured(tmp_path):
    changes = [NO_RECORDS, "checks.every_steps=4", "checks.replicas=warn"]
    (said, error), _ = run_on_ranks(2, run, 8, changes, str(tmp_path), flip_bit)
    assert error is None
    assert {m["step"] for m in said if m["kind"] == "check" and not m["passed"]} == {4, 5, 8}


@pytest.mark.slow
def test_disabled_checks_and_records_report_nothing(tmp_path):
    assert run_on_ranks(2, run, 4, WITHOUT_RECORDS, str(tmp_path), flip_bit) == [([], None), ([], None)]


def delay_rank_1(made):
    if made.context.index == 1:
        sleep(0.1)  # between steps, so the time belongs to this rank


@pytest.mark.slow
def test_waiting_rank_reports_collective_time(tmp_path):
    """The slow rank reports the delay as its own time; the other rank reports time in collectives."""
    results = run_on_ranks(2, run, 12, ["tracking.every_steps=6"], str(tmp_path), delay_rank_1)
    lines = [[m for m in said if m["kind"] == "rank"][1] for said, _ in results]
    fast, slow = (line["phases_s"] for line in lines)
    assert slow["other"] > 0.55 > fast["other"]
    waits = [phases["collectives"] + phases["input_exchange"] for phases in (fast, slow)]
    assert waits[0] > waits[1] + 0.3
    for line in lines:  # a finding needs a long interval
        del line["kind"]
        line["seconds"] *= 1000
        line["phases_s"] = {phase: 1000 * seconds for phase, seconds in line["phases_s"].items()}
    assert "rank 1" in find_straggler([RankLine(**line) for line in lines])


def collect_wait_phases(rank, world, folder):
    """Return the heartbeat's phase at each wait for a checkpoint that is being written."""
    made, found = loop.make_worker_loop(rank, world, 3, ["checkpoint.every_s=null"], folder), []
    saver, heartbeat = made.checkpoints._saver, made.context.heartbeat
    taken = saver.collect_outcome

    def waits():
        if saver._running is not None:
            found.append(heartbeat.phase)
        return taken()

    saver.collect_outcome = waits
    made.train(3)
    assert made.error is None
    return found


def test_final_checkpoint_wait_has_its_own_phase(tmp_path):
    """The wait can be long, so the time limit of a slow phase applies."""
    [found] = run_on_ranks(1, collect_wait_phases, str(tmp_path))
    assert found and set(found) <= set(SLOW_PHASES)


def count_all_reduces(rank, world, folder):
    """Count the all-reduces of two ordinary steps.

    Return the count, the random numbers drawn in the last step, and the numbers expected from its seed.
    """
    made = loop.make_worker_loop(rank, world, 8, ["train.log_every_steps=100", "checkpoint.every_s=null"], folder)
    found = []
    made.step.model.register_forward_pre_hook(lambda *_: found.append(torch.rand(3).tolist()))
    for observer in made.observers:
        observer.begin()
    with OperatorCounter() as operators:
        for number, outputs in enumerate(made.step.train(made.batches, 6), start=1):
            made.progress.count(loop.BATCH_ROWS, outputs)
            for observer in made.observers:
                observer.after_step(loop.BATCH_ROWS)
            made.checkpoints.after_step(outputs)
            if number == 4:
                operators.calls.clear()
    torch.manual_seed(derive_seed(3, made.step.trained - 1, rank))
    drawn = torch.rand(3).tolist()
    return operators.calls["c10d::allreduce_"], found[-1], drawn


def test_single_rank_needs_no_all_reduce(tmp_path):
    [(count, drawn, expected)] = run_on_ranks(1, count_all_reduces, str(tmp_path))
    assert count == 0
    assert drawn == expected


def test_two_ranks_all_reduce_at_each_step(tmp_path):
    (count, drawn, expected), (_, other, _) = run_on_ranks(2, count_all_reduces, str(tmp_path))
    assert count >= 4
    assert drawn == expected != other


def collect_train_reports(rank, world, folder):
    """Return the steps at which training metrics were reported, and their messages."""
    changes, at = ["train.log_every_steps=5", "checkpoint.every_s=null"], []

    def after(made):
        told = sum(message["kind"] == "train" for message in made.said)
        at.extend([made.progress.step] * (told - len(at)))

    made = loop.make_worker_loop(rank, world, 23, changes, folder).train(23, after)
    messages = [message for message in made.said if message["kind"] == "train"]
    figures = [{k: v for k, v in m.items() if k not in ("rows_per_s", "time")} for m in messages]
    return at, [m["step"] for m in messages], figures, made.progress.trained


@pytest.mark.slow
def test_gpu_train_metrics_match_cpu_with_a_delay(tmp_path):
    plain = run_on_ranks(2, collect_train_reports, str(tmp_path / "cpu"))
    on_gpus = run_on_ranks(2, collect_train_reports, str(tmp_path / "cuda"), device="cuda")
    (at, steps, *figures), (later, same, *others) = plain[0], on_gpus[0]  # only rank 0 sends messages
    assert at == steps == same == [5, 10, 15, 20] and later == [7, 12, 17, 22]
    assert figures == others


def save_into_blocked_folder(rank, world, folder, is_freed):
    """Save twice after two steps while a file is in the place of the checkpoint; return error, retry and saved steps.

    Both saves are repetitions (`again`), as for restored weights. If `is_freed`, the file is removed before the retry.
    """
    made = loop.make_worker_loop(rank, world, 2, [*WITHOUT_RECORDS, "checkpoint.every_s=null"], folder)
    root = made.context.task.checkpoint
    blocker = Path(get_step_folder(root, 2))

    for outputs in made.step.train(made.batches, 2):
        made.progress.count(loop.BATCH_ROWS, outputs)
    blocker.parent.mkdir(parents=True, exist_ok=True)
    blocker.touch()
    made.checkpoints.finish(again=True)
    if is_freed:
        blocker.unlink()
    first = made.checkpoints._error
    return first and first.what, made.checkpoints.find_unsaved_error(), steps(root)


@pytest.mark.parametrize("is_freed", [True, False])
def test_last_save_is_tried_twice(tmp_path, is_freed):
    ((first, unsaved, saved),) = run_on_ranks(1, save_into_blocked_folder, str(tmp_path), is_freed)
    assert "cannot be" in first
    assert (unsaved is None, saved) == (is_freed, [2] * is_freed)
    assert is_freed or unsaved["what"].startswith("the trained model is not saved: ")


@pytest.mark.parametrize("kind,advice", [(InsufficientSpaceError, "free up space"), (RunError, "resolve this error")])
def test_advice_after_failed_last_save_fits_the_cause(kind, advice, monkeypatch):
    monkeypatch.setattr(CheckpointManager, "__init__", lambda self: None)
    monkeypatch.setattr(CheckpointManager, "finish", lambda self, again: None)
    monkeypatch.setattr(CheckpointManager, "_close", lambda self: None)
    manager = CheckpointManager()
    manager._error, manager._newest = kind("the checkpoint cannot be written"), 8
    manager._config = SimpleNamespace(run=SimpleNamespace(dir="runs/a"))
    resume = "resume from the checkpoint of step 8: raytrec train --resume runs/a, or submit its job again"
    assert manager.find_unsaved_error()["do"] == f"{advice}, and {resume}"
