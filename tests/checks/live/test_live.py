"""Faults injected into real training loops: the expected check detects each fault within one interval.

Faults are injected after step 4, and checks run at step 6. For the first of the two batches between them, the
pipeline has already exchanged the ids.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from loops import DATA_PARALLEL, ROW_WISE, SHARDING_PLANS, failed_outcomes, only_failed_text, run_with_fault
from ranks import run_on_ranks
from small import make_small_schema
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.models.retrieval import MfSection

NAN = float("nan")


def flip_bit(name, scene):
    """Flip the lowest bit of the last value of one copy."""
    if scene.rank == 1:
        dense, table = scene.state.dense, scene.state.tables["tag"]
        values = dense[name] if name in dense else table.weight.local[0].values
        values.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "name,dense",
    [
        ("dense/head.model.top.0.weight/value", "sgd"),
        ("dense/dense.head.model.top.0.weight/exp_avg_sq", "adam"),
        ("tables/tag/weight", "sgd"),
    ],
)
def test_flipped_bit_of_a_replica_is_detected(world, name, dense):
    answers = run_on_ranks(world, run_with_fault, DATA_PARALLEL, partial(flip_bit, name), {"dense": dense})
    found = failed_outcomes(answers, "replicas")
    assert found[0]["step"] == 6 and f"{name} on rank 1 differs" in found[0]["text"]


def disable_dense_all_reduce(scene):
    for wrapped in scene.modules("DistributedDataParallel"):
        wrapped.require_backward_grad_sync = False


def test_missing_dense_all_reduce_is_detected():
    answers = run_on_ranks(2, run_with_fault, ROW_WISE, disable_dense_all_reduce, {})
    assert "dense/head.model.bottom.0.weight/value on rank 1" in only_failed_text(answers, "replicas")


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("plan", [ROW_WISE, {"sharding_type": "table_wise"}, DATA_PARALLEL])
def test_optimizer_state_on_some_ranks_passes(plan, optimizer):
    assert not failed_outcomes(run_on_ranks(2, run_with_fault, plan, None, {"optimizer": optimizer, "dense": "adam"}))


def get_shard_metadata(scene, table):
    """Return TorchRec's metadata of the shards of a table."""
    bags = scene.modules("ShardedEmbeddingBagCollection")[0]
    return bags.state_dict()[f"embedding_bags.{table}.weight"].metadata().shards_metadata


def shrink_shard_metadata(scene):
    if scene.rank == 1:
        get_shard_metadata(scene, "user")[0].shard_sizes[0] -= 1


def swap_shard_placements(scene):
    if scene.rank == 1:
        one, other = get_shard_metadata(scene, "user")
        one.placement, other.placement = other.placement, one.placement


def drop_shard_row(scene):
    get_shard_metadata(scene, "user")[1].shard_sizes[0] -= 1


def swap_state_shards(scene):
    shards = scene.state.tables["tag"].state["sum"].shards
    shards[0], shards[1] = replace(shards[0], rows=shards[1].rows), replace(shards[1], rows=shards[0].rows)


def truncate_shard_values(scene):
    shards = scene.state.tables["tag"].weight.shards
    if scene.rank == 1:
        shards[1] = replace(shards[1], values=shards[1].values[:1])


@pytest.mark.parametrize(
    "fault,step,words",
    [
        (shrink_shard_metadata, 0, ["table user's weight", "the map of shards on rank 1 differs"]),
        (swap_shard_placements, 0, ["table user's weight", "the map of shards on rank 1 differs"]),
        (drop_shard_row, 0, ["user's weight: rows 22 to 22 are in no shard (found on ranks 0 and 1)"]),
        (swap_state_shards, 6, ["table tag's sum: the shard at row 3 and column 0 has shape"]),
        (truncate_shard_values, 6, ["table tag's weight: the shard at row 3 and column 0 has shape"]),
    ],
)
def test_shard_map_faults_are_detected(fault, step, words):
    """Faults in TorchRec's metadata before the first step, and in memory later."""
    settings = {"checks": {"parity": "off", "numerics": "off"}, "optimizer": "adagrad"}
    settings |= {} if step else {"after": 0, "steps": 2, "every": 5}
    text = only_failed_text(run_on_ranks(2, run_with_fault, ROW_WISE, fault, settings), "shards", step)
    assert all(each in text for each in words), text


def set_value(value, scene):
    if scene.rank == 1:
        scene.state.tables["tag"].weight.local[0].values[1, 2] = value


def set_nan_in_state(scene):
    if scene.rank == 1:
        scene.state.tables["user"].state["sum"].local[0].values[3] = NAN


