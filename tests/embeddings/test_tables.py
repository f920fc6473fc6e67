"""The Table interface: full and partial reads, reads on rank 0, optimizer state, and writes."""

import pytest
import torch
from ranks import run_on_ranks
from small import SCHEMA, build_step_on_rank, initial_rows, make_batches, make_small_config, train_step

from raytrec.common.errors import RunError
from raytrec.embeddings.tables import tables

CASES = [
    ("data_parallel", None, "adagrad", 2, 1),
    ("table_wise", None, "rowwise_adagrad", 2, 1),
    ("row_wise", None, "rowwise_adagrad", 2, 1),
    ("row_wise", "dense", "rowwise_adagrad", 4, 2),
    ("column_wise", None, "adagrad", 2, 1),
    ("column_wise", "dense", "adam", 2, 1),
    ("table_row_wise", None, "adagrad", 4, 2),
    ("table_column_wise", None, "adagrad", 4, 2),
    ("grid_shard", "fused_uvm", "adagrad", 4, 2),
]


def read_and_write(rank, world, sharding, kernel, optimizer):
    """Check all reads and writes of each table on this rank.

    Returns:
        Table → (number of copies of each value that this rank stores, weights and state after training).
    """
    plan = {"sharding_type": sharding, "compute_kernel": kernel}
    step, results = build_step_on_rank(make_small_config(world, plan, optimizer)), {}
    kernel = kernel or ("dense" if sharding == "data_parallel" else "fused")
    starts = {name: initial_rows(SCHEMA, name, 3, 0, spec.rows) for name, spec in SCHEMA.tables.items()}
    for name, table in tables(step.model).items():
        assert (table.name, table.shape, table.dtype) == (name, starts[name].shape, torch.float32)
        assert (table.sharding, table.kernel) == (sharding, kernel)
        whole, stored = table.weight.dense(), torch.zeros(table.shape)
        assert torch.equal(whole, starts[name])
        assert whole.is_leaf and whole.is_contiguous() and not whole.requires_grad
        for shard in table.weight.local:
            place = slice(shard.rows.start, shard.rows.stop), slice(shard.columns.start, shard.columns.stop)
            assert shard.rank == rank and torch.equal(shard.values, starts[name][place])
            stored[place] += 1
        results[name] = [stored]
    train_step(step, make_batches(4, rank, world)[1])
    trained = tables(step.model, step.optimizer)
    for name, table in trained.items():
        values = {"weight": table.weight} | table.state
        wholes = {kind: parts.dense() for kind, parts in values.items()}
        for kind, parts in values.items():
            assert torch.equal(parts.dense(range(1, 4)), wholes[kind][1:4])
            of_first = parts.dense(range(2, 5), first_only=True)
            assert of_first is None if rank else torch.equal(of_first, wholes[kind][2:5])
        results[name].append(wholes)
        table.weight.load(starts[name])
        table.weight.load(torch.full((2, 8), 7.0), first_row=1)
        for parts in table.state.values():
            parts.load(torch.full(parts.shape, 2.0))
    # Writes through one Table are visible through another and in the model.
    for name, table in tables(step.model, step.optimizer).items():
        expected = starts[name].clone()
        expected[1:3] = 7
        assert torch.equal(table.weight.dense(), expected)
        assert all((parts.dense() == 2).all() for parts in table.state.values())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("sharding,kernel,optimizer,world,hosts", CASES)
def test_all_shardings_read_and_write_equally(sharding, kernel, optimizer, world, hosts):
    ranks = run_on_ranks(world, read_and_write, sharding, kernel, optimizer, hosts=hosts)
    copies = world if sharding == "data_parallel" else 1
    kinds = {"weight", "exp_avg", "exp_avg_sq"} if optimizer == "adam" else {"weight", "sum"}
    for name, spec in SCHEMA.tables.items():
        stored = sum(rank[name][0] for rank in ranks)
        assert torch.equal(stored, torch.full_like(stored, copies)), "each value is stored once per copy"
        trained = ranks[0][name][1]
        assert trained.keys() == kinds
        for kind, values in trained.items():
            by_row = optimizer == "rowwise_adagrad" and kind == "sum"
            assert values.shape == ((spec.rows,) if by_row else (spec.rows, 8))
            start = initial_rows(SCHEMA, name, 3, 0, spec.rows) if kind == "weight" else torch.zeros_like(values)
            assert not torch.equal(values, start), "the values are trained"
            assert all(torch.equal(rank[name][1][kind], values) for rank in ranks)


def collect_messages(*calls):
    """Return the message of the RunError that each call raises."""
    messages = []
    for call in calls:
        with pytest.raises(RunError) as error:
            call()
        messages.append(str(error.value))
    return messages


def collect_errors(rank, world):
    table = tables(build_step_on_rank(make_small_config(world, {"sharding_type": "row_wise"})).model)["user"]
    return collect_messages(
        lambda: table.weight.dense(range(20, 24)),
        lambda: table.weight.load(torch.zeros(2, 4)),
        lambda: table.weight.load(torch.zeros(2, 8), first_row=22),
    )


def test_invalid_rows_and_widths_are_rejected():
    for rows, width, outside in run_on_ranks(2, collect_errors):
        assert "range(20, 24) is not a valid range of a table of 23 rows" in rows
        assert "(2, 4)" in width and "[rows, 8]" in width
        assert "range(22, 24)" in outside


def try_casts(rank, world, sharding):
    """Return the error messages of casts, the dtypes afterwards, and whether the table still trains."""
    step = build_step_on_rank(make_small_config(world, {"sharding_type": sharding}))
    model, half = step.model, torch.float16
    said = collect_messages(model.bfloat16, model.half, model.double, lambda: model.to(half), lambda: model.type(half))
    step.model.float()
    step.model.to("cpu")
    dtypes = {str(p.dtype) for p in step.model.parameters()}
    start = tables(step.model)["user"].weight.dense()
    train_step(step, make_batches(1, rank, world)[1])
    return said, dtypes, bool((tables(step.model)["user"].weight.dense() != start).any())


@pytest.mark.parametrize("sharding", ["data_parallel", "row_wise"])
def test_cast_after_sharding_raises_a_helpful_error(sharding):
    for said, dtypes, trains in run_on_ranks(2, try_casts, sharding):
        assert all("plan.tables.TABLE.dtype" in text for text in said)
        assert dtypes == {"torch.float32"} and trains
