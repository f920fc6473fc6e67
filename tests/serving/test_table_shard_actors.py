"""Table shards as Ray actors: killed shards, their restart, and their memory."""

import os
import signal

import pytest
from exports import train_for_export
from served import TOKEN, ServedApp, assert_predictions_equal
from test_models import ModelCase
from waiting import wait_for

import raytrec
from raytrec.common.errors import RunError
from raytrec.scoring.load import load
from raytrec.serving.app import Service
from raytrec.serving.loaded_exports import LoadedExports
from raytrec.serving.options import ServiceOptions
from raytrec.serving.replica_state import ReplicaMetrics
from raytrec.serving.table_shards import pooling, shard


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """Return the path of an export and a table of rows."""
    root = tmp_path_factory.mktemp("shards")
    folder, table, _, _ = train_for_export(ModelCase("dlrm", (1, 1)), root)
    return raytrec.export(folder, str(root / "export")).path, table


def list_shards():
    """Return the actors of shards that are alive, as Ray knows them."""
    import ray

    known = ray._private.state.actors().values()
    return [each for each in known if each["ActorClassName"] == "TableShard" and each["State"] == "ALIVE"]


@pytest.mark.survive
def test_killed_shard_restarts_and_loads_the_export(ray_cluster, export, monkeypatch):
    monkeypatch.setattr(pooling, "PAGE_BYTES", 32)  # rows of small tables are in both shards
    options = ServiceOptions(uri=export[0], name="films", table_shards=2, table_cache_mib=0, table_timeout_ms=20_000)
    shard.start_shards(options)
    try:
        figures, body = ReplicaMetrics(), {"rows": export[1].to_pylist()}
        versions = LoadedExports(export[0], make_lookups=shard.make_lookup_maker(options, figures))
        with ServedApp(Service(versions, TOKEN, figures=figures, threads=2)) as http:
            assert_predictions_equal(http.scores(body), load(export[0]).predict(export[1]))
            expected, shards = http.scores(body), list_shards()
            assert len(shards) == 2 and all(each["Address"]["IPAddress"] == "127.0.0.1" for each in shards)
            os.kill(shards[0]["Pid"], signal.SIGKILL)
            statuses = []

            def answers():
                status, _, headers = http.ask("/predict", body)
                statuses.append((status, headers["Retry-After"]))
                return status == 200 and len(statuses) > 1

            wait_for(answers, "the restarted shard", 120)
            assert http.scores(body) == expected and set(statuses) <= {(200, None), (503, "1")}
            assert (503, "1") in statuses
            shard.start_shards(options)  # as a repeated deployment does
            assert len(list_shards()) == 2
    finally:
        shard.end_shards("films", 2)
    wait_for(lambda: not list_shards(), "the end of the shards", 60)


def test_missing_actors_and_too_little_memory_are_reported(ray_cluster, export, monkeypatch):
    options = ServiceOptions(uri=export[0], name="films", table_shards=2)
    with pytest.raises(RunError, match="table shard 0 cannot be reached"):
        load(export[0], make_lookups=shard.make_lookup_maker(options, ReplicaMetrics()))
    monkeypatch.setattr(shard, "read_manifest", lambda uri: EnlargedManifest())
    with pytest.raises(RunError, match=r"a table shard needs .* of memory"):
        shard.start_shards(options)


class EnlargedManifest:
    """Part of the manifest of an export with a table of 1 PB."""

    class Stack:
        files = ("x",)

    class Entry:
        bytes = 10**15

    stacks, files = [Stack], {"x": Entry}