@pytest.mark.parametrize(
    "fault,check,optimizer,after,words",
    [
        (partial(set_value, NAN), "finite", "sgd", 12, "table tag: a value is NaN or infinite on rank 1"),
        (partial(set_value, NAN), "finite", "sgd", 10, "a value is NaN or infinite on ranks 0 and 1"),
        (partial(set_value, 1e5), "numerics", "sgd", 10, "table tag: max |value| is 1e+05 (on rank 1)"),
        (set_nan_in_state, "finite", "adagrad", 12, "table user's sum: a value is NaN or infinite on rank 1"),
    ],
)
def test_bad_values_in_a_shard_are_detected(fault, check, optimizer, after, words):
    """A NaN spreads to all values within one step, so only an immediate check can name its origin."""
    settings = {"optimizer": optimizer, "after": after, "steps": 12}
    found = failed_outcomes(run_on_ranks(2, run_with_fault, ROW_WISE, fault, settings), check)
    assert found[0]["step"] == 12 and words in found[0]["text"]


def scale_row_weight(scene):
    scene.local[11].weights[0] *= 1e6


def test_exploding_gradient_is_detected():
    found = failed_outcomes(
        run_on_ranks(2, run_with_fault, ROW_WISE, scale_row_weight, {"after": 9, "steps": 12}), "numerics"
    )
    assert found[0]["step"] == 12 and found[0]["text"].startswith("the norm of the whole gradient is ")


def repeat_batch(scene):
    if scene.rank == 1:
        scene.local[5] = scene.local[4]


def drop_row(scene):
    if scene.rank == 1:
        scene.local[5].weights[0] = 0


def drop_id(scene):
    def without_the_last(kernel, inputs):
        ids = inputs[0]
        lengths = ids.lengths().clone()
        lengths[int(lengths.nonzero()[-1])] -= 1
        weights = ids.weights_or_none()
        weights = None if weights is None else weights[:-1]
        return KeyedJaggedTensor(ids.keys(), ids.values()[:-1], weights, lengths=lengths), *inputs[1:]

    if scene.rank == 1:
        scene.taps.lookups[0].kernel.register_forward_pre_hook(without_the_last)


@pytest.mark.parametrize(
    "plan,fault,words",
    [
        (ROW_WISE, repeat_batch, "rank 1 trained the batch of step 5 at step 6"),
        (ROW_WISE, drop_row, "the batches have 72 rows, but 71 were trained (by rank: 24, 47)"),
        (ROW_WISE, drop_id, "table tag, feature tags: "),
        (SHARDING_PLANS["grid"], drop_id, "table tag, feature tags: "),
        (DATA_PARALLEL, drop_id, "table tag, feature tags: "),
    ],
)
def test_lost_batches_rows_and_ids_are_detected(plan, fault, words):
    # The pipeline fetches a batch two steps before training on it.
    found = failed_outcomes(run_on_ranks(2, run_with_fault, plan, fault, {"after": 3}), "conservation")
    assert found[0]["step"] == 6 and words in found[0]["text"]
    if fault is drop_id:
        assert "user" not in found[0]["text"]


def change_run_facts(scene):
    if scene.rank == 1:
        scene.about["config"] = "a: 2"
        del scene.about["torch"]


def test_different_rank_environments_are_detected():
    answers = run_on_ranks(2, run_with_fault, ROW_WISE, change_run_facts, {"after": 0, "steps": 2})
    (found,) = failed_outcomes(answers)
    assert (found["check"], found["step"]) == ("same_environment", 0)
    text = found["text"]
    assert "config is 'a: 2' on rank 1 and 'a: 1' on rank 0" in text
    assert "torch is missing on rank 1" in text and "schema" not in text


LABELS_SCHEMA = make_small_schema(labels=["y", "z"])
TASKS = [
    {"label": "y", "loss": "bpr", "group": "user", "sample_weight": "w"},
    {"name": "kind", "label": "z", "loss": "cross_entropy", "options": {"classes": 3}, "weight": 0.5},
    {"name": "time", "label": "y", "loss": "mse", "mask": "kind"},
]


@pytest.mark.slow
def test_live_checks_support_several_tasks():
    """The tasks have masks and weights, and one loss compares rows of all ranks."""
    settings = {"schema": LABELS_SCHEMA, "tasks": TASKS, "activation_checkpointing": True, "max_grad_norm": 1.0}
    answers, faulty = (
        run_on_ranks(2, run_with_fault, ROW_WISE, fault, settings) for fault in (None, disable_dense_all_reduce)
    )
    assert {record["check"] for record in answers[0]} >= {"parity", "conservation", "replicas", "shards"}
    assert not failed_outcomes(answers) and failed_outcomes(faulty, "replicas")


def test_model_without_dense_layers_passes():
    """The model has no dense parameters, so that no parameter is replicated."""
    settings = {"model": MfSection(name="mf", user="user", item="tags"), "tasks": [{"loss": "in_batch_softmax"}]}
    answers = run_on_ranks(2, run_with_fault, ROW_WISE, None, settings)
    assert {record["check"] for record in answers[0]} >= {"parity", "replicas", "finite"}
    assert not failed_outcomes(answers)
