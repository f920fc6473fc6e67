"""Validation of manual plans in the driver, before any worker starts."""

from contextlib import nullcontext

import pytest
from small import make_small_schema

from raytrec.common.errors import ConfigError
from raytrec.config.features import Features
from raytrec.config.run_config import load_config
from raytrec.config.schema import Statistics
from raytrec.embeddings import constraints
from raytrec.embeddings.constraints import TableConstraint, resolve_constraints
from raytrec.planning import memory as planned_memory
from raytrec.planning.loads import group_lengths_by_table
from raytrec.planning.memory import GIB, HOST_RESERVE_SHARE
from raytrec.planning.validation import validate_constraints

ROWS = {"user": 100, "user_tag": 50, "item": 1000, "shop": 7}


def schema(dim=16):
    tables = {t: {"rows": n, "dim": dim} for t, n in ROWS.items()}
    return make_small_schema(sparse={t: {"table": t} for t in ROWS}, tables=tables)


def config(tables=None, together=(), optimizer="adagrad", workers=4, model=None, **plan):
    plan |= {"tables": tables or {}, "colocate": list(together)}
    values = {"data": {"train": "d/train"}, "model": model or {}, "plan": plan}
    return load_config(values, {"scaling.num_workers": workers, "optim.embeddings.name": optimizer})


def check_plan(tables=None, together=(), device="cpu", memory=None, given=None, **options):
    """Validate a plan of four workers on two hosts."""
    made = config(tables, together, **options)
    return validate_constraints(made, given or schema(), device, world=4, ranks_per_host=2, memory=memory)


def test_later_table_patterns_override_earlier_ones():
    tables = {
        "*": {"sharding_type": "row_wise", "compute_kernel": "fused"},
        "user*": {"dtype": "fp16"},
        "user_tag": {"sharding_type": "table_wise", "ranks": [2]},
    }
    found = resolve_constraints(config(tables), schema())
    assert found["item"] == TableConstraint(("row_wise",), kernel="fused")
    assert found["user"] == TableConstraint(("row_wise",), kernel="fused", dtype="fp16")
    assert found["user_tag"] == TableConstraint(("table_wise",), (2,), "fused", "fp16")


def test_planner_chooses_among_unset_options():
    resolved = resolve_constraints(config(sharding_types=["row_wise", "data_parallel"]), schema())
    assert {*resolved.values()} == {TableConstraint(("row_wise", "data_parallel"))}


def test_colocated_tables_share_the_pinned_rank():
    resolved = check_plan({"item": {"ranks": [3]}}, together=[["user*", "item"]])
    assert [resolved[t].ranks for t in ROWS] == [(3,), (3,), (3,), None]
    assert [resolved[t].group for t in ROWS] == [0, 0, 0, None]
    assert resolved["item"].sharding == ("table_wise",), "a table pinned to one rank is sharded table-wise"


def make_item_line(sharding=None, kernel=None, **line):
    """Return plan.tables with one line for table item."""
    both = {"sharding_type": sharding, "compute_kernel": kernel}
    return {"item": line | {key: value for key, value in both.items() if value}}


def test_manual_ranks_are_validated_before_hosts_are_known():
    """The driver of a cluster validates plans before the workers have been placed on hosts."""
    for ranks, message in ([2], None), ([4], "there is no rank 4"), ([0, 1], "cannot use ranks"):
        plan = config({"item": {"sharding_type": "table_wise", "ranks": ranks}, "shop": {"sharding_type": "row_wise"}})
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            validate_constraints(plan, schema(), "cpu", world=4)
    for kind, ranks in ("column_wise", [3, 1]), ("table_row_wise", [2, 3]), ("grid_shard", [0, 1]):
        validate_constraints(config(make_item_line(kind, ranks=ranks)), schema(), "cpu", world=4)
    with pytest.raises(ConfigError, match="16 columns into 3 parts"):
        validate_constraints(config(make_item_line("column_wise", ranks=[0, 1, 2])), schema(), "cpu", world=4)


