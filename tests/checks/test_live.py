"""Faults brought into real training loops: the named check finds each within one interval, and says where.

Every fault comes after step 4, and checks follow step 6: of the two batches between, the pipeline has already
exchanged the ids of the first.
"""

from dataclasses import replace

import pytest
from loops import failed, loop
from ranks import on_ranks
from small import SCHEMA

ROW_WISE, COPIES = {"sharding": "row_wise"}, {"sharding": "data_parallel"}


def the_one(answers, check, step=6):
    """The text of the check that found it, which is the only one to fail at that step."""
    found = [o for o in failed(answers) if o["step"] == step]
    assert found and {o["check"] for o in found} == {check}, found
    assert failed(answers)[0]["step"] == step, "found before it was there"
    return found[0]["text"]


def flip(tensor, bit=0):
    """Changes one bit of the last value."""
    import torch

    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.view(-1)[-1:].view(kind).bitwise_xor_(1 << bit)


def flip_dense(scene):
    if scene.rank == 1:
        flip(scene.state.dense["dense/head.model.top.0.weight/value"])


def flip_adam(scene):
    if scene.rank == 1:
        flip(scene.state.dense["dense/dense.head.model.top.0.weight/exp_avg_sq"])


def flip_copy(scene):
    if scene.rank == 1:
        flip(scene.state.tables["tag"].weight.local[0].values)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "fault,name,dense",
    [
        (flip_dense, "dense/head.model.top.0.weight/value", "sgd"),
        (flip_adam, "dense/dense.head.model.top.0.weight/exp_avg_sq", "adam"),
        (flip_copy, "tables/tag/weight", "sgd"),
    ],
)
def test_a_bit_of_a_replica(world, fault, name, dense):
    answers = on_ranks(world, run, COPIES, fault, {"dense": dense})
    found = failed(answers, "replicas")
    assert found[0]["step"] == 6 and f"{name} on rank 1 is not" in found[0]["text"]


def run(rank, world, plan, fault, settings):
    return loop(rank, world, plan, fault, **settings)


def a_gradient_altered(scene):
    table, step = scene.state.tables["tag"], scene.step.optimizer.step

    def altered():
        table.parameter.grad.mul_(1.001)
        step()

    if scene.rank == 1:
        scene.step.optimizer.step = altered


def test_a_gradient_of_one_replica():
    found = failed(on_ranks(2, run, COPIES, a_gradient_altered, {}))
    texts = {o["check"]: o["text"] for o in found if o["step"] == 6}
    assert texts["parity"].startswith("table tag: the gradient that reaches rank 1 is not")
    assert texts["replicas"] == "tables/tag/weight on rank 1 is not what it is on rank 0"


def without_all_reduce(scene):
    for wrapped in scene.modules("DistributedDataParallel"):
        wrapped.require_backward_grad_sync = False


def without_all_reduce_of_tables(scene):
    for lookup in scene.modules("ShardedEmbeddingBagCollection")[0]._lookups:
        lookup.require_backward_grad_sync = False


def test_gradients_of_tables_that_are_not_averaged():
    found = failed(on_ranks(2, run, COPIES, without_all_reduce_of_tables, {}))
    assert {o["step"] for o in found} == {6}
    texts = {o["check"]: o["text"] for o in found if o["check"] != "numbers"}
    assert set(texts) == {"replicas", "parity"}
    assert "tables/tag/weight on rank 1" in texts["replicas"] and "dense" not in texts["replicas"]
    assert "table user: the gradient that reaches rank" in texts["parity"]


def test_gradients_of_dense_layers_that_are_not_averaged():
    answers = on_ranks(2, run, ROW_WISE, without_all_reduce, {})
    assert "dense/head.model.bottom.0.weight/value on rank 1" in the_one(answers, "replicas")


def sharded_metadata(scene, table):
    """TorchRec's own description of where the shards of a table are."""
    bags = scene.modules("ShardedEmbeddingBagCollection")[0]
    return bags.state_dict()[f"embedding_bags.{table}.weight"].metadata().shards_metadata


def metadata_of_another_size(scene):
    if scene.rank == 1:
        sharded_metadata(scene, "user")[0].shard_sizes[0] -= 1


def shards_exchanged(scene):
    if scene.rank == 1:
        one, other = sharded_metadata(scene, "user")
        one.placement, other.placement = other.placement, one.placement


def nobodys_row(scene):
    sharded_metadata(scene, "user")[1].shard_sizes[0] -= 1


@pytest.mark.parametrize(
    "fault,words",
    [
        (metadata_of_another_size, "rank 1 has another map"),
        (shards_exchanged, "rank 1 has another map"),
        (nobodys_row, "rows 22 to 22 are in 0 shards (says ranks 0 and 1)"),
    ],
)
def test_shards_in_the_description(fault, words):
    found = failed(on_ranks(2, run, ROW_WISE, fault, {"after": 0, "steps": 2, "every": 5}), "shards")
    assert found[0]["step"] == 0 and "table user's weight" in found[0]["text"] and words in found[0]["text"]


