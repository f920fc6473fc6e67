"""Table shards as Ray actors: repeated deployments, their end, and their memory."""

import pytest
from exports import train_for_export
from served import assert_predictions_equal
from test_models import ModelCase
from waiting import wait_for

import raytrec
from raytrec.common.errors import RunError
from raytrec.scoring.load import load
from raytrec.serving.options import ServiceOptions
from raytrec.serving.replica_metrics import ReplicaMetrics
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
def test_repeated_deployment_keeps_the_shards(ray_cluster, export, monkeypatch):
    """test_table_shard_service.py kills shards of a whole service."""
    monkeypatch.setattr(pooling, "PAGE_BYTES", 32)  # rows of small tables are in both shards
    options = ServiceOptions(uri=export[0], name="films", table_shards=2, table_cache_mib=0, table_timeout_ms=20_000)
    shard.start_shards(options)
    try:
        model = load(export[0], make_lookups=shard.make_lookup_maker(options, ReplicaMetrics()))
        assert_predictions_equal(model.predict(export[1]).to_pydict(), load(export[0]).predict(export[1]))
        shards = list_shards()
        assert [each["Address"]["IPAddress"] for each in shards] == ["127.0.0.1"] * 2
        shard.start_shards(options)
        assert {each["Pid"] for each in list_shards()} == {each["Pid"] for each in shards}
    finally:
        shard.end_shards("films", 2)
    wait_for(lambda: not list_shards(), "the end of the shards", 60)


def test_missing_actors_and_too_little_memory_are_reported(ray_cluster, export, monkeypatch):
    options = ServiceOptions(uri=export[0], name="films", table_shards=2)
    with pytest.raises(RunError, match="table shard 0 cannot be reached"):
        load(export[0], make_lookups=shard.make_lookup_maker(options, ReplicaMetrics()))
    monkeypatch.setattr(shard, "read_manifest", lambda uri: EnlargedManifest())
    with pytest.raises(RunError, match=r"table shards \(2\) need .* of memory each"):
        shard.start_shards(options)


class EnlargedManifest:
    """Part of the manifest of an export with a table of 1 PB."""

    class Stack:
        files = ("x",)

    class Entry:
        bytes = 10**15

    stacks, files = [Stack], {"x": Entry}
