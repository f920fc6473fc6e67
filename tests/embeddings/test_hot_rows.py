"""Rows of tables in files that are in memory, too: which ones, and that nothing depends on it."""

import pytest
import torch
from ranks import on_ranks
from small import SCHEMA, batches, build, config, train

from raytrec.compat.fbgemm import in_memory_of
from raytrec.compat.torchrec_ import sharded_kernels
from raytrec.embeddings.tables import tables
from raytrec.worker import build as build_module

# (plan.tables.*, the optimizer, world)
WAYS = {
    "one rank": ({"sharding_type": "table_wise"}, "rowwise_adagrad", 1),
    "row-wise": ({"sharding_type": "row_wise"}, "rowwise_adagrad", 2),
    "columns, fp16": ({"sharding_type": "column_wise", "dtype": "fp16"}, "adagrad", 2),
    "fewer rows than ranks": ({"sharding_type": "row_wise"}, "sgd", 3),
}
SHARE = 0.3  # of rows, in memory


def built(world, plan, optimizer, kernel, share, folder, schema):
    """A Step whose tables have this share of their rows in memory: on tables as small as these TorchRec's
    planner counts more for ids than for rows."""
    made = config(world, plan | {"compute_kernel": kernel}, optimizer)
    made.plan.mmap_dir = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "hot_shares", lambda found, config, schema, world: [share] * world)
        return build(made, schema)


def schema_for(world):
    schema = SCHEMA.model_copy(deep=True)
    schema.tables["tag"].rows = 2 if world == 3 else 5
    return schema


def places_of(step):
    """Table's rows in memory, of each kernel that has any."""
    return [hot for kernel in sharded_kernels(step.model) if (hot := in_memory_of(kernel)) is not None]


def values_of(step):
    found = tables(step.model, step.optimizer).items()
    return {
        (name, kind): parts.dense()
        for name, table in found
        for kind, parts in {"weight": table.weight, **table.state}.items()
    }


def trained(rank, world, plan, optimizer, kernel, share, folder):
    """Losses; weights and state after some steps; and how many rows moved out of memory again."""
    schema = schema_for(world)
    step = built(world, plan, optimizer, kernel, share, folder, schema)
    written, places = [], places_of(step)
    for hot in places:
        hot.before_writing = written.append
    losses = [float(o.loss.detach()) for o in train(step, batches(16, rank, world, schema=schema)[1])]
    filled, moved = sum(hot._filled for hot in places), sum(len(rows) for rows in written)
    read = {
        name: shard.read(torch.arange(len(shard.rows)))
        for name, table in tables(step.model).items()
        for shard in table.weight.local
    }
    before = {name: values.clone() for name, values in read.items()}  # the file's are written next
    return losses, values_of(step), before, (filled, moved)


@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_tables_in_memory(way, tmp_path):
    plan, optimizer, world = WAYS[way]
    expected, in_file, found = (
        on_ranks(world, trained, plan, optimizer, kernel, share, str(tmp_path))
        for kernel, share in (("fused", 0.0), ("fused_mmap", 0.0), ("fused_mmap", SHARE))
    )
    assert all(counts == (0, 0) for *_, counts in [*expected, *in_file])
    assert any(filled and moved for *_, (filled, moved) in found)
    for of_rank in zip(expected, in_file, found, strict=True):
        (losses, wanted, read, _), *others = of_rank
        for its_losses, values, its_read, _ in others:
            assert its_losses == losses and values.keys() == wanted.keys()
            assert all(torch.equal(values[key], wanted[key]) for key in wanted)
            assert all(torch.equal(its_read[name], read[name]) for name in read)
