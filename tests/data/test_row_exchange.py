"""Exchange of rows between ranks (data.balance), on ranks without Ray."""

import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import request_rows
from ranks import run_on_ranks
from waiting import wait_for

ROWS, BATCH, LANES = 301, 48, 6  # 7 steps per epoch


@pytest.mark.parametrize(("ranks", "rows", "max_rows"), [(2, 64, 32), (3, 190, 64), (5, 3, 1)])
def test_assignment_levels_costs_and_respects_the_maximum(ranks, rows, max_rows):
    from raytrec.data.row_exchange import assign_rows

    rng = np.random.default_rng(0)
    costs = np.minimum(rng.lognormal(4.277, 1.429, rows), 1000).astype(np.int64)
    assigned = assign_rows(costs, ranks, max_rows)
    assert np.bincount(assigned, minlength=ranks).max() <= max_rows
    sums = np.bincount(assigned, costs, minlength=ranks)
    largest = np.sort(costs)[-1]
    # Graham's bound for rows without a maximum per rank.
    assert sums.max() <= costs.sum() / ranks + largest
    if rows > 50:
        assert sums.max() < 1.01 * sums.mean() < np.bincount(np.arange(rows) * ranks // rows, costs).max()


def test_assignment_is_optimal_on_small_batches():
    from itertools import product

    from raytrec.data.row_exchange import assign_rows

    costs = np.array([9, 1, 1, 1, 1, 1, 1, 3])
    best = min(
        max(np.bincount(ranks, costs, minlength=2))
        for ranks in product(range(2), repeat=len(costs))
        if sum(ranks) == len(costs) // 2
    )
    assert np.bincount(assign_rows(costs, 2, 4), costs).max() == best


def write_requests(folder):
    """Write requests with long-tailed histories and one invalid row."""
    table = request_rows.make_request_table(ROWS, 0)
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(2, 1.2, ROWS), 200).astype(int)
    history = [rng.integers(0, 30, n).tolist() for n in lengths]
    history[17] = [-5]
    table = table.set_column(table.column_names.index("history"), "history", pa.array(history))
    folder.mkdir()
    pq.write_table(table, folder / "part-0.parquet", row_group_size=40)
    return str(folder)


def make_stream(folder, rank, world, balance="squared_length"):
    from reading import DirectStream

    from raytrec.config.features import Features
    from raytrec.data.fragments import scan
    from raytrec.data.order import Order
    from raytrec.data.pages.decode import ReadErrorPolicy
    from raytrec.data.read_plans import ReadPlan, ReservedColumnSet, TaskRows
    from raytrec.data.row_exchange import RowExchange

    reserved = ReservedColumnSet(keys=("row",), columns=("row",))
    plan = ReadPlan(request_rows.SCHEMA, tasks=(TaskRows("y", "y", sample_weight="w"),), reserved=reserved)
    data, features = scan(folder, plan), Features(request_rows.SCHEMA, {"history": 100})
    exchange = RowExchange(balance, data.form, features) if world > 1 and balance else None
    order = Order(BATCH, LANES, "window", 1, seed=3)
    faults = ReadErrorPolicy(skip=True)
    return DirectStream(
        data, order, rank=rank, world=world, faults=faults, features=features, train=True, exchange=exchange
    )


def list_rows(batch):
    """Return the values of each row that is not padding, read from the tensors."""
    jagged = {key: (value.to_dense(), value) for key, value in batch.sparse.to_dict().items()}
    names, rows = iter(batch.reserved["row"].to_pylist()), []
    for i in (batch.weights == 1).nonzero().flatten().tolist():
        ids = {key: of_rows[i].tolist() for key, (of_rows, _) in jagged.items()}
        tag_weights = jagged["tags"][1].to_dense_weights()[i].tolist()
        mine = batch.requests == i
        candidates = [each[mine].tolist() for each in (batch.labels, batch.dense_of_candidates, batch.task_weights)]
        row = next(names)
        assert batch.keys[i, 0] == row
        rows.append((row, batch.dense[i].tolist(), ids, tag_weights, candidates))
    return rows


def read_epochs(rank, world, folder, first_step=0, balance="squared_length"):
    """Return, for each step of two epochs, (rows, padded rows, sum of squared lengths) on this rank."""
    steps = []
    for batch in make_stream(folder, rank, world, balance).epochs(2, first_step):
        lengths = batch.lengths.view(-1, len(batch.weights)).double()
        places = [batch.sparse.keys().index(name) for name in ("history", "tags", "item", "shop")]
        costs = lengths[places].sum(0) ** 2
        steps.append((list_rows(batch), len(batch.weights), float(costs.sum())))
    return steps


def join_ranks(of_ranks):
    """Return the global batches as sorted texts of rows."""
    return [sorted(repr(row) for rows, _, _ in step for row in rows) for step in zip(*of_ranks, strict=True)]


@pytest.mark.slow
def test_global_batches_keep_their_rows_on_any_number_of_ranks(tmp_path):
    folder = write_requests(tmp_path / "d")
    one = run_on_ranks(1, read_epochs, folder)
    expected, spreads = join_ranks(one), {}
    assert sum(map(len, expected)) == 2 * (ROWS - 1)
    for world, balance in ((2, "squared_length"), (3, "squared_length"), (2, None)):
        of_ranks = run_on_ranks(world, read_epochs, folder, 0, balance)
        assert join_ranks(of_ranks) == expected
        costs = np.array([[cost for _, _, cost in steps] for steps in of_ranks])
        spreads[world, balance] = np.median(costs.max(0) / costs.mean(0))
        assert {len({padded for _, padded, _ in step}) for step in zip(*of_ranks, strict=True)} == {1}
    assert max(spreads[2, "squared_length"], spreads[3, "squared_length"]) < 1.1 < 1.3 < spreads[2, None], spreads


def test_resumed_stream_repeats_each_ranks_rows_exactly(tmp_path):
    folder = write_requests(tmp_path / "d")
    whole = run_on_ranks(2, read_epochs, folder)
    resumed = run_on_ranks(2, read_epochs, folder, 5)
    assert [steps[5:] for steps in whole] == resumed


def close_during_exchange(rank, world, folder):
    """Read a stream on rank 0 only, and close the stream during its first exchange."""
    import torch.distributed as dist

    stream = make_stream(folder, rank, world)
    if rank == 0:
        batches = stream.batches()
        wait_for(lambda: stream.exchange.is_waiting, "the exchange begins")
        batches.close()
    dist.barrier()
    return not stream.exchange.is_waiting and all(thread.name != "stream" for thread in threading.enumerate())


def test_stream_can_be_closed_while_it_waits_for_another_rank(tmp_path):
    assert run_on_ranks(2, close_during_exchange, write_requests(tmp_path / "d")) == [True, True]