@pytest.mark.parametrize(
    "tables,together,message",
    [
        ({"itme": {"compute_kernel": "fused"}}, [], "'itme'; did you mean 'item'"),
        ({"x*": {"compute_kernel": "fused"}}, [], "'x*'"),
        (make_item_line(ranks=[0, 1]), [], "table item: ranks [0, 1] are set without a sharding"),
        (make_item_line("table_wise", ranks=[4]), [], "table item: there is no rank 4"),
        (make_item_line("table_wise", ranks=[0, 1]), [], "table_wise cannot use ranks [0, 1]"),
        (make_item_line("row_wise", ranks=[0, 1]), [], "all ranks in order"),
        (make_item_line("column_wise", ranks=[0, 0]), [], "ranks [0, 0] contain duplicates"),
        (make_item_line("column_wise", ranks=[0, 1, 2]), [], "16 columns into 3 parts"),
        (make_item_line("table_row_wise", ranks=[1, 2]), [], "all ranks of one host"),
        (make_item_line("table_column_wise", ranks=[1, 2]), [], "ranks of one host"),
        (make_item_line("grid_shard", ranks=[0, 1, 2]), [], "all ranks of one or more hosts"),
        (make_item_line("data_parallel", "fused"), [], "data_parallel does not support kernel fused"),
        (make_item_line("data_parallel", "fused_mmap"), [], "data_parallel does not support kernel fused_mmap"),
        (make_item_line("data_parallel", dtype="fp16"), [], "dense kernels do not support dtype fp16"),
        (make_item_line(kernel="dense", dtype="fp16"), [], "dense kernels do not support dtype fp16"),
        ({}, [["user", "no-table"]], "'no-table'"),
        ({}, [["user", "item"], ["item", "shop"]], "table item: the table is in groups 1 and 2 of plan.colocate"),
        ({"user": {"sharding_type": "row_wise"}}, [["user", "item"]], "colocate does not allow row_wise"),
        ({"user": {"ranks": [0]}, "item": {"ranks": [1]}}, [["user", "item"]], "one rank for all tables"),
    ],
)
def test_plan_error_names_table_and_reason(tables, together, message):
    with pytest.raises(ConfigError) as error:
        check_plan(tables, together)
    assert message in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "line,options,message",
    [
        (make_item_line(kernel="fused"), {"optimizer": "adam"}, "kernel fused does not support optimizer adam"),
        (
            make_item_line(kernel="fused_mmap"),
            {"optimizer": "adam"},
            "kernel fused_mmap does not support optimizer adam",
        ),
        (make_item_line(dtype="fp16"), {"optimizer": "adam"}, "dense kernels do not support dtype fp16"),
        (make_item_line(kernel="fused", dtype="fp16"), {"optimizer": "adam", "device": "cuda"}, None),
        (make_item_line(kernel="fused_mmap"), {"device": "cuda"}, "GPUs do not support kernel fused_mmap, which reads"),
        (make_item_line(kernel="fused_mmap", ranks=[0]), {"memory": 1}, None),
    ],
)
def test_plan_rejects_kernels_missing_on_the_device(line, options, message):
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_plan(line, **options)


@pytest.mark.parametrize("sharding", ["column_wise", "table_column_wise", "grid_shard"])
def test_rowwise_adagrad_rejects_column_sharding(sharding):
    for plan in ({"tables": make_item_line(sharding)}, {"sharding_types": [sharding]}):
        with pytest.raises(ConfigError, match="one value per row"):
            check_plan(optimizer="rowwise_adagrad", **plan)


@pytest.mark.parametrize(
    "key,message",
    [
        ("plan.tables.item.dtype=bf16", "no training kernels for dtype bf16 on any device; use fp16 or fp32"),
        ("plan.tables.item.dtype=int8", "dtype int8 on any device; use fp16 or fp32; .*inference only"),
        ("plan.mmap_dir=s3://bucket/tables", r"plan\.mmap_dir: tables cannot be mapped from a URI"),
    ],
)
def test_config_rejects_unsupported_dtypes_and_mmap_dirs(key, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config(), [key])


INT8 = {"forward_precision": "int8"}


def test_int8_qcomms_exclude_sharding_types_that_add_sums():
    types = ["row_wise", "table_wise", "table_row_wise", "column_wise", "grid_shard", "data_parallel"]
    for qcomms in (INT8, {"backward_precision": "int8"}):
        resolved = check_plan(sharding_types=types, qcomms=qcomms, given=schema(64))
        assert {each.sharding for each in resolved.values()} == {("table_wise", "column_wise", "data_parallel")}
    assert check_plan(sharding_types=types, qcomms={"forward_precision": "bf16"})["item"].sharding == tuple(types)
    for sharding in ("row_wise", "table_row_wise", "grid_shard"):
        with pytest.raises(ConfigError, match=f"{sharding} cannot be used with plan.qcomms int8: .*add up"):
            check_plan(make_item_line(sharding), qcomms=INT8)


