"""The work of a step by hand, on a model of three small layers; limits that are measured beside it."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
from loop import make
from ranks import on_ranks

ROWS = 12  # of the global batch
# DLRM of small.config over small.SCHEMA: dense 2 → 6 → 8, four vectors of 8 (the bottom's and three
# features'), their 6 products beside the bottom's 8 numbers → 6 → 1.
LAYERS = {"bottom": ((2, 6), (6, 8)), "top": ((8 + 6, 6), (6, 1))}


def measured(rank, world, steps, folder, plan="row_wise", balance="unequal"):
    """(what the result has of a run's observers, this rank's last line and batch) of a loop of some steps."""
    made = make(rank, world, steps, [f"tracking.every_steps={steps}"], folder, plan=plan)
    made.train(steps)
    assert made.error is None
    line = next(m for m in reversed(made.said) if m["kind"] == "rank")
    batch = made.local[-1]
    return made.observers.result()["limits"], line, (len(batch.labels), batch.sparse.length_per_key())


def flop(rows):
    """Forward: 2 · rows · in · out of each layer. Backward: as much for weights, and inputs that want it."""
    layers = [*LAYERS["bottom"], *LAYERS["top"]]
    forward = sum(2 * rows * i * o for i, o in layers)
    of_inputs = forward - 2 * rows * LAYERS["bottom"][0][0] * LAYERS["bottom"][0][1]
    products = 2 * rows * 4 * 8 * 4  # bmm of the four vectors with themselves; in backward with both
    return forward + forward + of_inputs + 3 * products


def test_flop_of_a_step_by_hand(tmp_path):
    ((limits, line, (rows, _)),) = on_ranks(1, measured, 3, str(tmp_path))
    assert rows == ROWS and limits["dense_flop"] == flop(ROWS)
    assert 1e6 < limits["matrix_flop_per_s"] < 1e14
    assert limits["exchange_s"] == limits["exchange_bytes"] == limits["optimizer_table_share"] == 0
    assert line["first_s"].keys() == line["phases_s"].keys()
    assert 0 < line["first_s"]["forward"] < line["phases_s"]["forward"]


def test_bytes_of_a_step_by_hand():
    from raytrec.worker.limits import bytes_of_step

    fused = {"lookup_bytes": 640, "weight_bytes": 3200, "state_bytes": 200, "unique_ratio": 0.5}
    copied = {"lookup_bytes": 64, "weight_bytes": 320, "state_bytes": 320, "unique_ratio": 1.0}
    tables = {"fused": fused | {"replicated": False}, "copied": copied | {"replicated": True}}
    # Read 640; half of the rows again, read and written with their state, which is 1/16 of a row.
    once = 640 + 2 * 320 * (1 + 1 / 16)
    # Each of two steps: read gradient, weights, state; write weights, state and a gradient of zeros.
    whole = 64 + 2 * (4 * 320 + 2 * 320)
    assert bytes_of_step(tables, 2) == (once + whole) / 2


def test_bytes_of_collectives_by_hand(tmp_path):
    ranks = on_ranks(2, measured, 3, str(tmp_path))
    ids = max(8 * sum(lengths) for _, _, (_, lengths) in ranks)
    pooled = max(rows * 3 * 8 * 4 * 2 for _, _, (rows, _) in ranks)  # sums of both ranks' halves of tables
    layers = [*LAYERS["bottom"], *LAYERS["top"]]
    dense = 4 * sum(i * o + o for i, o in layers)
    for limits, _, _ in ranks:
        assert limits["exchange_bytes"] == ids + 2 * pooled + dense
        assert 0 < limits["exchange_s"] < 1
    assert ranks[0][0] == ranks[1][0]  # means, the same everywhere


def test_what_one_rank_cannot_measure_is_left_out_everywhere(tmp_path):
    (one, _, _), (other, _, _) = on_ranks(2, unwilling, str(tmp_path))
    assert one == other and "dense_flop" not in one and one["exchange_s"] > 0


def unwilling(rank, world, folder):
    """Rank 1's model refuses to be called for anything but training."""
    from raytrec.worker import limits

    with patch.object(limits, "count_flop", lambda *_: 1 / 0) if rank == 1 else nullcontext():
        return measured(rank, world, 2, folder)


@pytest.mark.parametrize("plan", ["row_wise", "data_parallel"])
def test_measuring_changes_nothing(tmp_path, plan):
    for before, after in on_ranks(2, state_around, str(tmp_path), plan):
        assert before == after


def state_around(rank, world, folder, plan):
    """All weights, state and gradients before and after a measurement."""
    made = make(rank, world, 3, ["tracking.every_steps=3"], folder, plan=plan).train(3)

    def values():
        from raytrec.embeddings.tables import tables

        found = tables(made.step.model, made.step.optimizer).values()
        parts = [part for table in found for part in (table.weight, *table.state.values())]
        dense = [p for p in made.step.model.module.head.parameters()]
        grads = [p.grad.tolist() for p in dense]
        return [[s.values.tolist() for s in p.local] for p in parts], [p.tolist() for p in dense], grads

    before = values()
    assert made.observers.result()["limits"]["dense_flop"] > 0
    return before, values()


def test_on_a_gpu_that_stands_in(tmp_path):
    """CUDA events and streams; what takes no time there has no rates worth a look."""
    for limits, _, _ in on_ranks(2, measured, 3, str(tmp_path), device="cuda"):
        assert limits["dense_flop"] > 0 and limits["exchange_s"] > 0 and limits["gather_bytes_per_s"] > 0
