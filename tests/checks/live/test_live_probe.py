"""Faults in lookups, pooling and gradients of real training loops: the parity check detects each fault and
raises no false alarm. The module docstring of test_live.py describes when faults and checks happen."""

from itertools import product

import pytest
from loops import (
    DATA_PARALLEL,
    ROW_WISE,
    SHARDING_PLANS,
    failed_outcomes,
    only_failed_text,
    run_with_fault,
    train_with_checks,
)
from ranks import run_on_ranks
from small import SCHEMA, make_small_schema

STEPS = {
    "plain": {},
    "all": {"max_grad_norm": 0.01, "activation_checkpointing": True, "on_nan": "skip", "balance": "empty"},
}


ALL_STEPS = ["all", pytest.param("plain", marks=pytest.mark.survive)]


def loop_with_weighted_sums(rank, world, plan):
    schema = SCHEMA.model_copy(deep=True)
    schema.sparse["tags"].pooling = schema.sparse["friends"].pooling = "sum"
    return train_with_checks(rank, world, plan, schema=schema)


def loop_with_empty_bags(rank, world, plan):
    """Run a loop whose probed batch has rows but no ids."""

    def emptied(scene):
        import torch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        old = scene.local[5].sparse
        scene.local[5].sparse = KeyedJaggedTensor(
            old.keys(), old.values()[:0], old.weights()[:0], lengths=torch.zeros_like(old.lengths())
        )

    return train_with_checks(rank, world, plan, emptied, 1)


def loop_with_sequences(rank, world, plan, settings, schema=SCHEMA):
    """Run a model that looks up two sequences id by id, one of them with weights."""
    from raytrec.config.models.sequences import SequenceSection

    schema = schema.model_copy(deep=True)
    schema.sparse["tags"].pooling = schema.sparse["friends"].pooling = "sequence"
    model = SequenceSection(name="sequence", max_length=3, target="user", top_mlp=[6])
    return train_with_checks(rank, world, plan, schema=schema, model=model, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ALL_STEPS)
@pytest.mark.parametrize("plan", ["row-wise", "column-wise", "table-wise", "data-parallel"])
def test_parity_passes_for_sequences(plan, settings):
    assert not failed_outcomes(run_on_ranks(2, loop_with_sequences, SHARDING_PLANS[plan], STEPS[settings]))


@pytest.mark.parametrize("batch", [loop_with_weighted_sums, loop_with_empty_bags])
@pytest.mark.parametrize("plan", [ROW_WISE, {"sharding_type": "column_wise"}, DATA_PARALLEL])
def test_parity_passes_for_special_batches(plan, batch):
    assert not failed_outcomes(run_on_ranks(2, batch, plan))


def make_batch_infinite(scene):
    if scene.rank == 0:
        scene.local[5].dense[0, 0] = float("inf")


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("plan", [ROW_WISE, DATA_PARALLEL])
def test_skipped_probe_step_passes(plan, clip):
    settings = {"after": 3, "on_nan": "skip", "max_grad_norm": clip}
    assert not failed_outcomes(run_on_ranks(2, run_with_fault, plan, make_batch_infinite, settings))


def send_ids_to_other_ranks(scene):
    """Change the rows per rank (12 of 23 and 3 of 5) that TorchRec uses to find the rank of a row."""
    if scene.rank == 1:
        for exchange in scene.modules("ShardedEmbeddingBagCollection")[0]._input_dists:
            exchange._feature_block_sizes_tensor -= 1


def test_misrouted_ids_are_detected():
    text = only_failed_text(run_on_ranks(2, run_with_fault, ROW_WISE, send_ids_to_other_ranks, {}), "parity")
    assert "table user, feature user: pooled embeddings on rank 1 differ" in text


def divide_means_twice(scene):
    from raytrec.embeddings.pooling import sum_bag_weights

    def again(means, inputs, pooled):
        totals = dict(zip(inputs[1].keys(), sum_bag_weights(inputs[1]), strict=True))
        return {
            f: v / totals[f].unsqueeze(1) if mean else v
            for (f, v), mean in zip(pooled.items(), means.is_mean, strict=True)
        }

    scene.modules("BagMeans")[0].register_forward_hook(again)


def scale_means_slightly(scene):
    def scaled(means, inputs, pooled):
        return {feature: values * (1 + 3e-5) for feature, values in pooled.items()}

    scene.modules("BagMeans")[0].register_forward_hook(scaled)


def disable_gradient_division(scene):
    from torchrec.distributed import comm_ops

    comm_ops.set_gradient_division(False)
    return lambda: comm_ops.set_gradient_division(True)


