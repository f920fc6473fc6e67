"""After any fault of ranks, replicas and deltas, a service that follows a run equals the run's checkpoints."""

import os
import random
import shutil
import signal
from pathlib import Path
from threading import Thread

import parquet
import pytest
from delta_faults import FAULTS, DeltaFeed, follow_through_faults
from deltas import DeltaFolder, ManagedCase, train_steps
from local_shards import local_shards
from rays import alive_worker_pids
from served import TOKEN
from waiting import wait_for

from raytrec.checkpoint.files import get_step_folder
from raytrec.driver import run as driver
from raytrec.serving import follow
from raytrec.serving.table_shards import pooling

SEED = 5
# Steps to which consecutive deltas lead; the run goes back three times.
STEPS = (1, 2, 3, 2, 3, 4, 5, 3, 4, 5, 6, 5, 6, 7)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Set the client's token and short intervals."""
    monkeypatch.setenv("RAYTREC_SERVE_TOKEN", TOKEN)
    for name, seconds in (("LOCAL_INTERVAL_S", 0.02), ("RETRY_INTERVAL_S", 0.05), ("CHECK_INTERVAL_S", 0.1)):
        monkeypatch.setattr(follow, name, seconds)
    monkeypatch.setattr("raytrec.compat.uvicorn_.CLOSE_GRACE_S", 0.1)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return train_steps(ManagedCase(), tmp_path_factory.mktemp("steps"), max(STEPS))


@pytest.mark.parametrize("shard_count", [0, 2])
def test_replica_equals_each_checkpoint_through_faults_of_deltas(steps, tmp_path, shard_count, monkeypatch):
    source = DeltaFolder.of_schema(tmp_path / "source", steps.schema)
    for number, step in enumerate(STEPS, 1):
        changes = steps.changes(step, STEPS[number - 2]) if number > 1 else ()
        source.write(number, step, *changes, column_parts=2 if changes else 1)
    source.add_export(1, steps.export(1, tmp_path / "export", quantize="int8"))
    feed = DeltaFeed(source.path, tmp_path / "target")
    monkeypatch.setattr(pooling, "PAGE_BYTES", 32)  # rows of small tables are in both shards
    with local_shards(shard_count) as shards:
        faults, comparisons = follow_through_faults(
            feed, lambda number: steps.folders[feed.steps[number] - 1], SEED, shards if shard_count else None
        )
    assert comparisons == len(STEPS) - 1 and {fault.__name__ for fault in FAULTS} <= {*faults}, faults


@pytest.fixture(scope="module")
def text_data(tmp_path_factory):
    """Return a dataset whose users are texts, of whom only some have a row at a time."""
    folder = parquet.write_dataset(tmp_path_factory.mktemp("text"))
    schema = parquet.SCHEMA_YAML.replace("user: {rows: 40, dim: 8}", "user: {rows: 31, dim: 8, ids: {eviction: lfu}}")
    schema = schema.replace("tag: {rows: 12, dim: 8}", "tag: {rows: 13, dim: 8, ids: managed}")
    (folder / "schema.yaml").write_text(schema)
    parquet.name_users(folder)
    return folder


def list_complete(run):
    return sorted(path.parent for path in Path(run).glob("checkpoints/*/checkpoint.json"))


def kill_ranks(run, seed, kills):
    """Kill random ranks of a run in a thread, each after a new checkpoint."""

    def go():
        rng = random.Random(seed)
        for _ in range(kills):
            count = len(list_complete(run))
            wait_for(lambda count=count: len(list_complete(run)) > count, "a checkpoint", 240)
            os.kill(rng.choice(wait_for(alive_worker_pids, "workers")), signal.SIGKILL)

    thread = Thread(target=go, daemon=True)
    thread.start()
    return thread


@pytest.mark.survive
@pytest.mark.parametrize(
    "worlds, sharding, managed, precision",
    [
        ((1, 3), "row_wise", True, None),
        ((3, 2), "table_wise", True, "int8"),
        ((2, 1), "column_wise", False, "fp16"),
        ((2, 3), "data_parallel", False, None),
    ],
)
@pytest.mark.usefixtures("ray_cluster")
def test_run_and_replica_survive_faults(worlds, sharding, managed, precision, text_data, tiny_data, tmp_path):
    """Ranks are killed, the run goes back and is resized, and its deltas reach a replica with faults."""
    run, deltas = tmp_path / "run", tmp_path / "deltas"
    values = parquet.config_values(
        text_data if managed else tiny_data,
        run,
        train__epochs=4,
        scaling__num_workers=worlds[0],
        plan__tables={"*": {"sharding_type": sharding}},
        optim__embeddings={"name": "adagrad", "lr": 0.1},
        checkpoint__every_steps=6,
        checkpoint__keep_last=100,
        export__deltas={"to": str(deltas), "every_s": 0.2, "full_every": 1000, "quantize": precision},
    )
    killer = kill_ranks(run, SEED, kills=2)
    driver.train(values)
    killer.join()
    (run / "result.json").unlink()
    for folder in list_complete(run)[5:]:
        shutil.rmtree(folder)
    driver.train(None, [f"scaling.num_workers={worlds[1]}"], resume=run)
    feed = DeltaFeed(deltas, tmp_path / "target")
    newest = {step: number for number, step in sorted(feed.steps.items())}

    def find_checkpoint(number):
        folder = Path(get_step_folder(str(run / "checkpoints"), feed.steps[number]))
        return str(folder) if newest[feed.steps[number]] == number and folder.exists() else None

    faults, comparisons = follow_through_faults(feed, find_checkpoint, SEED)
    assert len(faults) >= 7 and comparisons >= 8, (faults, comparisons)