@pytest.mark.parametrize(
    "dims,sharding,message",
    [
        ((16, 32, 48, 64), "table_wise", None),
        ((12, 12, 36, 24), "table_wise", None),
        (
            (16, 32, 8, 64),
            "table_wise",
            "make exchanges smaller than fp16: each group of 8 values.*a shard of table item has 8",
        ),
        ((16, 16, 16, 20), "table_wise", "int8 would not make exchanges smaller than fp16: each group of 4 values"),
        ((16, 64, 64, 64), "column_wise", "a shard of table user has 4 columns"),  # 16 on 4 ranks
        ((8, 8, 8, 8), "data_parallel", None),
    ],
)
def test_int8_qcomms_need_widths_with_a_common_divisor(dims, sharding, message):
    given = schema()
    for table, dim in zip(given.tables.values(), dims, strict=True):
        table.dim = dim
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_plan(qcomms=INT8, sharding_types=[sharding], given=given)


def test_plan_rejects_group_larger_than_device_memory():
    # 1,150 rows × 16 × (4 bytes of weight + 4 of Adagrad) = 147,200 bytes
    check_plan({}, [["user", "user_tag", "item"]], memory=147_200)
    with pytest.raises(ConfigError, match=r"user, user_tag, item: .* GiB .*including optimizer state"):
        check_plan({}, [["user", "user_tag", "item"]], memory=147_199)
    check_plan({}, [["user", "item"]], memory=147_199)
    with pytest.raises(ConfigError, match="on one rank"):
        check_plan({t: {"ranks": [1]} for t in ROWS}, memory=147_200)


ITEM = 1000 * 16 * (4 + 4)  # bytes of table item: weights and Adagrad's state