def state_elsewhere(scene):
    shards = scene.state.tables["tag"].state["sum"].shards
    shards[0], shards[1] = replace(shards[0], rows=shards[1].rows), replace(shards[1], rows=shards[0].rows)


def weights_taken_away(scene):
    shards = scene.state.tables["tag"].weight.shards
    if scene.rank == 1:
        shards[1] = replace(shards[1], values=shards[1].values[:1])


@pytest.mark.parametrize(
    "fault,words",
    [
        (state_elsewhere, "table tag's sum: the rows from 3 and columns from 0 are a tensor"),
        (weights_taken_away, "table tag's weight: the rows from 3 and columns from 0 are a tensor"),
    ],
)
def test_shards_in_memory(fault, words):
    settings = {"checks": {"parity": "off", "numbers": "off"}, "optimizer": "adagrad"}
    assert words in the_one(on_ranks(2, run, ROW_WISE, fault, settings), "shards")


def no_fault_but_weighted_sums(rank, world, plan):
    schema = SCHEMA.model_copy(deep=True)
    schema.sparse["tags"].pooling = schema.sparse["friends"].pooling = "sum"
    return loop(rank, world, plan, schema=schema)


def no_ids_at_all(rank, world, plan):
    """A batch that is probed, and holds rows but no ids."""

    def emptied(scene):
        import torch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        old = scene.local[5].sparse
        scene.local[5].sparse = KeyedJaggedTensor(
            old.keys(), old.values()[:0], old.weights()[:0], lengths=torch.zeros_like(old.lengths())
        )

    return loop(rank, world, plan, emptied, 1)


@pytest.mark.parametrize("batch", [no_fault_but_weighted_sums, no_ids_at_all])
@pytest.mark.parametrize("plan", [ROW_WISE, {"sharding": "column_wise"}, COPIES])
def test_other_batches_pass(plan, batch):
    assert not failed(on_ranks(2, batch, plan))


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("plan", [ROW_WISE, {"sharding": "table_wise"}, COPIES])
def test_optimizer_state_that_only_some_ranks_have(plan, optimizer):
    assert not failed(on_ranks(2, run, plan, None, {"optimizer": optimizer, "dense": "adam"}))


def rows_on_other_ranks(scene):
    """TorchRec finds the rank of a row by dividing by rows per rank: 12 and 3 of the tables' 23 and 5."""
    if scene.rank == 1:
        for exchange in scene.modules("ShardedEmbeddingBagCollection")[0]._input_dists:
            exchange._feature_block_sizes_tensor -= 1


def test_ids_that_reach_other_rows():
    text = the_one(on_ranks(2, run, ROW_WISE, rows_on_other_ranks, {}), "parity")
    assert "table user, feature user: on rank 1 pooled embeddings are not" in text


def divided_again(scene):
    from raytrec.embeddings.pooling import bag_totals

    def again(means, inputs, pooled):
        totals = dict(zip(inputs[1].keys(), bag_totals(inputs[1]), strict=True))
        return {
            f: v / totals[f].unsqueeze(1) if mean else v
            for (f, v), mean in zip(pooled.items(), means.is_mean, strict=True)
        }

    scene.modules("BagMeans")[0].register_forward_hook(again)


def slightly_off(scene):
    def scaled(means, inputs, pooled):
        return {feature: values * (1 + 3e-5) for feature, values in pooled.items()}

    scene.modules("BagMeans")[0].register_forward_hook(scaled)


def undivided(scene):
    from torchrec.distributed import comm_ops

    comm_ops.set_gradient_division(False)
    return lambda: comm_ops.set_gradient_division(True)


PLANS = {
    "row-wise": ROW_WISE,
    "table-wise": {"sharding": "table_wise"},
    "column-wise": {"sharding": "column_wise"},
    "table-row-wise": {"sharding": "table_row_wise"},
    "table-column-wise": {"sharding": "table_column_wise"},
    "grid": {"sharding": "grid_shard"},
    "data-parallel": COPIES,
    "dense": {"sharding": "row_wise", "kernel": "dense"},
    "fp16": {"sharding": "table_wise", "dtype": "fp16"},
}
STEPS = {
    "plain": {},
    "all": {"clip_norm": 0.01, "micro_batches": 2, "on_nan": "skip", "loss": "sum", "balance": "empty"},
}


@pytest.mark.parametrize("settings", list(STEPS))
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_nothing_is_found_where_nothing_is(world, plan, settings):
    answers = on_ranks(world, run, PLANS[plan], None, STEPS[settings])
    assert not failed(answers)
    steps = [(o["check"], o["step"]) for o in answers[0]]
    each = ["shards", "replicas", "conservation", "numbers"]
    assert steps == [
        *((check, 0) for check in ("alike", "shards", "replicas", "numbers")),
        *((c, s) for s in (3, 6) for c in ("shards", "replicas", "parity", "conservation", "numbers")),
        *((check, 6) for check in each),
    ]
    assert all(o["figure"] < 1e-6 for o in answers[0] if o["check"] == "parity"), (
        "the limit is ten times that"
    )


