"""Predicted memory, loads and step time of plans, compared with hand calculations."""

import json

import numpy as np
import pytest
from small import make_small_schema
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Statistics
from raytrec.planning import dense_work
from raytrec.planning.dense_work import count_dense_layers
from raytrec.planning.dry_run import ClusterEstimator
from raytrec.planning.loads import Loads, estimate_hit_share
from raytrec.planning.machines import Cluster, parse_cluster
from raytrec.planning.rates import Rates
from raytrec.planning.step_cost import _estimate_output_exchange_s
from raytrec.worker.build import build_unsharded

ROWS, DIM, WORLD = 1000, 32, 4
BYTES = ROWS * DIM * 4  # 128,000
# For one table on two hosts with two ranks each: weight bytes per rank, and rows per shard.
SHARDS = {
    "table_wise": ([BYTES, 0, 0, 0], ROWS),
    "row_wise": ([BYTES / 4] * 4, 250),
    "column_wise": ([BYTES / 4] * 4, ROWS),
    "table_row_wise": ([BYTES / 2, BYTES / 2, 0, 0], 500),
    "table_column_wise": ([BYTES / 2, BYTES / 2, 0, 0], ROWS),
    "grid_shard": ([BYTES / 4] * 4, 500),
    "data_parallel": ([BYTES] * 4, ROWS),
}
COLUMN_SHARDING_TYPES = ("column_wise", "table_column_wise", "grid_shard")


@pytest.fixture(autouse=True)
def cache_dense_counts(monkeypatch, counts={}):  # noqa: B006
    """Count dense layers once per model and batch size for all tests."""

    def count(build, config, schema, rows):
        key = str(config.model), rows
        if key not in counts:
            counts[key] = count_dense_layers(build, config, schema, rows)
        return counts[key]

    monkeypatch.setattr(dense_work, "count_dense_layers", count)


def schema(ids=3, **parts):
    known = {"mean_length": ids, "p99_length": ids, "max_length": ids, "distinct": ROWS} | parts
    made = make_small_schema(dense=["a", "b"], sparse={"t": {"table": "t"}}, tables={"t": {"rows": ROWS, "dim": DIM}})
    return made.model_copy(update={"statistics": {"t": Statistics(**known)}})


def config(sharding="table_wise", kernel=None, optimizer="adagrad", device="cuda", ranks=None, **parts):
    table = {"sharding_type": sharding, "compute_kernel": kernel, "ranks": ranks}
    values = {
        "data": {"train": "d/train", "global_batch_size": 64},
        "scaling": {"num_workers": WORLD, "device": device},
        "model": {"bottom_mlp": [8], "top_mlp": [8]},
        "optim": {"embeddings": {"name": optimizer}},
        "plan": {"tables": {"t": {key: value for key, value in table.items() if value}}},
        "checkpoint": {"async_save": False},
    }
    return load_config(values | parts)


def predict_step(made, rates=None, of=None):
    found = ClusterEstimator(made, of or schema(), build_unsharded, rates)(Cluster(2, 2, 8, 32, 100))
    assert found.refusal is None, found.refusal
    return found


def iterate_table_cases():
    for sharding in SHARDS:
        for kernel in ("fused", "fused_uvm", "fused_uvm_caching", "dense"):
            if sharding == "data_parallel" and kernel != "dense":
                continue
            for optimizer in ("adagrad", "rowwise_adagrad", "sgd"):
                if not (sharding in COLUMN_SHARDING_TYPES and optimizer == "rowwise_adagrad"):
                    yield sharding, kernel, optimizer


@pytest.mark.parametrize("sharding,kernel,optimizer", list(iterate_table_cases()))
def test_table_memory_matches_hand_calculation(sharding, kernel, optimizer):
    ranks = {"table_wise": [0], "table_row_wise": [0, 1], "table_column_wise": [0, 1]}.get(sharding)
    parts = predict_step(config(sharding, kernel, optimizer, ranks=ranks)).memory.parts
    weights, rows = SHARDS[sharding]
    held = np.array(weights) > 0
    in_host_memory = kernel in ("fused_uvm", "fused_uvm_caching")
    expected = {("host" if in_host_memory else "device", "weights"): np.array(weights)}
    if optimizer == "adagrad":
        expected["host" if in_host_memory else "device", "optimizer state"] = np.array(weights)
    if optimizer == "rowwise_adagrad":  # 4 bytes per row, always on the GPU
        expected["device", "optimizer state"] = held * rows * 4
    if kernel == "fused_uvm_caching":  # FBGEMM cache: an index per row, and a share of the rows
        columns = np.array(weights) / 4 / rows
        expected["device", "cache"] = held * rows * (4 + UVM_CACHING_RATIO * (16 + columns * 4))
    for tier in ("device", "host"):
        for part in ("weights", "optimizer state", "cache"):
            found = parts.get((tier, part), np.zeros(WORLD))
            assert found == pytest.approx(expected.get((tier, part), np.zeros(WORLD))), (tier, part)
    dense = count_dense_layers(build_unsharded, config(), schema(), 16).parameters
    of_tables = 2 * np.array(weights) if kernel == "dense" else 0
    assert parts["device", "gradients"] == pytest.approx(dense + of_tables)