def make_combinations():
    """Yield all cases; `make test` runs each plan with all settings on 2 ranks and plain on 3."""
    for world, plan, settings in product([1, 2, 3], SHARDING_PLANS, STEPS):
        few = (world, settings) in [(2, "all"), (3, "plain")] or (world == 1 and plan == "row-wise")
        yield pytest.param(world, plan, settings, marks=[] if few else pytest.mark.survive)


@pytest.mark.slow
@pytest.mark.parametrize("world,plan,settings", make_combinations())
def test_all_checks_pass_without_a_fault(world, plan, settings):
    answers = run_on_ranks(world, run_with_fault, SHARDING_PLANS[plan], None, STEPS[settings])
    assert not failed_outcomes(answers)
    steps = [(o["check"], o["step"]) for o in answers[0]]
    each = ["shards", "replicas", "conservation", "finite", "numerics"]
    assert steps == [
        *((check, 0) for check in ("same_environment", "shards", "replicas", "finite", "numerics")),
        *((c, s) for s in (3, 6) for c in ("shards", "replicas", "parity", *each[2:])),
        *((check, 6) for check in each),
    ]
    assert all(o["figure"] < 1e-6 for o in answers[0] if o["check"] == "parity"), "the limit is ten times as large"


@pytest.mark.slow
@pytest.mark.parametrize("settings", ALL_STEPS)
@pytest.mark.parametrize("plan", list(SHARDING_PLANS))
def test_twice_divided_means_are_detected(plan, settings):
    text = only_failed_text(
        run_on_ranks(2, run_with_fault, SHARDING_PLANS[plan], divide_means_twice, STEPS[settings]), "parity"
    )
    assert text.startswith("table user, feature friends: pooled embeddings on rank")
    assert "table tag, feature tags: pooled embeddings on rank" in text and "feature user" not in text
    assert ": the gradient that reaches rank" in text or "and 1 more" in text


@pytest.mark.parametrize("plan", list(SHARDING_PLANS))
def test_slightly_wrong_factor_is_detected(plan):
    answers = run_on_ranks(2, run_with_fault, SHARDING_PLANS[plan], scale_means_slightly, {})
    assert "feature user" in only_failed_text(answers, "parity")
    assert 2.9e-5 < failed_outcomes(answers)[0]["figure"] < 3.2e-5


@pytest.mark.parametrize("settings", ALL_STEPS)
@pytest.mark.parametrize("plan", [plan for plan in SHARDING_PLANS if plan != "data-parallel"])
def test_undivided_gradients_are_detected(plan, settings):
    answers = run_on_ranks(2, run_with_fault, SHARDING_PLANS[plan], disable_gradient_division, STEPS[settings])
    text = only_failed_text(answers, "parity")
    assert "table user: the gradient that reaches rank" in text and "feature" not in text
    figure = next(o["figure"] for o in failed_outcomes(answers))
    assert 0.1 < figure < 1.1, "the gradient is twice as large as expected"


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2])
@pytest.mark.parametrize("plan", ["table-row-wise", "grid"])
def test_parity_check_works_on_two_hosts(plan, hosts):
    assert not failed_outcomes(run_on_ranks(4, run_with_fault, SHARDING_PLANS[plan], None, {}, hosts=hosts))
    answers = run_on_ranks(4, run_with_fault, SHARDING_PLANS[plan], disable_gradient_division, {}, hosts=hosts)
    assert "table user: the gradient" in only_failed_text(answers, "parity")


def scale_gradient_on_rank_1(scene):
    table, step = scene.state.tables["tag"], scene.step.optimizer.step

    def altered():
        table.parameter.grad.mul_(1.001)
        step()

    if scene.rank == 1:
        scene.step.optimizer.step = altered


def test_altered_gradient_of_one_replica_is_detected():
    found = failed_outcomes(run_on_ranks(2, run_with_fault, DATA_PARALLEL, scale_gradient_on_rank_1, {}))
    texts = {o["check"]: o["text"] for o in found if o["step"] == 6}
    assert texts["parity"].startswith("table tag: the gradient that reaches rank 1 differs")
    assert texts["replicas"] == "tables/tag/weight on rank 1 differs from rank 0"


def disable_table_all_reduce(scene):
    for lookup in scene.modules("ShardedEmbeddingBagCollection")[0]._lookups:
        lookup.require_backward_grad_sync = False


