"""Initial values and where they go."""

import pytest
import torch
from ranks import on_ranks
from small import initial_rows
from torch.utils._python_dispatch import TorchDispatchMode

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.bags import table_of
from raytrec.embeddings.initial import BLOCK_VALUES, fill_tables
from raytrec.embeddings.tables import tables

BLOCK_ROWS = BLOCK_VALUES // 8
SCHEMA = Schema.parse(
    {
        "labels": ["y"],
        "sparse": {"big": {"table": "big"}, "small": {"table": "small"}},
        "tables": {"big": {"rows": BLOCK_ROWS + 500, "dim": 8}, "small": {"rows": 5, "dim": 8}},
    },
    "test",
)


def test_a_part_equals_that_part_of_the_whole():
    whole = initial_rows(SCHEMA, "big", 3, 0, BLOCK_ROWS + 500)
    for start, stop in (
        (0, 10),
        (BLOCK_ROWS - 3, BLOCK_ROWS + 4),
        (BLOCK_ROWS + 1, BLOCK_ROWS + 500),
        (7, 7),
    ):
        assert torch.equal(initial_rows(SCHEMA, "big", 3, start, stop), whole[start:stop])
    bound = (BLOCK_ROWS + 500) ** -0.5
    assert 0.99 * bound < whole.abs().max() <= bound
    assert whole.mean().abs() < bound / 100
    assert not torch.equal(whole, initial_rows(SCHEMA, "big", 4, 0, BLOCK_ROWS + 500))
    assert not torch.equal(whole[:100], whole[BLOCK_ROWS : BLOCK_ROWS + 100]), "blocks repeat"


class LargestOnHost(TorchDispatchMode):
    """Bytes of the largest piece of memory that an operation gives, other than the tables' own."""

    def __init__(self, model):
        super().__init__()
        shards = [shard.values for table in tables(model).values() for shard in table.weight.local]
        self.bytes, self._tables = 0, {shard.untyped_storage().data_ptr() for shard in shards}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        storage = out.untyped_storage() if isinstance(out, torch.Tensor) else None
        if storage is not None and storage.data_ptr() not in self._tables:
            self.bytes = max(self.bytes, storage.nbytes())
        return out


def most_memory(rank, world):
    """Bytes of host memory that filling a table of 3 blocks takes at once."""
    from raytrec.worker.build import build_step

    config = RunConfig.model_validate(
        {"data": {"train": "d/train"}, "plan": {"sharding_types": ["table_wise"]}}
    )
    schema = SCHEMA.model_copy(deep=True)
    schema.tables["big"].rows = 3 * BLOCK_ROWS
    step, _ = build_step(config, schema, torch.device("cuda", 0), fill=False)
    with LargestOnHost(step.model) as largest:
        fill_tables(step.model, schema, 3)
    return largest.bytes


def test_filling_a_table_takes_the_memory_of_a_block():
    assert on_ranks(1, most_memory, device="cuda") == [BLOCK_ROWS * 8 * 4]


def test_which_parameters_are_tables():
    assert table_of("model.embeddings.bags.embedding_bags.user.weight") == "user"
    assert table_of("model.top.0.weight") is None
    assert table_of("weight") is None


def local_parts(rank, world, sharding):
    from raytrec.worker.build import build_step

    config = RunConfig.model_validate(
        {
            "run": {"seed": 3},
            "data": {"train": "d/train"},
            "plan": {"sharding_types": [sharding]},
            "optim": {"embeddings": {"name": "adagrad"}},
        }
    )
    step, _ = build_step(config, SCHEMA, torch.device("cpu"))
    out, dense = [], {}
    for name, value in step.model.state_dict().items():
        table = table_of(name)
        if table is None:
            dense[name] = value.clone()
        elif hasattr(value, "local_shards"):
            out += [(table, *s.metadata.shard_offsets, s.tensor.clone()) for s in value.local_shards()]
        else:
            out.append((table, 0, 0, value.clone()))
    return out, dense


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_no_plan_changes_the_initial_values(sharding):
    ranks = on_ranks(2, local_parts, sharding)
    held = {table: 0 for table in SCHEMA.tables}
    for parts, _ in ranks:
        for table, row, column, values in parts:
            rows, columns = values.shape
            expected = initial_rows(SCHEMA, table, 3, row, row + rows)[:, column : column + columns]
            assert torch.equal(values, expected)
            held[table] += values.numel()
    copies = 2 if sharding == "data_parallel" else 1
    assert held == {name: copies * spec.rows * spec.dim for name, spec in SCHEMA.tables.items()}
    assert all(torch.equal(ranks[0][1][name], ranks[1][1][name]) for name in ranks[0][1])