def test_step_memory_matches_hand_calculation():
    """64 rows of 3 ids on 4 ranks: 16 rows each."""
    made = config("table_wise", "fused", ranks=[0])
    made.checkpoint.async_save, made.train.ema = True, 0.9
    parts = predict_step(made).memory.parts
    dense = count_dense_layers(build_unsharded, made, schema(), 16).parameters
    batch = 16 * (3 * 8 + 4 + 4 * (2 + 1 + 1))
    arrived = np.array([64 * (3 * 8 + 4), 0, 0, 0])
    assert parts["device", "pipeline batches"] == pytest.approx(3 * batch + 2 * arrived)
    pooled, ids = np.array([64 * DIM * 4, 0, 0, 0]), np.array([64 * 3, 0, 0, 0])
    assert parts["device", "exchange buffers"] == pytest.approx(2 * pooled + 2 * 16 * DIM * 4 + 40 * ids)
    assert parts["device", "dense model"] == pytest.approx([dense * (1 + 2 + 1)] * 4), "Adam and EMA"
    copies = np.array([2 * BYTES, 0, 0, 0]) + dense * 4
    assert parts["host", "checkpoint copies"] == pytest.approx(copies)


@pytest.mark.parametrize(
    "sharding,near,far",
    [
        ("table_wise", 64 * DIM * 8 / 4, 64 * DIM * 8 / 2),  # one of three peers is on its host
        ("column_wise", 64 * DIM * 8 / 4 / 4, 64 * DIM * 8 / 2 / 4),
        ("row_wise", 64 * DIM * 4 * 3 / 4, 64 * DIM * 4 / 2),  # a ring
        ("table_row_wise", 64 * DIM * 4 / 2, 64 * DIM * 8 / 2 / 2),
    ],
)
def test_communication_volume_matches_hand_calculation(sharding, near, far):
    """Compare the rank with the largest volume: one collective per direction, or two of one kind."""
    loads = predict_step(config(sharding, "fused", "sgd")).loads
    kind = "reduce_scatter" if "row_wise" in sharding else "all_to_all"
    assert loads.near[kind].max() == pytest.approx(near)
    other = "all_to_all" if sharding == "table_row_wise" else kind
    assert loads.far[other].max() == pytest.approx(far)


def test_dense_flops_match_hand_calculation():
    made = config(model={"name": "dcn", "bottom_mlp": [16, 8], "cross_layers": 2, "cross_rank": 4, "top_mlp": [8]})
    work, x0 = count_dense_layers(build_unsharded, made, schema(), 10), 8 + DIM
    layers = [(2, 16), (16, 8), *[(x0, 4), (4, x0)] * 2, (x0, 8), (8, 1)]
    products = sum(2 * 10 * a * b for a, b in layers)
    assert work.flops == 3 * products - 2 * 10 * 2 * 16, "the inputs of the first layer need no gradient"
    biases = [16, 8, x0, x0, 8, 1]
    assert work.parameters == 4 * (sum(a * b for a, b in layers) + sum(biases))


def test_activation_memory_counts_only_live_tensors():
    made = config(model={"bottom_mlp": [4096], "top_mlp": [4096]})
    few, many = (count_dense_layers(build_unsharded, made, schema(), rows).activations for rows in (1000, 2000))
    assert many == pytest.approx(2 * few, rel=0.01)
    assert 2 * 4 * 4096 * 1000 < few < 8 * 4 * 4096 * 1000  # two layers and their gradients


def make_rates(**parts):
    values = {
        **{"source": "test", "device": "cpu", "ranks": 4, "cores": 2, "copy": 1e9, "stream": 1e9},
        "lookup": {way: [1e-9, 1e-7, 0] for way in ("adagrad", "dense", "sgd")},
        "matrix": dict.fromkeys(("fp32", "tf32", "bf16"), 1e9),
        "latency_s": dict.fromkeys(("all_to_all", "reduce_scatter", "all_gather", "all_reduce"), 1e-3),
        "bandwidth": dict.fromkeys(("all_to_all", "reduce_scatter", "all_gather", "all_reduce"), 1e8),
        **{"launch_s": 1e-5, "tensor_s": 0, "step_s": 0.01, "group_s": 0.001, "far": 1e7},
    }
    return Rates.from_json(json.dumps(values | parts), "test")


