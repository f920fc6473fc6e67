"""The planner: its choices, the constraints it keeps, and its error when no plan fits."""

import os
from dataclasses import replace

import pytest
import torch
from dry import PlannedMemory
from ranks import run_on_ranks
from small import SCHEMA, make_batches, make_small_config, make_small_schema, train_step
from torchrec.distributed.planner import Topology

from raytrec.common.errors import ConfigError
from raytrec.compat.fbgemm import find_resident_rows
from raytrec.compat.ray_core import measure_system_memory
from raytrec.compat.torchrec_ import iterate_sharded_kernels
from raytrec.config.run_config import load_config
from raytrec.config.schema_parts import ManagedIds
from raytrec.embeddings.constraints import resolve_constraints
from raytrec.embeddings.pooling import PooledEmbeddings
from raytrec.embeddings.sharding import describe_plan, make_sharders
from raytrec.planning.dry_run import ClusterEstimator, dry_run
from raytrec.planning.machines import GPUS, MACHINES, Cluster, find_machine, find_network_bandwidth, parse_cluster
from raytrec.planning.memory import GIB, compute_rank_parts, exclude_training_memory
from raytrec.planning.plan import RankLocation, merge_resources, name_devices, search_plan, select_rates
from raytrec.planning.plan_report import Plans, print_plans
from raytrec.planning.rates import REACHED_RATE_SHARES
from raytrec.planning.step_cost import estimate_hot_rows
from raytrec.worker.build import build_step, build_unsharded, compute_run_plan


def schema(rows=100):
    tables = {f"t{i}": {"rows": rows, "dim": 8} for i in range(4)}
    return make_small_schema(sparse={t: {"table": t} for t in tables}, tables=tables)


def settings(world, plan, optimizer="adagrad", run=None):
    changes = {"run.dir": run, "scaling.num_workers": world, "optim.embeddings.name": optimizer}
    return load_config({"data": {"train": "d/train"}, "plan": plan}, changes)


