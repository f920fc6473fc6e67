"""plan.replan: on_resize: runs that resume with another number of workers, planned by their lookups."""

import json
import os
import shutil
import signal
from threading import Thread

import checkpoints
import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rays import workers
from test_survive import events
from uneven import IDS
from waiting import wait_for

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.driver import run as driver
from raytrec.embeddings.planner.dry_run import dry_run
from raytrec.embeddings.planner.machines import Cluster
from raytrec.embeddings.planner.recorded import with_recorded

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.survive]

ROWS = 1920  # 15 steps


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Bags of 20 ids and of 1, of which the schema has no statistics."""
    folder, made = tmp_path_factory.mktemp("uneven") / "d", np.random.default_rng(0)
    (folder / "train").mkdir(parents=True)
    columns = {"label": made.integers(0, 2, ROWS).astype(np.int8)}
    for table, ids in IDS.items():
        bounds = np.arange(0, ROWS * int(ids) + 1, int(ids), dtype=np.int32)
        columns[f"f{table[1:]}"] = pa.ListArray.from_arrays(bounds, made.integers(0, 500, bounds[-1]))
    pq.write_table(pa.table(columns), folder / "train" / "part-0.parquet", row_group_size=300)
    schema = {
        "labels": ["label"],
        "sparse": {f"f{i}": {"table": f"t{i}", "pooling": "sum"} for i in range(len(IDS))},
        "tables": {table: {"rows": 500, "dim": 16} for table in IDS},
    }
    (folder / "schema.yaml").write_text(yaml.safe_dump(schema))
    return folder


def settings(data, folder, **changes):
    """Values of a configuration whose runs save at step 10 and at the end."""
    changes = {
        "checkpoint__every_steps": 10,
        "train__log_every_steps": 1,
        "tracking__enabled": False,
    } | changes
    values = parquet.settings(data, folder, plan__sharding_types=["table_wise"], **changes)
    values["data"] = {k: v for k, v in values["data"].items() if k not in ("valid", "test")}
    return values


def interrupted_run(data, folder, **changes):
    """A run of two workers, as it was at step 10 of 15."""
    result = driver.train(settings(data, folder, **changes))
    (folder / "result.json").unlink()
    shutil.rmtree(checkpoints.newest(folder))
    assert result.metrics["world_size"] == 2
    return folder


@pytest.fixture(scope="module")
def interrupted(data, tmp_path_factory):
    return interrupted_run(data, tmp_path_factory.mktemp("replan") / "run", tracking__every_steps=5)


def resume(interrupted, place, *overrides):
    """(run folder, table → ranks that hold it, events 'replanned') of a copy, resumed with three workers."""
    run = shutil.copytree(interrupted, place)
    driver.train(None, ["scaling.num_workers=3", *overrides], resume=run)
    return run, plan_of(run), events(run, "replanned")


def plan_of(run):
    """Table → ranks that hold it."""
    return {entry["table"]: entry["ranks"] for entry in json.loads((run / "plan.json").read_text())}


@pytest.fixture(scope="module")
def by_the_schema(interrupted, tmp_path_factory):
    return resume(interrupted, tmp_path_factory.mktemp("never") / "run")


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def test_recorded_lookups_change_the_plan_and_no_result(interrupted, by_the_schema, tmp_path, capfd):
    run, plan, (event,) = resume(interrupted, tmp_path / "run", "plan.replan=on_resize")
    before, old_plan, none = by_the_schema
    assert none == [] and event["ids_of_a_row"] == pytest.approx(IDS)
    assert "replanned by the lookups of 6 tables that the run has recorded: t0 20.0, t2 20.0" in (
        " ".join(capfd.readouterr().err.split())
    )
    alone = [ranks for table, ranks in plan.items() if IDS[table] == 20]
    short = [ranks for table, ranks in plan.items() if IDS[table] == 1]
    assert len({*map(tuple, alone)}) == 2 and plan != old_plan
    assert not any(ranks in alone for ranks in short), "the third rank has all short ones"
    assert losses(run) == losses(before) and len(losses(run)) == 20, "15 steps, of which 5 were trained twice"
    states = [checkpoints.whole(checkpoints.newest(each)) for each in (run, before)]
    assert states[0].keys() == states[1].keys()
    assert all((states[0][name] == value).all() for name, value in states[1].items())


def test_a_run_that_has_recorded_nothing_is_planned_by_the_schema(data, by_the_schema, tmp_path, capfd):
    interrupted = interrupted_run(data, tmp_path / "blind", tracking__every_steps=None)
    _, plan, events = resume(interrupted, tmp_path / "run", "plan.replan=on_resize")
    assert plan == by_the_schema[1] and events == []
    assert "the run has recorded no lookups (tracking.every_steps)" in " ".join(
        capfd.readouterr().err.split()
    )


def test_a_plan_by_recorded_lookups_that_does_not_fit_is_not_taken(interrupted, tmp_path, capfd):
    """In the least memory that is enough by the schema, and some for dense layers, which a dry run lacks."""
    config = load_config(interrupted / "config.yaml", ["scaling.num_workers=3"])
    schema = Schema.load(interrupted / "schema.yaml")

    def fits(mib, schema):
        try:
            return bool(dry_run(config, schema, Cluster(1, 3, mib / 1024, 64, 1e6)))
        except ConfigError:
            return False

    least = next(mib for mib in np.arange(0.05, 1, 0.01) if fits(mib, schema)) + 0.06
    assert not fits(least, with_recorded(config, schema, IDS))
    _, plan, events = resume(
        interrupted, tmp_path / "run", "plan.replan=on_resize", f"plan.memory_gib={least / 1024}"
    )
    assert {*plan} == {*IDS} and events == []
    assert "planned by the schema's statistics in spite of plan.replan: no plan for 6" in (
        " ".join(capfd.readouterr().err.split())
    )


def test_a_group_that_shrinks_is_planned_by_the_lookups_of_the_one_before(data, tmp_path):
    """In one driver: a worker is killed, and something else takes the two CPUs that it had."""
    import ray

    run, blocked = tmp_path / "run", []

    def shrink():
        wait_for(lambda: events(run, "saved"), "checkpoint", 120)
        blocked.append(ray.remote(object).options(num_cpus=2).remote())  # scheduled when there is room
        os.kill(workers()[-1], signal.SIGKILL)

    thread = Thread(target=shrink, daemon=True)
    thread.start()
    values = settings(data, run, tracking__every_steps=5, train__epochs=20, plan__replan="on_resize")
    values["scaling"]["num_workers"] = {"min": 2, "max": 3}
    driver.train(values)
    thread.join()
    ray.kill(blocked[0])
    assert [event["workers"] for event in events(run, "start")] == [3, 2]
    (event,) = events(run, "replanned")
    assert event["ids_of_a_row"] == pytest.approx(IDS)
    plan = plan_of(run)
    assert plan["t0"] != plan["t2"], "by the schema both are on rank 0"
