"""A nonfinite loss ends a run and the error names the step, even if the GPU reports the loss late."""

from pathlib import Path

import checkpoints
import loop
import pyarrow.parquet as pq
import pytest
from ranks import run_on_ranks
from standin.clock import use_simulated_clock
from test_loop import WITHOUT_RECORDS

from raytrec.driver.coordinator import GPU_PHASE_TEXTS
from raytrec.worker.nonfinite import MAX_STEPS_IN_FLIGHT


def make_loss_infinite(step):
    """Return a function that sets a dense value of this step (from 1) to infinity on rank 1."""

    def spoil(rank, local):
        if rank == 1:
            local[step - 1].dense[0, 0] = float("inf")

    return spoil


def run(rank, world, folder, bad, steps, behind_s, changes):
    """Return (error, last step, labels of the bad step on this rank, its dense columns).

    Fail if a checkpoint could not be written.
    """

    def busy(made):
        if behind_s:
            from standin import StandInGpu

            StandInGpu.active.work(behind_s)

    made = loop.make_worker_loop(rank, world, steps, WITHOUT_RECORDS + changes, folder, spoil=make_loss_infinite(bad))
    with use_simulated_clock():
        made.train(steps, busy)
    failed = [line["error"] for line in made.said if line.get("error")]
    assert not failed and made.unsaved is None, (failed, made.unsaved)
    batch = made.local[bad - 1]
    real = batch.weights > 0
    return made.error, made.progress.step, batch.labels[real, 0].tolist(), batch.dense[real].tolist()


def collect_heartbeats(rank, world, folder):
    """Return the heartbeat's report of the GPU at each of five steps of 0.3 s, and after the last step."""
    from standin import StandInGpu

    said = []

    def busy(made):
        StandInGpu.active.work(0.3)
        said.append(made.context.heartbeat.find_unfinished())

    made = loop.make_worker_loop(rank, world, 5, [*WITHOUT_RECORDS, "tracking.every_steps=100"], folder)
    with use_simulated_clock():
        made.train(5, busy)
    return [*said, made.context.heartbeat.find_unfinished()]


@pytest.mark.slow
def test_heartbeat_reports_unfinished_gpu_step(tmp_path):
    for first, *said, recorded, last in run_on_ranks(2, collect_heartbeats, str(tmp_path), device="cuda"):
        assert first is recorded is last is None, "no unfinished step at start, after a record or at the end"
        for step, (unfinished, phase) in enumerate(said, 2):
            assert step - 1 - MAX_STEPS_IN_FLIGHT <= unfinished < step and phase in GPU_PHASE_TEXTS


@pytest.mark.slow
@pytest.mark.parametrize("device,behind_s", [("cpu", 0), ("cuda", 0.1)])
@pytest.mark.parametrize("bad", [3, 8, 9])
def test_first_nonfinite_step_is_named_and_dumped(device, behind_s, bad, tmp_path):
    """Train nine steps with checkpoints after steps 4 and 8.

    A GPU finishes each step 0.1 s after the host.
    """
    changes = ["checkpoint.every_steps=4", "checkpoint.keep_last=9"]
    results = run_on_ranks(2, run, str(tmp_path), bad, 9, behind_s, changes, device=device)
    for rank, (error, ended, labels, dense) in enumerate(results):
        assert error and f"where: step {bad};" in " ".join(error.split()), error
        assert ended <= bad + 1 + (MAX_STEPS_IN_FLIGHT if device == "cuda" else 0)
        table = pq.read_table(tmp_path / f"nan/step-{bad:010d}-rank-{rank}.parquet")
        assert table["y"].to_pylist() == labels
        columns = table["a"].to_pylist(), table["b"].to_pylist()
        assert [list(row) for row in zip(*columns, strict=True)] == dense
    assert len(list((tmp_path / "nan").iterdir())) == 2
    places = sorted(Path(tmp_path).glob("checkpoints/step-*"))
    kept = [checkpoints.read_about(place)["progress"]["step"] for place in places]
    assert kept == [step for step in (4, 8) if step < bad]
