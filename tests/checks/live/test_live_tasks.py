"""Live checks of a run with several tasks, masks and weights, and a loss that compares rows of all ranks."""

from loops import PLANS, failed, loop
from ranks import on_ranks
from small import SCHEMA

LABELS = SCHEMA.model_copy(update={"labels": ["y", "z"]})
TASKS = [
    {"label": "y", "loss": "bpr", "group": "user", "sample_weight": "w"},
    {"name": "kind", "label": "z", "loss": "cross_entropy", "options": {"classes": 3}, "weight": 0.5},
    {"name": "time", "label": "y", "loss": "mse", "mask": "kind"},
]


def watched(rank, world, fault):
    settings = {"activation_checkpointing": True, "max_grad_norm": 1.0}
    return loop(rank, world, PLANS["row-wise"], fault, schema=LABELS, tasks=TASKS, **settings)


def without_all_reduce(scene):
    for wrapped in scene.modules("DistributedDataParallel"):
        wrapped.require_backward_grad_sync = False


def test_several_tasks_pass():
    answers = on_ranks(2, watched, None)
    assert {record["check"] for record in answers[0]} >= {"parity", "conservation", "replicas", "shards"}
    assert not [record for records in answers for record in records if not record["passed"]]


def test_a_fault_is_found_with_several_tasks():
    assert failed(on_ranks(2, watched, without_all_reduce), "replicas")


def of_tables_alone(rank, world):
    """A model without a dense parameter, which no rank has a copy of anything of."""
    from raytrec.config.models.retrieval import MfSection

    section = MfSection(name="mf", user="user", item="tags")
    tasks = [{"label": "y", "loss": "in_batch_softmax"}]
    return loop(rank, world, PLANS["row-wise"], schema=LABELS, model=section, tasks=tasks)


def test_a_model_without_dense_layers_passes():
    for records in on_ranks(2, of_tables_alone):
        assert {record["check"] for record in records} >= {"parity", "replicas", "finite"}
        assert not [record for record in records if not record["passed"]]