@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_host_memory_tables_use_no_gpu_memory(kernel):
    constraint = make_item_line(kernel=kernel, ranks=[0])

    def checked(tables, room, groups=(), device="cuda"):
        """Validate a plan with `room` bytes of host memory for tables."""
        settings = config(tables, groups)
        settings.data.buffer_gib, settings.checkpoint.async_save = 1000 / GIB, False
        share = (room + 1000.5) / (1 - HOST_RESERVE_SHARE)
        validate_constraints(settings, schema(), device, world=4, ranks_per_host=2, memory=ITEM // 2, host_share=share)

    checked(constraint, ITEM)
    with pytest.raises(ConfigError, match=r"table item: .* of host memory on one rank"):
        checked(constraint, ITEM - 1)
    with pytest.raises(ConfigError, match="GiB on one rank are required"):  # on CPU, tables share one memory
        checked(constraint, ITEM, device="cpu")
    checked(make_item_line(kernel=kernel), ITEM, [["item", "shop"]])


def list_tables_in_files(memory, kernels=("fused", "fused_mmap"), tables=None, optimizer="adagrad"):
    """Return the tables in files for each attempt to find a plan."""
    settings = config(tables, optimizer=optimizer, compute_kernels=list(kernels))
    attempts = planned_memory.move_to_files(resolve_constraints(settings, schema()), schema(), settings, memory)
    return [[name for name, of in each.items() if of.kernel == "fused_mmap"] for each in attempts]


def test_largest_tables_move_to_files_first():
    whole = sum(ROWS.values()) * 16 * 8  # bytes with state
    assert list_tables_in_files(whole, ["fused"]) == [[]]
    assert list_tables_in_files(whole) == [[], ["item"], ["user", "item"], [*ROWS]]
    assert list_tables_in_files(whole - 1)[0] == ["item"]
    assert list_tables_in_files(whole - ITEM - 1)[0] == ["user", "item"]
    assert list_tables_in_files(0)[-1] == list_tables_in_files(whole, ["fused_mmap"])[0] == [*ROWS]
    assert list_tables_in_files(0, optimizer="adam") == [[]], "Adam updates are dense on CPU"
    fixed = {"item": {"compute_kernel": "fused"}, "shop": {"sharding_type": "data_parallel"}}
    assert list_tables_in_files(0, tables=fixed)[-1] == ["user", "user_tag"]


def test_gpus_reject_mmap_kernels():
    with pytest.raises(ConfigError, match="which GPUs do not support"):
        check_plan(device="cuda", compute_kernels=["fused_mmap"])
    both = config(compute_kernels=["fused_mmap", "fused", "fused_uvm"])
    assert constraints.list_kernel_choices(both, "cuda", managed=False) == ["fused", "fused_uvm"]
    assert constraints.list_kernel_choices(both, "cpu", managed=False) == ["fused"]


def test_host_memory_limit_reserves_checkpoint_copies():
    """A rank's share also holds a reserve, prefetched rows, and copies of its part of all tables."""
    settings, others = config(make_item_line(kernel="fused_uvm")), 157 * 16 * 8

    def estimate(share):
        resolved = resolve_constraints(settings, schema())
        return planned_memory.estimate_host_table_bytes(settings, schema(), resolved, 4, share)

    assert estimate(1000) == 0
    settings.data.buffer_gib = 1000 / GIB
    left = (1 - HOST_RESERVE_SHARE) * 200_000 - 1000
    for settings.checkpoint.async_save, room in ((True, (left - others / 4) / 2), (False, left)):
        assert estimate(200_000) == int(room)


def test_checkpoint_copies_of_gpu_tables_need_host_memory():
    settings, buffer = config(), int(0.5 * GIB)
    resolved = resolve_constraints(settings, schema())
    sizes = planned_memory.estimate_footprints(settings, schema(), resolved, "cuda").values()
    copies = sum(size.device for size in sizes) // 4
    options = {"world": 4, "ranks_per_host": 2}
    validate_constraints(settings, schema(), "cuda", host_share=buffer + copies + 4, **options)
    with pytest.raises(ConfigError, match="checkpoints copy") as error:
        validate_constraints(settings, schema(), "cuda", host_share=buffer + copies // 2, **options)
    assert error.value.where == "checkpoint.async_save"
    settings.checkpoint.async_save = False
    validate_constraints(settings, schema(), "cuda", host_share=buffer, **options)


@pytest.mark.parametrize(
    "dim,sharding,ranks,expected",
    [
        (16, "row_wise", None, 1),
        (16, "column_wise", None, 4),
        (12, "column_wise", None, 3),
        (4, "column_wise", None, 1),
        (64, "column_wise", (0, 2), 2),
        (64, "table_column_wise", None, 2),
        (64, "grid_shard", None, 2),
        (64, "grid_shard", (2, 3), 1),
        (64, "grid_shard", (2,), 1),  # fewer ranks than a host; refused by the planner
    ],
)
def test_column_shards_are_equal_and_multiples_of_four(dim, sharding, ranks, expected):
    assert constraints.count_column_shards(dim, (sharding,), ranks, world=4, local=2) == expected


SEQUENCES = make_small_schema(
    sparse={"item": {"table": "item"}, "history": {"table": "item", "pooling": "sequence"}, "user": {"table": "user"}},
    tables={"item": {"rows": 100, "dim": 16}, "user": {"rows": 100, "dim": 16}},
)


@pytest.mark.parametrize("sharding", ["table_row_wise", "table_column_wise", "grid_shard"])
def test_sequence_tables_reject_unsupported_sharding_types(sharding):
    def resolved(tables=None, **plan):
        model = {"name": "sequence", "target": "item"}
        return resolve_constraints(config(tables, model=model, **plan), SEQUENCES)

    with pytest.raises(ConfigError, match=f"cannot plan table item: {sharding} cannot be used for a table"):
        resolved(make_item_line(sharding))
    allowed = resolved(sharding_types=["table_wise", sharding, "row_wise"])
    assert allowed["item"].sharding == ("table_wise", "row_wise")
    assert allowed["user"].sharding == ("table_wise", sharding, "row_wise")
    with pytest.raises(ConfigError, match="cannot plan table item"):
        resolved(sharding_types=[sharding])


def test_planner_counts_sequence_lengths():
    assert group_lengths_by_table(SEQUENCES, Features(SEQUENCES, {"history": 50}))["item"] == [1.0, 50.0]
    assert group_lengths_by_table(SEQUENCES, Features(SEQUENCES, {}))["item"] == [1.0, 1.0]
    known = {"mean_length": 70.5, "p99_length": 200, "max_length": 500, "distinct": 1000}
    found = SEQUENCES.model_copy(update={"statistics": {"history": Statistics(**known)}})
    assert group_lengths_by_table(found, Features(SEQUENCES, {}))["item"] == [1.0, 70.5]
    assert group_lengths_by_table(found, Features(SEQUENCES, {"history": 50}))["item"] == [1.0, 50.0]
