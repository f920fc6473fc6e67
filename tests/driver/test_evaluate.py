"""Test evaluation: equal metrics on GPU and CPU, a busy GPU, memory, overrides and recovery hints."""

import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import checkpoints
import parquet
import pytest
import small
import torch
from ranks import run_on_ranks
from standin.clock import use_simulated_clock

from raytrec.common.errors import ConfigError, DataError, RunError, SchemaError
from raytrec.config.run_config import load_config
from raytrec.driver.evaluation import load_evaluation_config
from raytrec.driver.prepare import create_scratch_folder
from raytrec.driver.run import add_recovery_hint


def evaluate_batches(rank, world, memory=None):
    """Evaluate six batches; return (metrics, curves, places that waited until the GPU was idle)."""
    import torch.distributed as dist

    from raytrec.metrics.selection import Selection
    from raytrec.worker.build import build_step
    from raytrec.worker.evaluate import evaluate

    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    config = small.make_small_config(world, {"sharding_type": "row_wise"})
    step, _ = build_step(config, small.SCHEMA, device)
    selection = Selection.from_config(config, small.SCHEMA)
    _, local = small.make_batches(6, rank, world)
    read = [batch.pin_memory() for batch in local] if on_gpu else local
    dataset = SimpleNamespace(rows=6 * 12, uri="here")
    stream = SimpleNamespace(batches=lambda: iter(read), may_skip=False, dataset=dataset)
    if not on_gpu:
        return *evaluate(step, stream, device, selection), set()
    from standin import StandInGpu

    gpu = StandInGpu.active
    gpu.waits.clear()
    predict, step.evaluate = step.evaluate, lambda batches: delay_batches(predict(batches), gpu)
    small_one = patch.object(torch.cuda, "mem_get_info", lambda device=None: (memory, memory))
    with use_simulated_clock(), small_one if memory else nullcontext():
        figures, drawn = evaluate(step, stream, device, selection)
    return figures, drawn, {wait.where for wait in gpu.waits if wait.drains}


def delay_batches(all_outputs, gpu):
    """Yield the outputs and occupy the GPU for a while per batch."""
    for outputs in all_outputs:
        gpu.work(0.1)
        yield outputs
    gpu.default_stream.synchronize()
    gpu.waits.pop()


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 1000])
def test_gpu_evaluation_equals_cpu_and_keeps_the_gpu_busy(memory):
    expected = run_on_ranks(2, evaluate_batches)
    found = run_on_ranks(2, evaluate_batches, memory, device="cuda")
    for (figures, drawn, _), (same, curves, dry) in zip(expected, found, strict=True):
        assert same == pytest.approx(figures, nan_ok=True) and curves == drawn
        assert not dry
    assert 0 < expected[0][0]["auc"] < 1 and expected[1][0]["auc"] == expected[0][0]["auc"]


@pytest.mark.parametrize("rows,place", [(1000, "cuda"), (10**9, "cpu")])
def test_auc_of_many_rows_is_computed_on_the_cpu(rows, place):
    from standin import use_stand_in_gpu

    from raytrec.metrics.evaluation import choose_ranking_device

    with use_stand_in_gpu():
        assert choose_ranking_device(rows, torch.device("cuda", 0)).type == place
    assert choose_ranking_device(rows, torch.device("cpu")).type == "cpu"


def test_recovery_hint_requires_completed_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"data": {"train": "d"}, "run": {"dir": str(tmp_path / "a run")}}
    config, root = load_config(values), tmp_path / "a run/checkpoints"
    bad = DataError("id 7", where="there", do="correct the data")
    assert add_recovery_hint(bad, config, 20) is bad, "nothing is saved"
    checkpoints.write_index_only(root, 10)
    assert add_recovery_hint(bad, config, 20) is bad, "training is not complete"
    last = checkpoints.write_index_only(root, 20)
    told = add_recovery_hint(bad, config, 20)
    assert type(told) is DataError and (told.what, told.where) == ("id 7", "there")
    assert told.do == (
        f"correct the data; the trained model is saved in {last}: evaluate it with "
        "`raytrec evaluate 'a run' --data PARQUET --set data.on_error=skip`; or fix the error and complete the run: "
        "raytrec train --resume 'a run'"
    )
    config = load_config(values | {"data": {"train": "d", "test": "t"}, "model": {"name": "mine:Model"}})
    told = add_recovery_hint(RunError("no answer"), config, 20)
    assert "`raytrec evaluate 'a run' --allow-code`" in told.do


CHECKPOINT_METADATA = {
    "config": load_config(parquet.config_values("/data", "/run")).model_dump(by_alias=True, mode="json"),
    "schema": parquet.SCHEMA_YAML,
}


def test_evaluation_accepts_applicable_overrides():
    changes = ["tables.us*.out_of_range=hash", "data.on_error=skip", "scaling.num_workers=1"]
    config, schema = load_evaluation_config(CHECKPOINT_METADATA, "there", changes, allow_code=False)
    assert (config.data.on_error, config.scaling.num_workers) == ("skip", 1)
    assert (schema.tables["user"].out_of_range, schema.tables["tag"].out_of_range) == ("hash", "error")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.top_mlp=[3]", "does not apply to a trained model"),
        ("run.dir=/x", "does not apply"),
        ("tables.user.rows=50", r"does not apply.*\n.*\n.*a table's other settings are fixed"),
        ("tables.usr.out_of_range=hash", "no table has a name that matches 'usr'"),
        ("tables.user.out_of_range=drop", "out_of_range"),
        ("data.on_eror=skip", "did you mean data.on_error"),
        ("nonsense", "does not apply|not an override"),
    ],
)
def test_evaluation_rejects_inapplicable_overrides(change, message):
    with pytest.raises((ConfigError, SchemaError), match=message):
        load_evaluation_config(CHECKPOINT_METADATA, "there", [change], allow_code=False)


@pytest.mark.slow
def test_next_evaluation_keeps_only_folders_with_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from raytrec.driver.prepare import create_scratch_folder\n"
        "with create_scratch_folder() as one, create_scratch_folder() as other:\n"
        "    open(one + '/ray.log', 'w').close()\n"
        "    open(other + '/error.txt', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    assert len(list(tmp_path.iterdir())) == 2
    with create_scratch_folder() as folder:
        assert {path.parent == Path(folder) for path in tmp_path.glob("*/*")} == {False}
        assert len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in tmp_path.glob("*/*")] == ["error.txt"]