def plan_tables(rank, world, plan, rows=100, optimizer="adagrad", run=None):
    """Return describe(plan) with the shard offsets of each table, or the error message."""
    try:
        _, plan = build_step(settings(world, plan, optimizer, run), schema(rows), torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    entries = describe_plan(plan)
    for entry in entries:
        (module,) = plan.plan.values()
        spec = module[entry["table"]].sharding_spec
        entry["offsets"] = [shard.shard_offsets for shard in spec.shards] if spec else None
    return entries


@pytest.mark.parametrize("sharding", [["table_wise"], ["row_wise"], ["table_wise", "data_parallel"]])
def test_plan_uses_only_allowed_sharding_types_and_kernels(sharding):
    one, two = run_on_ranks(2, plan_tables, {"sharding_types": sharding})
    assert one == two
    assert [entry["table"] for entry in one] == ["t0", "t1", "t2", "t3"]
    for entry in one:
        assert entry["sharding_type"] in sharding
        assert entry["compute_kernel"] == ("dense" if entry["sharding_type"] == "data_parallel" else "fused")
        assert set(entry["ranks"]) <= {0, 1}


@pytest.mark.slow
def test_planner_keeps_manual_table_settings():
    tables = {
        "t0": {"ranks": [3]},
        "t1": {"sharding_type": "column_wise", "ranks": [2, 1]},
        "t2": {"sharding_type": "table_row_wise", "ranks": [2, 3]},
        "t3": {"sharding_type": "row_wise", "compute_kernel": "fused_uvm"},
    }
    t0, t1, t2, t3 = run_on_ranks(4, plan_tables, {"tables": tables}, hosts=2)[0]
    assert (t0["sharding_type"], t0["ranks"]) == ("table_wise", [3])
    assert (t1["sharding_type"], t1["ranks"], t1["offsets"]) == ("column_wise", [2, 1], [[0, 0], [0, 4]])
    assert (t2["sharding_type"], t2["ranks"], t2["offsets"]) == ("table_row_wise", [2, 3], [[0, 0], [50, 0]])
    assert (t3["sharding_type"], t3["ranks"], t3["compute_kernel"]) == ("row_wise", [0, 1, 2, 3], "fused_uvm")


def test_planner_colocates_groups_and_balances_other_tables():
    plan = {"sharding_types": ["table_wise"], "colocate": [["t0", "t3"]]}
    t0, t1, t2, t3 = run_on_ranks(2, plan_tables, plan)[0]
    assert t0["ranks"] == t3["ranks"]
    assert t1["ranks"] == t2["ranks"] != t0["ranks"]
    plan["tables"] = {"t3": {"ranks": [1]}}
    t0, *_, t3 = run_on_ranks(2, plan_tables, plan)[0]
    assert t0["ranks"] == t3["ranks"] == [1]


@pytest.mark.parametrize("sharding", ["column_wise", "table_column_wise", "grid_shard"])
def test_column_shards_use_distinct_ranks(sharding):
    for entry in run_on_ranks(4, plan_tables, {"sharding_types": [sharding]}, hosts=2)[0]:
        assert entry["sharding_type"] == sharding
        ranks = entry["ranks"]
        assert len(set(ranks)) == len(ranks) == (4 if sharding == "grid_shard" else 2)
        if sharding == "table_column_wise":
            assert ranks[0] // 2 == ranks[1] // 2  # one host
        if sharding == "grid_shard":
            assert entry["offsets"] == [[0, 0], [50, 0], [0, 4], [50, 4]]


@pytest.mark.parametrize("chosen", ["by hand", "by the planner"])
@pytest.mark.parametrize("free", [0, GIB // 10])
def test_disk_full_error_names_tables_size_and_resume_command(chosen, free, tmp_path):
    """Four tables take 0.06 GiB each with state; memory holds one of them, the disk one or none."""
    plan = {"sharding_types": ["table_wise"], "memory_gib": 0.1, "mmap_dir": str(tmp_path)}
    if chosen == "by hand":
        plan["tables"] = {"t[0-2]": {"compute_kernel": "fused_mmap"}}
    else:
        plan["compute_kernels"] = ["fused", "fused_mmap"]
    (message,) = run_on_ranks(1, plan_on_small_disk, plan, free, None)
    assert "tables t0, t1, t2 need 183 MiB of disk" in message
    assert f"but only {'102 MiB' if free else '0 B'} are free" in message
    assert f"plan.mmap_dir, {tmp_path}" in message and "free up space" in message
    assert "add workers" not in message and "--resume" not in message
    (tmp_path / "config.yaml").touch()
    (message,) = run_on_ranks(1, plan_on_small_disk, plan, free, str(tmp_path))
    assert f"raytrec train --resume {tmp_path}" in message


@pytest.mark.slow
def test_planner_moves_tables_to_files_when_memory_is_short():
    plan = {"memory_gib": 0.1, "compute_kernels": ["fused", "fused_mmap"]}
    found = run_on_ranks(2, plan_tables, plan, 10**6)[0]  # each table takes 0.06 GiB with state
    assert [t["compute_kernel"] for t in found] == ["fused_mmap", "fused", "fused", "fused"]
    plan["memory_gib"] = 0.15
    assert {t["compute_kernel"] for t in run_on_ranks(2, plan_tables, plan, 10**6)[0]} == {"fused"}
    plan |= {"memory_gib": 0.1, "sharding_types": ["table_wise"]}  # one table for each of two workers
    found = run_on_ranks(2, plan_tables, plan, 10**6)[0]
    assert [t["compute_kernel"] for t in found] == ["fused_mmap", "fused_mmap", "fused", "fused"]


def plan_on_small_disk(rank, world, plan, free, run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytrec.planning.plan.measure_free_disk", lambda config: free)
        return plan_tables(rank, world, plan, 10**6, run=run)


def test_planner_rejects_pinned_tables_that_exceed_rank_memory():
    tables = {"t*": {"ranks": [1]}, "t3": {"sharding_type": "column_wise", "ranks": [1, 0]}}
    plan = {"sharding_types": ["table_wise"], "tables": tables, "memory_gib": 0.1}
    message = run_on_ranks(2, plan_tables, plan, 10**6, "sgd")[0]
    assert "does not fit into the remaining space of rank 1" in message


def places(*counts, local=None):
    """Return the places of ranks on hosts with these rank counts, one GPU per rank and 1 TiB per host.

    The GPU indices of a host are sorted as strings, as by Ray: 10 comes before 2. `local` is LOCAL_WORLD_SIZE.
    """
    return [
        RankLocation(f"host{host}", local or count, f"cuda:{index}", 80 * GIB, 1024 * GIB)
        for host, count in enumerate(counts)
        for index in sorted(range(count), key=str)
    ]


@pytest.mark.parametrize(
    "ranks,local",
    [
        (places(8, 8), 8),
        (places(8, 5), 1),
        (places(4, 2), 1),
        (places(8, 8, local=4), 4),
        (places(4, 4, local=8), 8),
        (places(12, 12), 12),
    ],
    ids=["equal", "8+5", "4+2", "halves of hosts", "two hosts as one", "many GPUs"],
)
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "table_row_wise", "column_wise"])
def test_shards_are_placed_on_the_gpus_of_their_ranks(ranks, local, sharding):
    made = settings(len(ranks), {"sharding_types": [sharding]})
    on = merge_resources(ranks, made.plan)
    assert on.ranks_per_host == local
    topology = Topology(len(ranks), "cuda", hbm_cap=on.memory, local_world_size=on.ranks_per_host)
    given = schema(), made, PooledEmbeddings(schema()), make_sharders()
    plan = name_devices(search_plan(on, topology, resolve_constraints(made, schema()), *given), on.devices)
    (module,) = plan.plan.values()
    named = {str(shard.placement) for spec in module.values() for shard in spec.sharding_spec.shards}
    expected = {f"rank:{rank}/{place.device}" for rank, place in enumerate(ranks)}
    assert named == expected if sharding == "row_wise" else named and named <= expected


def test_memory_limit_is_the_minimum_over_ranks():
    """All ranks use the same limit, so they fail together and no rank waits for another rank's plan."""
    section = settings(1, {}).plan
    alone = RankLocation("alone", 4, "cuda:0", 40 * GIB, 600 * GIB)
    on = merge_resources([*places(4), alone], section)
    assert (on.memory, on.host_share) == (40 * GIB, 256 * GIB)
    on_cpu = [RankLocation("host", 4, "cpu", None, 64 * GIB)] * 4
    assert merge_resources(on_cpu, section).memory == 16 * GIB
    section.memory_gib = 3
    assert merge_resources(places(4), section).memory == merge_resources(on_cpu, section).memory == 3 * GIB


@pytest.mark.parametrize(
    "gpus,memory,intra_host,inter_host",
    [
        (["NVIDIA H100 80GB HBM3"], 3350, 450, 50),
        (["NVIDIA H100 80GB HBM3", "NVIDIA L40S"], 864, 32, 6.25),
        (["NVIDIA A100 80GB PCIe"], 1935, 32, 12.5),
        (["NVIDIA H100 80GB HBM3", "one of next year"], 900, 150, 12.5),
    ],
    ids=["one GPU type", "the slower type", "no network", "unknown type"],
)
def test_planner_rates_match_the_slowest_gpu(gpus, memory, intra_host, inter_host):
    ranks = [replace(place, gpu=gpus[i % len(gpus)]) for i, place in enumerate(places(4, 4))]
    rates = select_rates(merge_resources(ranks, settings(8, {}).plan), "cuda", 8)
    assert rates.copy == pytest.approx(REACHED_RATE_SHARES["copy"] * memory * 1e9)
    reached = rates.bandwidth["all_reduce"], rates.far
    assert reached == pytest.approx([REACHED_RATE_SHARES["wire"] * gb * 1e9 for gb in (intra_host, inter_host)])


@pytest.mark.parametrize("name", list(MACHINES))
def test_machine_specifications_are_complete(name):
    machine = find_machine(name)
    assert machine.name == name and machine.gpu in GPUS and name.startswith(f"{machine.gpus}x")
    assert parse_cluster(f"3x{name}").world == 3 * machine.gpus and parse_cluster(name).machine is machine
    assert 0 < machine.gpu_network <= find_network_bandwidth(machine.gpu) <= GPUS[machine.gpu].intra_host
    assert machine.cpus >= machine.gpus and machine.memory_gib > 0 and machine.disk_gib > 0


def test_unknown_machine_error_suggests_nearest_name():
    assert find_machine("8xH100") is MACHINES["8xh100-sxm"]
    with pytest.raises(ConfigError, match="8xh100-sx'; did you mean '8xh100-sxm'"):
        parse_cluster("2x8xh100-sx")
    with pytest.raises(ConfigError, match="the number of machines is 0"):
        parse_cluster("0x8xh200")
    with pytest.raises(ConfigError, match="the number of GPUs is 0"):
        parse_cluster("0x48gib")
    with pytest.raises(ConfigError, match="the number of GiB per GPU is 0"):
        parse_cluster("2x4x0gib")


@pytest.mark.parametrize(
    "text,sizes",
    [
        ("2x4x48gib", (2, 4, 48, 384, 1e6)),
        ("4x47.5GiB:300gib", (1, 4, 47.5, 300, 1e6)),
        ("3x1x8gib:16gib:100gib", (3, 1, 8, 16, 100)),
    ],
)
def test_cluster_is_parsed_from_memory_sizes(text, sizes):
    assert parse_cluster(text) == Cluster(*sizes)


def test_gpu_speed_changes_the_sharding_type():
    tables = {f"t{i}": {"rows": 5000, "dim": 128} for i in range(8)}
    given = make_small_schema(sparse={t: {"table": t} for t in tables}, tables=tables)
    made = settings(8, {"sharding_types": ["table_wise", "data_parallel"]})
    made.data.global_batch_size = 65536
    slow, unknown = parse_cluster("8xl4"), Cluster(1, 8, 80, 640, 1000)
    assert dry_run(made, given, unknown)[0].sharding_type == "table_wise"
    assert dry_run(made, given, slow)[0].sharding_type == "data_parallel"


def train_on_gpus(rank, world, gpus, local):
    """Return the placements of a table's shards after one step on these GPUs."""
    made = make_small_config(world, {"sharding_type": "row_wise"})
    device = torch.device("cuda", gpus[rank])
    torch.cuda.set_device(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "LOCAL_WORLD_SIZE", str(local[rank]))
        step, plan = build_step(made, SCHEMA, device)
        assert len(train_step(step, make_batches(1, rank, world)[1])) == 1
        step.model.state_dict()
    (module,) = plan.plan.values()
    return [str(shard.placement) for shard in module["user"].sharding_spec.shards]


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus,local",
    [([0, 1, 0], [2, 2, 1]), ([2, 0, 1], [3, 3, 3]), ([0, 1, 2], [1, 1, 1])],
    ids=["2+1", "another order", "one per host"],
)
def test_training_steps_run_on_the_gpus_of_their_ranks(gpus, local):
    expected = [f"rank:{rank}/cuda:{index}" for rank, index in enumerate(gpus)]
    assert run_on_ranks(3, train_on_gpus, gpus, local, device="cuda") == [expected] * 3


def dry(tables, optimizer="adagrad", rows=10_000_000, hosts=1, gpus=2, memory_gib=4, **options):
    """Return the memory of a dry run; options are scaling.device, plan.compute_kernels and those of PlannedMemory."""
    plan = {"sharding_types": ["row_wise"], "tables": tables}
    made = settings(1, plan | {"compute_kernels": options.pop("kernels", ["fused"])}, optimizer)
    made.scaling.device, made.checkpoint.async_save = options.pop("device", "auto"), False
    return PlannedMemory(made, schema(rows), hosts, gpus, memory_gib, **options)


def plan_kernels_on_gpu(rank, world, plan, rows):
    """Return the kernels of the plan without creating tables, or the error message."""
    try:
        plan = compute_run_plan(settings(world, plan), schema(rows), torch.device("cuda", 0))
    except ConfigError as error:
        return str(error)
    return [spec.compute_kernel for module in plan.plan.values() for spec in module.values()]


def test_planner_rejects_tables_larger_than_host_memory():
    """TorchRec assumes 128 GiB of host memory per rank."""
    rows = 2 * measure_system_memory() // (4 * 8 * 8)  # four tables of 8 columns, with state of that size
    plan = {"tables": {"t*": {"compute_kernel": "fused_uvm"}}}
    (message,) = run_on_ranks(1, plan_kernels_on_gpu, plan, rows, device="cuda")
    assert "cannot place 4 tables" in message and "of host memory" in message
    assert "scaling.num_workers" in message
    assert run_on_ranks(1, plan_kernels_on_gpu, plan, 1000, device="cuda") == [["fused_uvm"] * 4]


@pytest.mark.parametrize("kinds, is_advised", [(["table_wise", "row_wise"], False), (["table_wise"], True)])
def test_row_wise_is_advised_only_if_it_is_not_allowed(kinds, is_advised):
    config = settings(2, {"sharding_types": kinds})
    with pytest.raises(ConfigError, match=r"cannot place 4 tables \(.*\) on 2 workers") as error:
        dry_run(config, schema(10**7), Cluster.from_sizes(2, 1, 0.1, 100))
    assert ("add row_wise to plan.sharding_types" in error.value.do) is is_advised


@pytest.mark.parametrize("device, label, place", [("cpu", "memory", "memory"), ("cuda", "GPU", "GPU memory")])
def test_plan_names_the_memory_of_the_device(device, label, place, capsys):
    config = load_config(settings(2, {}), {"scaling.device": device})
    estimate = ClusterEstimator(config, schema(), build_unsharded)(Cluster.from_sizes(2, 1, 0.1, 100))
    print_plans(Plans(config=config, schema=schema(), on=[estimate]))
    shown = capsys.readouterr().out
    assert f"{label}: weights" in shown and f" GiB of {place}, " in shown
    assert ("GPU" in shown) is (device == "cuda")


def test_plan_reports_that_no_machine_fits(capsys):
    print_plans(Plans(config=settings(2, {}), schema=schema(), on=[], prices={"8xh100-sxm": 1.0}))
    assert "fits on none of the machine types" in capsys.readouterr().out


def test_uvm_tables_count_towards_host_memory():
    """Four tables of 0.3 GiB, with state of the same size; t0 and t1 are in the memory of two hosts."""
    size = 10_000_000 * 8 * 4 * 2 / GIB
    tables = {"t0": {"compute_kernel": "fused_uvm"}, "t1": {"compute_kernel": "fused_uvm_caching"}}
    found = dry(tables, hosts=2, gpus=1, memory_gib=2, host_memory_gib=3)
    t0, t1, t2 = (found.of[name] for name in ("t0", "t1", "t2"))
    assert t0["device"] == [0, 0] and t0["host"] == pytest.approx([size / 2] * 2)
    assert t2["device"] == pytest.approx([size / 2] * 2) and t2["host"] == [0, 0]
    assert t1["host"] == pytest.approx([size / 2] * 2)
    cache = 5_000_000 * (4 + 0.2 * (16 + 8 * 4)) / GIB
    assert t1["device"] == pytest.approx([cache] * 2, rel=1e-6)
    assert found.ranks["host"] == pytest.approx([size] * 2)
    assert found.ranks["device"] == pytest.approx([size + cache] * 2)
    # Tables cannot use 15 % of each host and 0.5 GiB of prefetched rows.
    with pytest.raises(ConfigError, match=r"cannot place 4 tables(.|\n)*2.0 GiB per GPU.*0.5 GiB of host"):
        dry(tables, hosts=2, gpus=1, memory_gib=2, host_memory_gib=1.2)
    dry(tables | {"t*": {"compute_kernel": "fused_uvm"}}, memory_gib=0.3, host_memory_gib=8)


def test_cpu_plan_counts_memory_and_disk():
    size = 10_000_000 * 8 * 4 * 2 / GIB  # 0.6 GiB
    tables = {"t0": {"compute_kernel": "fused_mmap"}, "t1": {"compute_kernel": "fused_uvm"}}
    found = dry(tables, hosts=2, gpus=1, memory_gib=1, device="cpu")
    t0, t1 = found.of["t0"], found.of["t1"]
    assert t0["device"] == [0, 0] and t0["disk"] == pytest.approx([size / 2] * 2)
    assert t1["host"] == t1["disk"] == [0, 0]
    assert found.ranks["disk"] == pytest.approx([size / 2] * 2)
    assert found.ranks["device"] == pytest.approx([3 * size / 2] * 2)
    with pytest.raises(ConfigError, match=r"cannot place 4 tables(.|\n)*0.2 GiB of disk"):
        dry(tables, hosts=2, gpus=1, memory_gib=1, device="cpu", disk_gib=0.2)


def test_plan_counts_resident_rows_of_file_tables():
    """Four tables of 0.6 GiB on two workers; two tables are in files."""
    size, maps = 10_000_000 * 8 * 4 * 2 / GIB, 10_000_000 * 4 / GIB
    plan = {"memory_gib": 0.8, "sharding_types": ["row_wise"], "tables": {"t[01]": {"compute_kernel": "fused_mmap"}}}
    made, given, cluster = settings(2, plan), schema(10_000_000), Cluster(2, 1, 4, 8, 100)
    made.scaling.device = "cpu"
    tables = dry_run(made, given, cluster)

    def hot():
        return [taken / GIB for _, taken in estimate_hot_rows(compute_rank_parts(tables, made, given), made, given, 2)]

    assert hot() == pytest.approx([0.8 - size] * 2, rel=1e-6), "remaining memory"
    made.plan.memory_gib = 10
    assert hot() == pytest.approx([size + 10_000_000 * 10 / GIB + maps] * 2, rel=1e-6), "all rows"
    made.plan.memory_gib = None
    assert hot() == [0, 0]


def get_resident_shares(rank, world, memory_gib):
    plan = {"memory_gib": memory_gib, "tables": {"*": {"sharding_type": "row_wise", "compute_kernel": "fused_mmap"}}}
    step, _ = build_step(settings(world, plan), schema(200_000), torch.device("cpu"))
    places = [find_resident_rows(kernel) for kernel in iterate_sharded_kernels(step.model)]
    return [hot and hot._count / hot._rows for hot in places]


@pytest.mark.slow
def test_resident_rows_match_the_plan():
    """Four tables of 12 MiB, with state, on two workers."""
    shares = run_on_ranks(2, get_resident_shares, 0.015)
    per_row = 8 * 4 * 2
    expected = (0.015 * GIB / 400_000 - 4) / (per_row + 10)
    assert 0.2 < expected < 0.6 and shares == [pytest.approx([expected] * 4, rel=1e-4)] * 2
    assert run_on_ranks(2, get_resident_shares, None) == [[None]] * 2, "no limit: no resident rows"


def test_planner_uses_host_memory_when_gpu_memory_is_short():
    size = 10_000_000 * 8 * 4 * 2 / GIB
    kernels = ["fused", "fused_uvm"]
    roomy = dry({}, memory_gib=4 * size, kernels=kernels)
    assert {table.compute_kernel for table in roomy.plan.values()} == {"fused"}
    scarce = dry({}, memory_gib=1.6 * size, kernels=kernels)
    assert {table.compute_kernel for table in scarce.plan.values()} == {"fused", "fused_uvm"}
    in_host_memory = [name for name, table in scarce.plan.items() if table.compute_kernel == "fused_uvm"]
    assert all(scarce.of[name]["host"] != [0, 0] for name in in_host_memory)


@pytest.mark.parametrize("optimizer,bytes_", [("adagrad", 6), ("adam", 10), ("sgd", 2)])
def test_optimizer_state_of_fp16_tables_counts_as_fp32(optimizer, bytes_):
    """Tables that would only fit with fp16 state have no plan, because GPU memory would run out."""
    values = 4 * 10_000_000 * 8 / 2  # per GPU, of two
    needed = values * bytes_ / GIB / 0.85  # the planner's reserve
    tables = {"t*": {"dtype": "fp16"}}
    found = dry(tables, optimizer, memory_gib=needed + 0.05)
    assert sum(found.of["t0"]["device"]) == pytest.approx(10_000_000 * 8 * bytes_ / GIB)
    with pytest.raises(ConfigError, match="cannot place 4 tables"):
        dry(tables, optimizer, memory_gib=needed - 0.02)


def test_rowwise_state_counts_towards_gpu_memory():
    rows = 100_000_000
    on_gpus = 4 * rows * 4 / 2 / GIB / 0.85
    tables = {"t*": {"compute_kernel": "fused_uvm"}}
    dry(tables, "rowwise_adagrad", rows, memory_gib=on_gpus + 0.05, host_memory_gib=100)
    with pytest.raises(ConfigError, match="cannot place 4 tables"):
        dry(tables, "rowwise_adagrad", rows, memory_gib=on_gpus - 0.05, host_memory_gib=100)


def test_inference_plan_needs_no_optimizer_state_memory():
    weights = 4 * 10_000_000 * 8 * 4 / 2 / GIB / 0.85  # on each of two GPUs
    config, options = settings(1, {"sharding_types": ["row_wise"]}), {"gpus": 2, "host_memory_gib": 16}
    with pytest.raises(ConfigError, match="cannot place 4 tables"):
        PlannedMemory(config, schema(10_000_000), memory_gib=weights + 0.1, **options)
    PlannedMemory(exclude_training_memory(config), schema(10_000_000), memory_gib=weights + 0.1, **options)


def test_managed_id_tables_do_not_use_uvm_caching():
    made = schema(100_000_000)
    made.tables["t2"] = made.tables["t2"].model_copy(update={"ids": ManagedIds()})

    def plan(*kernels):
        config = settings(1, {"sharding_types": ["row_wise"], "compute_kernels": list(kernels)})
        tables = PlannedMemory(config, made, gpus=2, memory_gib=14, host_memory_gib=200).plan
        return {name: table.compute_kernel for name, table in tables.items()}

    found = plan("fused", "fused_uvm_caching")
    assert found["t2"] == "fused" and set(found.values()) == {"fused", "fused_uvm_caching"}
    with pytest.raises(ConfigError, match="managed ids do not support kernel fused_uvm_caching"):
        plan("fused_uvm_caching")
