"""A checkpoint does not know how its tables are looked up: in sums of bags, or id by id.

So what was saved before tables of sequences were looked up id by id is restored into them, under every plan.
"""

import itertools
import shutil

import checkpoints
import pytest
import torch
from ranks import on_ranks
from small import SCHEMA, batches, config, train

SEQUENCES = SCHEMA.model_copy(deep=True)
SEQUENCES.sparse["friends"].pooling = "sequence"  # of user's table; at most 4 ids a row
# (ranks, plan of all tables, whether ids are looked up one by one)
LINKS = {
    "bags row-wise": (2, {"sharding_type": "row_wise"}, False),
    "ids column-wise": (2, {"sharding_type": "column_wise"}, True),
    "ids data-parallel": (1, {"sharding_type": "data_parallel"}, True),
    "bags grid": (2, {"sharding_type": "grid_shard"}, False),
    "ids row-wise": (4, {"sharding_type": "row_wise"}, True),
    "ids table-wise": (2, {"sharding_type": "table_wise", "compute_kernel": "dense"}, True),
}
FEW = ["bags row-wise", "ids column-wise"]


def step_of(link, optimizer):
    """(Step, this link's batches)."""
    from raytrec.config.features import resolve_features
    from raytrec.config.models import PythonSection
    from raytrec.worker.build import build_step

    world, plan, by_id = LINKS[link]
    settings = config(world, plan, optimizer)
    settings.model = PythonSection(name="mean_model:MeanModel", max_length=4 if by_id else None)
    features = resolve_features(SEQUENCES, settings.model)
    return build_step(settings, SEQUENCES, torch.device("cpu"))[0], features


def handed_on(rank, world, link, optimizer, source, root):
    """Restores (where there is a source) and saves that; then trains, and saves again."""
    from raytrec.checkpoint.restore import restore
    from raytrec.checkpoint.save import Saver
    from raytrec.checkpoint.state import LogicalState
    from raytrec.config.training import CheckpointSection

    step, features = step_of(link, optimizer)
    state, saver = LogicalState(step.model, step.optimizer), Saver(root, CheckpointSection())
    local = batches(5, rank, world, schema=SEQUENCES, features=features)[1]
    if source:
        found = restore(source, state)
        assert found.folder and not found.passed_over
    else:
        train(step, local[:3])
    for at, more in ((3, local[3:]), (5, [])):
        saver.save(at, state.tensors(), {})
        assert saver.taken().error is None
        train(step, more) if more else None


@pytest.mark.parametrize(
    ("optimizer", "links"),
    [
        ("adagrad", FEW),
        pytest.param("adam", list(LINKS), marks=pytest.mark.survive),
        pytest.param("sgd", list(LINKS), marks=pytest.mark.survive),
    ],
)
def test_tables_go_from_bags_to_ids_and_back(optimizer, links, tmp_path):
    ends, source = {}, None
    for number, link in enumerate([*links, links[0]]):
        target = str(tmp_path / str(number))
        on_ranks(LINKS[link][0], handed_on, link, optimizer, source, target)
        first, last = f"{tmp_path}/0/step-0000000003", f"{target}/step-0000000005"
        assert source is None or checkpoints.equal(first, f"{target}/step-0000000003") == []
        ends[link], source = checkpoints.whole(last), target
        shutil.rmtree(last)
    for (one, a), (other, b) in itertools.pairwise(ends.items()):
        for key, value in a.items():
            torch.testing.assert_close(b[key], value, rtol=2e-4, atol=2e-5, msg=f"{one} → {other}: {key}")