def test_missing_table_all_reduce_is_detected():
    found = failed_outcomes(run_on_ranks(2, run_with_fault, DATA_PARALLEL, disable_table_all_reduce, {}))
    assert {o["step"] for o in found} == {6}
    texts = {o["check"]: o["text"] for o in found if o["check"] != "numerics"}
    assert set(texts) == {"replicas", "parity"}
    assert "tables/tag/weight on rank 1" in texts["replicas"] and "dense" not in texts["replicas"]
    assert "table user: the gradient that reaches rank" in texts["parity"]


# Quantized collectives: correct runs stay within the stated bound, faulty runs do not.
EXCHANGING_PLANS = [name for name in SHARDING_PLANS if name not in ("data-parallel", "dense", "fp16")]
WHOLE_TABLE_PLANS = ["table-wise", "column-wise", "table-column-wise"]
FAST_QCOMMS_CASES = [
    ("row-wise", "fp16", "bf16", 2),
    ("table-wise", "int8", "int8", 2),
    ("column-wise", "fp32", "fp16", 2),
]
SLOW_QCOMMS_CASES = [
    pytest.param(*case, marks=pytest.mark.parity)
    for case in (
        *product(EXCHANGING_PLANS, ("fp32", "fp16", "bf16"), ("fp32", "fp16", "bf16"), (1, 2, 3)),
        *product(WHOLE_TABLE_PLANS, ("fp16", "int8"), ("fp32", "int8"), (2, 3)),
    )
    if case not in FAST_QCOMMS_CASES
]


WIDE_SCHEMA = make_small_schema(tables={name: {"rows": rows, "dim": 32} for name, rows in (("user", 23), ("tag", 5))})


def loop_quantized(rank, world, plan, forward, backward, fault=None, **settings):
    qcomms = {"forward_precision": forward, "backward_precision": backward}
    return train_with_checks(rank, world, plan, fault, schema=WIDE_SCHEMA, qcomms=qcomms, **settings)


def assert_passed(answers, forward, backward, world):
    """Assert that all checks passed and that the parity check saw rounding errors within its limit."""
    assert not failed_outcomes(answers)
    found = [outcome for outcome in answers[0] if outcome["check"] == "parity"]
    assert found and all(outcome["figure"] <= outcome["limit"] for outcome in found)
    if world > 1 and {forward, backward} != {"fp32"}:
        assert all(outcome["figure"] > 1e-5 for outcome in found), "nothing was rounded"


@pytest.mark.parametrize(("plan", "forward", "backward", "world"), [*FAST_QCOMMS_CASES, *SLOW_QCOMMS_CASES])
def test_qcomms_rounding_stays_within_the_bound(plan, forward, backward, world):
    assert_passed(
        run_on_ranks(world, loop_quantized, SHARDING_PLANS[plan], forward, backward), forward, backward, world
    )


@pytest.mark.parity
@pytest.mark.parametrize("plan", ["table-row-wise", "grid", "row-wise", "table-column-wise"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_qcomms_rounding_is_bounded_on_two_hosts(plan, precision):
    assert_passed(
        run_on_ranks(4, loop_quantized, SHARDING_PLANS[plan], precision, precision, hosts=2), precision, precision, 4
    )


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        ("row-wise", "int8"),
        *[
            pytest.param(plan, precision, marks=pytest.mark.parity)
            for plan, precision in product(("table-wise", "column-wise", "row-wise"), ("fp16", "bf16", "int8"))
        ],
    ],
)
def test_qcomms_rounding_is_bounded_for_sequences(plan, precision):
    settings = {"qcomms": {"forward_precision": precision, "backward_precision": precision}}
    assert_passed(
        run_on_ranks(2, loop_with_sequences, SHARDING_PLANS[plan], settings, WIDE_SCHEMA), precision, precision, 2
    )


def scale_decoded_gradients(scene):
    """Scale decoded gradients by 1.02."""
    from unittest.mock import patch

    from raytrec.embeddings.sharding import ScaledCodec

    decode = ScaledCodec.decode
    patched = patch.object(
        ScaledCodec, "decode", lambda self, *given: decode(self, *given) * (1 if self.factor == 1 else 1.02)
    )
    patched.start()
    return patched.stop


def test_error_above_the_rounding_bound_is_detected():
    answers = run_on_ranks(2, loop_quantized, SHARDING_PLANS["row-wise"], "fp16", "fp16", scale_decoded_gradients)
    (found,) = failed_outcomes(answers, "parity")
    assert found["step"] == 6 and "the gradient that reaches rank" in found["text"]
    assert 0.01 < found["figure"] < 0.03 and 4e-4 < found["limit"] < 6e-4