def test_cpu_step_time_is_the_sum_of_its_parts():
    made = config("table_wise", "fused", "adagrad", "cpu", ranks=[0])
    found = predict_step(made, make_rates())
    time, dense = found.time, count_dense_layers(build_unsharded, made, schema(), 16)
    ids = 64 * 3
    distinct = ROWS * (1 - (1 - 1 / ROWS) ** ids)
    touched = ids * DIM * 8 + 2 * distinct * DIM * 8 + 2 * 64 * DIM * 4
    assert time.parts["lookup"] == pytest.approx(touched * 1e-9 + ids * 1e-7, rel=1e-6)
    assert time.parts["input exchange"] == pytest.approx(3e-3 + 64 * 28 / 2 / 1e7, rel=1e-6)
    assert time.parts["output exchange"] == pytest.approx(2e-3 + 64 * DIM * 8 / 2 / 1e7)
    two_ranks_a_core = 2 / 2
    products = dense.flops / 1e9 + dense.bytes / 1e9 + dense.parameters * 7 / 1e9
    assert time.parts["dense layers"] == pytest.approx(products * two_ranks_a_core, rel=0.01)
    assert time.step == pytest.approx(sum(time.parts.values()) - time.parts["ingest"])
    assert time.rows_per_s == pytest.approx(64 / time.step) and time.bottleneck in time.parts


def test_vectors_of_ids_in_sequences_are_exchanged_all_to_all():
    latencies = dict.fromkeys(("reduce_scatter", "all_gather", "all_reduce"), 0.0) | {"all_to_all": 1.0}
    times = {}
    for table_read_by_id in ("", "t"):
        loads = Loads(WORLD, row_ids=3)
        loads.groups[table_read_by_id, "row_wise"] = 1
        times[table_read_by_id] = _estimate_output_exchange_s(loads, make_rates(latency_s=latencies), WORLD).max()
    assert times[""] == 0 and times["t"] >= 2


def test_ranks_sharing_cores_slow_down_dense_layers():
    estimate = ClusterEstimator(config("data_parallel", device="cpu"), schema(), build_unsharded, make_rates())
    one, four = (estimate(Cluster(1, ranks, 8, 32, 100)) for ranks in (1, 4))
    work = [count_dense_layers(build_unsharded, config(), schema(), rows) for rows in (64, 16)]
    ratio = four.time.parts["dense layers"] / one.time.parts["dense layers"]
    moved = [each.flops + each.bytes + 7 * each.parameters for each in work]
    assert ratio == pytest.approx(2 * moved[1] / moved[0], rel=0.02)


def test_hot_ids_touch_fewer_rows_and_hit_the_cache():
    hot = schema(hottest=[0.5, 0.9], distinct=100)
    made = config("row_wise", "fused", "sgd")
    cold, warm = (predict_step(made, of=of).loads.touched["sgd"] for of in (schema(), hot))
    assert warm.sum() < cold.sum()
    known = hot.statistics["t"]
    assert [estimate_hit_share(rows, known) for rows in (1, 10, 100)] == [0.5, 0.9, 1]
    assert 0.9 < estimate_hit_share(50, known) < 1 and estimate_hit_share(50, None) == 0.8


def test_faster_machine_has_shorter_step_parts():
    made = config("row_wise", "fused")
    estimate = ClusterEstimator(made, schema(), build_unsharded)
    slow, fast = (estimate(parse_cluster(name)).time.parts for name in ("4xa100-80", "4xh100"))
    assert all(fast[part] <= slow[part] for part in ("lookup", "dense layers", "host to device"))


@pytest.mark.parametrize(
    ("measured", "planned", "cluster"),
    [("cpu", "cuda", "8x80gib"), ("cuda", "cpu", "8x80gib"), ("cpu", "cuda", "4xh100")],
)
def test_rates_of_another_device_are_rejected(measured, planned, cluster):
    made = config(device="cpu" if "h100" in cluster else planned)
    estimate = ClusterEstimator(made, schema(), build_unsharded, make_rates(device=measured))
    with pytest.raises(ConfigError, match=f"measured on {measured}, but cluster .* is planned for {planned}"):
        estimate(parse_cluster(cluster))


@pytest.mark.parametrize("text", ["[]", "{", '{"copy": 1}', '{"source": 3, "other": 1}'])
def test_rates_reject_invalid_files(text, tmp_path):
    (tmp_path / "rates.json").write_text(text)
    with pytest.raises(ConfigError, match="does not contain valid rates"):
        Rates.load(tmp_path / "rates.json")
    with pytest.raises(ConfigError, match="cannot read the rates"):
        Rates.load(tmp_path / "none.json")


def test_rates_round_trip_through_json():
    rates = make_rates()
    assert Rates.from_json(rates.to_json(), "test") == rates


@pytest.mark.parametrize("part", ["matrix", "latency_s", "bandwidth"])
def test_rates_reject_missing_keys(part):
    with pytest.raises(ConfigError, match=f"the keys of {part} are not"):
        make_rates(**{part: {"fp32": 1e9, "all_to_all": 1e9}})


def test_rates_reject_unknown_keys():
    with pytest.raises(ConfigError, match="peers_s"):
        make_rates(peers_s=0)
