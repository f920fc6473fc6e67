"""The Table interface: reads, reads on rank 0, optimizer state, and writes to shards."""

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


def write_rows(parts, values, first_row):
    """Write rows into this rank's shards: float [n, dim], or [n] for state with one value per row."""
    for shard in parts.local:
        rows = torch.arange(first_row, first_row + len(values))
        held = (rows >= shard.rows.start) & (rows < shard.rows.stop)
        new = values[held] if values.dim() == 1 else values[held, shard.columns.start : shard.columns.stop]
        with torch.no_grad():
            shard.write(rows[held] - shard.rows.start, new)


def read_and_write(rank, world, sharding, kernel, optimizer):
    step = build_step_on_rank(
        make_small_config(world, {"sharding_type": sharding, "compute_kernel": kernel}, optimizer)
    )
    before = tables(step.model)
    out = {"start": {n: t.weight.dense() for n, t in before.items()}, "facts": {}, "leaf": []}
    for name, table in before.items():
        out["facts"][name] = (table.name, table.shape, str(table.dtype), table.sharding, table.kernel)
        out["held"] = out.get("held", {}) | {
            name: [(s.rank, s.rows, s.columns, s.values.clone()) for s in table.weight.local]
        }
        whole = table.weight.dense()
        out["leaf"] += [whole.is_leaf, whole.is_contiguous(), not whole.requires_grad]
    train_step(step, make_batches(4, rank, world)[1])
    after = tables(step.model, step.optimizer)
    out["end"] = {n: t.weight.dense() for n, t in after.items()}
    out["first"] = {n: t.weight.dense(first_only=True) for n, t in after.items()}
    out["state"] = {n: {k: p.dense() for k, p in sorted(t.state.items())} for n, t in after.items()}
    out["first state"] = {
        n: {k: p.dense(first_only=True) for k, p in sorted(t.state.items())} for n, t in after.items()
    }
    # Writes through one Table are visible through another and in the model.
    for table in after.values():
        write_rows(table.weight, out["start"][table.name], 0)
        write_rows(table.weight, torch.full((2, 8), 7.0), 1)
        for parts in table.state.values():
            write_rows(parts, torch.full(parts.shape, 2.0), 0)
    again = tables(step.model, step.optimizer)
    out["loaded"] = {n: t.weight.dense() for n, t in again.items()}
    out["loaded state"] = {n: {k: p.dense() for k, p in sorted(t.state.items())} for n, t in again.items()}
    return out


@pytest.mark.slow
@pytest.mark.parametrize("sharding,kernel,optimizer,world,hosts", CASES)
def test_all_shardings_read_and_write_equally(sharding, kernel, optimizer, world, hosts):
    ranks = run_on_ranks(world, read_and_write, sharding, kernel, optimizer, hosts=hosts)
    first = ranks[0]
    kernel = kernel or ("dense" if sharding == "data_parallel" else "fused")
    copies = world if sharding == "data_parallel" else 1
    for name, spec in SCHEMA.tables.items():
        start = initial_rows(SCHEMA, name, 3, 0, spec.rows)
        assert first["facts"][name] == (name, (spec.rows, 8), "torch.float32", sharding, kernel)
        covered = torch.zeros(spec.rows, 8)
        for index, rank in enumerate(ranks):
            for owner, rows, columns, values in rank["held"][name]:
                assert owner == index
                assert torch.equal(values, start[rows.start : rows.stop, columns.start : columns.stop])
                covered[rows.start : rows.stop, columns.start : columns.stop] += 1
        assert torch.equal(covered, torch.full_like(covered, copies)), "each value is stored once per copy"
        end = first["end"][name]
        assert not torch.equal(end, start)
        kinds = {"adam": {"exp_avg", "exp_avg_sq"}}.get(optimizer, {"sum"})
        loaded = start.clone()
        loaded[1:3] = 7
        for index, rank in enumerate(ranks):
            assert torch.equal(rank["start"][name], start) and torch.equal(rank["end"][name], end)
            assert all(rank["leaf"])
            assert set(rank["state"][name]) == kinds
            assert torch.equal(rank["loaded"][name], loaded)
            for kind in kinds:
                state = rank["state"][name][kind]
                assert state.shape == ((spec.rows,) if optimizer == "rowwise_adagrad" else (spec.rows, 8))
                assert torch.equal(state, first["state"][name][kind]) and state.abs().sum() > 0
                assert (rank["loaded state"][name][kind] == 2).all()
                if index == 0:
                    assert torch.equal(rank["first"][name], end)
                    assert torch.equal(rank["first state"][name][kind], state)
                else:
                    assert rank["first"][name] is None and rank["first state"][name][kind] is None


def try_casts(rank, world, sharding):
    """Return the error messages of casts, the dtypes afterwards, and whether the table still trains."""
    step = build_step_on_rank(make_small_config(world, {"sharding_type": sharding}))
    said = []
    for wrong in (
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.float16),
        lambda m: m.type(torch.float16),
    ):
        with pytest.raises(RunError) as error:
            wrong(step.model)
        said.append(str(error.value))
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