@pytest.mark.parametrize("settings", list(STEPS))
@pytest.mark.parametrize("plan", list(PLANS))
def test_means_divided_twice(plan, settings):
    text = the_one(on_ranks(2, run, PLANS[plan], divided_again, STEPS[settings]), "parity")
    assert text.startswith("table user, feature friends: on rank")
    assert "table tag, feature tags: on rank" in text and "feature user" not in text
    assert ": the gradient that reaches rank" in text or "and 1 more" in text


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_factor_that_is_slightly_off(plan):
    answers = on_ranks(2, run, PLANS[plan], slightly_off, {})
    assert "feature user" in the_one(answers, "parity")
    assert 2.9e-5 < failed(answers)[0]["figure"] < 3.2e-5


@pytest.mark.parametrize("settings", list(STEPS))
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "data-parallel"])
def test_gradients_that_are_not_divided(plan, settings):
    answers = on_ranks(2, run, PLANS[plan], undivided, STEPS[settings])
    text = the_one(answers, "parity")
    assert "table user: the gradient that reaches rank" in text and "feature" not in text
    figure = next(o["figure"] for o in failed(answers))
    assert 0.1 < figure < 1.1, "the gradient is twice what it should be"


@pytest.mark.parametrize("hosts", [2])
@pytest.mark.parametrize("plan", ["table-row-wise", "grid"])
def test_two_hosts(plan, hosts):
    assert not failed(on_ranks(4, run, PLANS[plan], None, {}, hosts=hosts))
    answers = on_ranks(4, run, PLANS[plan], undivided, {}, hosts=hosts)
    assert "table user: the gradient" in the_one(answers, "parity")


def nan(scene):
    if scene.rank == 1:
        scene.state.tables["tag"].weight.local[0].values[1, 2] = float("nan")


def huge(scene):
    if scene.rank == 1:
        scene.state.tables["tag"].weight.local[0].values[1, 2] = 1e5


def nan_in_state(scene):
    if scene.rank == 1:
        scene.state.tables["user"].state["sum"].local[0].values[3] = float("nan")


@pytest.mark.parametrize(
    "fault,optimizer,after,words",
    [
        (nan, "sgd", 12, "table tag: a value is NaN or infinite on rank 1"),
        (nan, "sgd", 10, "a value is NaN or infinite on ranks 0 and 1"),
        (huge, "sgd", 10, "table tag: max |value| is 1e+05 (on rank 1)"),
        (nan_in_state, "adagrad", 12, "table user's sum: a value is NaN or infinite on rank 1"),
    ],
)
def test_numbers_in_a_shard(fault, optimizer, after, words):
    """A NaN is everywhere one step later; only the check that follows at once can say where it came from."""
    settings = {"optimizer": optimizer, "after": after, "steps": 12}
    answers = on_ranks(2, run, ROW_WISE, fault, settings)
    found = failed(answers, "numbers")
    assert found[0]["step"] == 12 and words in found[0]["text"]


def learning_rate(scene):
    scene.step._rates = [(group, rate * 1e8) for group, rate in scene.step._rates]


def test_a_learning_rate_that_explodes():
    found = failed(on_ranks(2, run, ROW_WISE, learning_rate, {"after": 10, "steps": 12}), "numbers")
    assert found[0]["step"] == 12
    assert "max |value| is" in found[0]["text"] and "× what is usual" in found[0]["text"]


def batches_behind(scene):
    if scene.rank == 1:
        scene.local[5] = scene.local[4]


def rows_lost(scene):
    if scene.rank == 1:
        scene.local[5].weights[0] = 0


def an_id_lost(scene):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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
        (ROW_WISE, batches_behind, "rank 1 trained the batch of step 4 at step 5"),
        (ROW_WISE, rows_lost, "the batches had 72 rows, the ranks trained 71 (from rank 0: 24, 47)"),
        (ROW_WISE, an_id_lost, "table tag, feature tags: "),
        (PLANS["grid"], an_id_lost, "table tag, feature tags: "),
        (COPIES, an_id_lost, "table tag, feature tags: "),
    ],
)
def test_what_is_lost(plan, fault, words):
    # The pipeline takes a batch two steps before it is trained.
    found = failed(on_ranks(2, run, plan, fault, {"after": 3}), "conservation")
    assert found[0]["step"] == 6 and words in found[0]["text"]
    if fault is an_id_lost:
        assert "user" not in found[0]["text"]


def other_words(scene):
    if scene.rank == 1:
        scene.about["config"] = "a: 2"
        del scene.about["torch"]


def test_ranks_that_are_not_alike():
    found = failed(on_ranks(2, loop_about, None))
    text = found[0]["text"]
    assert [o["check"] for o in found] == ["alike"] and found[0]["step"] == 0
    assert "config is 'a: 2' on rank 1 and 'a: 1' on the others" in text
    assert "torch is 'None' on rank 1" in text and "schema" not in text


def loop_about(rank, world, _):
    return loop(rank, world, ROW_WISE, other_words, after=0, steps=2)
