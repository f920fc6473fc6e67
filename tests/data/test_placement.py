"""On a cluster with GPU and CPU nodes, rows are read on the CPU nodes."""

import time
from collections import Counter

import parquet
import pytest
import warm
from pydantic import TypeAdapter

from raytrec.config.run_config import RunConfig
from raytrec.config.transforms import Transform

TRANSFORM = {"do": "where_am_i:note", "options": {"log": None}}
MODULE = """
import os, ray

def note(table, log):
    if len(table):
        with open(log, "a") as file:
            file.write(ray.get_runtime_context().get_node_id() + "\\n")
    return table
"""


@pytest.fixture
def mixed_cluster(monkeypatch):
    """Yield a cluster of two raylets on loopback: one registered with a GPU, and one without."""
    import ray
    from ray.cluster_utils import Cluster

    from raytrec.cluster.session import stay_on_loopback
    from raytrec.compat.ray_start import omit_unneeded_processes

    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    stay_on_loopback()
    gpu = {"num_cpus": 4, "num_gpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 200 << 20}
    with warm.fork_ray_workers(), omit_unneeded_processes():
        cluster = Cluster(initialize_head=True, head_node_args=gpu)
        try:
            plain = cluster.add_node(num_cpus=4, node_ip_address="127.0.0.1", object_store_memory=200 << 20)
            ray.init(cluster.address, log_to_driver=False)
            yield cluster, plain
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.parametrize(
    "read_on,cpus,elsewhere", [("auto", 8, 0.25), ("auto", 64, 1), ("cpu_nodes", 8, 1), ("gpu_nodes", 64, 0)]
)
def test_reads_are_distributed_in_proportion_to_cpus(monkeypatch, read_on, cpus, elsewhere):
    from raytrec.data import stream

    monkeypatch.setattr(stream, "_count_nodes", lambda _: {"a": cpus / 4, "b": 3 * cpus / 4})
    monkeypatch.setattr(stream, "prefer_node", lambda node: node)
    found = Counter(stream.choose_read_options(32, read_on)["scheduling_strategy"] for _ in range(4000))
    assert (found["a"] + found["b"]) / 4000 == pytest.approx(elsewhere, abs=0.05)
    assert not elsewhere or found["b"] / found["a"] == pytest.approx(3, rel=0.25)


@pytest.mark.parametrize("read_on,cpus,found", [("auto", 4, True), ("auto", 3, False), ("cpu_nodes", 1, True)])
def test_reads_on_cpu_nodes_requires_enough_cpus(monkeypatch, read_on, cpus, found):
    from raytrec.driver import nodes

    monkeypatch.setattr(nodes, "has_autoscaler", lambda: False)
    monkeypatch.setattr(nodes, "find_nodes_without_gpus", lambda: {"a": cpus})
    data = {"train": "d/train", "readers": 2, "read_on": read_on}
    config = RunConfig.model_validate({"data": data, "scaling": {"num_workers": 2}})
    assert nodes.reads_on_cpu_nodes(config, "cuda") == found and not nodes.reads_on_cpu_nodes(config, "cpu")


@pytest.mark.survive
def test_read_tasks_avoid_gpu_nodes(mixed_cluster, tmp_path, monkeypatch):
    import ray

    from raytrec.data.fragments import scan
    from raytrec.data.order import Order
    from raytrec.data.read_plans import ReadPlan
    from raytrec.data.stream import Stream

    (tmp_path / "where_am_i.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    folder, log = parquet.write_split(tmp_path / "d", 3000, 0, row_group=50), tmp_path / "log"
    transforms = TypeAdapter(list[Transform]).validate_python([{**TRANSFORM, "options": {"log": str(log)}}])
    schema = parquet.tiny_schema()
    data = scan(str(folder), ReadPlan(schema, transforms=tuple(transforms)))

    @ray.remote(num_gpus=1, num_cpus=1)
    def train(read_on):
        stream = Stream(data, Order(100, 6, "groups"), rank=0, world=1, readers=2, read_on=read_on)
        rows = 0
        for batch in stream.batches():
            time.sleep(0.01)
            rows += int(batch.weights.sum())
        return ray.get_runtime_context().get_node_id(), rows

    cluster, plain = mixed_cluster
    node, rows = ray.get(train.remote("auto"), timeout=90)
    assert rows == 3000 and node != plain.node_id
    nodes = Counter(log.read_text().split())
    assert set(nodes) == {plain.node_id}, f"row groups read by node: {nodes}"
    log.unlink()
    assert ray.get(train.remote("gpu_nodes"), timeout=90) == (node, 3000)
    assert set(log.read_text().split()) == {node}
    log.unlink()
    cluster.remove_node(plain)
    assert ray.get(train.remote("auto"), timeout=90) == (node, 3000)
    assert set(log.read_text().split()) == {node}, "GPU nodes read if no other node is left"
