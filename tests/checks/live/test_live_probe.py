"""Faults in lookups, pooling and gradients of real training loops: the parity check detects each fault and
raises no false alarm. The module docstring of test_live.py describes when faults and checks happen."""

from itertools import product

import pytest
from loops import COPIES, PLANS, ROW_WISE, failed, loop, run, the_one
from ranks import on_ranks
from small import SCHEMA, a_schema

STEPS = {
    "plain": {},
    "all": {
        "max_grad_norm": 0.01,
        "activation_checkpointing": True,
        "on_nan": "skip",
        "balance": "empty",
    },
}


ALL_STEPS = ["all", pytest.param("plain", marks=pytest.mark.survive)]


def no_fault_but_weighted_sums(rank, world, plan):
    schema = SCHEMA.model_copy(deep=True)
    schema.sparse["tags"].pooling = schema.sparse["friends"].pooling = "sum"
    return loop(rank, world, plan, schema=schema)


def no_ids_at_all(rank, world, plan):
    """Run a loop whose probed batch has rows but no ids."""

    def emptied(scene):
        import torch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        old = scene.local[5].sparse
        scene.local[5].sparse = KeyedJaggedTensor(
            old.keys(), old.values()[:0], old.weights()[:0], lengths=torch.zeros_like(old.lengths())
        )

    return loop(rank, world, plan, emptied, 1)


def sequences(rank, world, plan, settings, schema=SCHEMA):
    """Run a model that looks up two sequences id by id, one of them with weights."""
    from raytrec.config.models.sequences import SequenceSection

    schema = schema.model_copy(deep=True)
    schema.sparse["tags"].pooling = schema.sparse["friends"].pooling = "sequence"
    model = SequenceSection(name="sequence", max_length=3, target="user", top_mlp=[6])
    return loop(rank, world, plan, schema=schema, model=model, **settings)


@pytest.mark.parametrize("settings", ALL_STEPS)
@pytest.mark.parametrize("plan", ["row-wise", "column-wise", "table-wise", "data-parallel"])
def test_parity_passes_for_sequences(plan, settings):
    assert not failed(on_ranks(2, sequences, PLANS[plan], STEPS[settings]))


@pytest.mark.parametrize("batch", [no_fault_but_weighted_sums, no_ids_at_all])
@pytest.mark.parametrize("plan", [ROW_WISE, {"sharding_type": "column_wise"}, COPIES])
def test_parity_passes_for_special_batches(plan, batch):
    assert not failed(on_ranks(2, batch, plan))


def a_bad_batch(scene):
    if scene.rank == 0:
        scene.local[5].dense[0, 0] = float("inf")


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("plan", [ROW_WISE, COPIES])
def test_skipped_probe_step_passes(plan, clip):
    settings = {"after": 3, "on_nan": "skip", "max_grad_norm": clip}
    assert not failed(on_ranks(2, run, plan, a_bad_batch, settings))


def rows_on_other_ranks(scene):
    """Change the rows per rank (12 of 23 and 3 of 5) that TorchRec uses to find the rank of a row."""
    if scene.rank == 1:
        for exchange in scene.modules("ShardedEmbeddingBagCollection")[0]._input_dists:
            exchange._feature_block_sizes_tensor -= 1


def test_misrouted_ids_are_detected():
    text = the_one(on_ranks(2, run, ROW_WISE, rows_on_other_ranks, {}), "parity")
    assert "table user, feature user: pooled embeddings on rank 1 differ" in text


def divided_again(scene):
    from raytrec.embeddings.pooling import sum_bag_weights

    def again(means, inputs, pooled):
        totals = dict(zip(inputs[1].keys(), sum_bag_weights(inputs[1]), strict=True))
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


def combinations():
    """Yield all cases; `make test` runs each plan with all settings on 2 ranks and plain on 3."""
    for world, plan, settings in product([1, 2, 3], PLANS, STEPS):
        few = (world, settings) in [(2, "all"), (3, "plain")] or (world == 1 and plan == "row-wise")
        yield pytest.param(world, plan, settings, marks=[] if few else pytest.mark.survive)


@pytest.mark.parametrize("world,plan,settings", combinations())
def test_all_checks_pass_without_a_fault(world, plan, settings):
    answers = on_ranks(world, run, PLANS[plan], None, STEPS[settings])
    assert not failed(answers)
    steps = [(o["check"], o["step"]) for o in answers[0]]
    each = ["shards", "replicas", "conservation", "finite", "numerics"]
    assert steps == [
        *((check, 0) for check in ("same_environment", "shards", "replicas", "finite", "numerics")),
        *((c, s) for s in (3, 6) for c in ("shards", "replicas", "parity", *each[2:])),
        *((check, 6) for check in each),
    ]
    assert all(o["figure"] < 1e-6 for o in answers[0] if o["check"] == "parity"), (
        "the limit is ten times as large"
    )


@pytest.mark.parametrize("settings", ALL_STEPS)
@pytest.mark.parametrize("plan", list(PLANS))
def test_twice_divided_means_are_detected(plan, settings):
    text = the_one(on_ranks(2, run, PLANS[plan], divided_again, STEPS[settings]), "parity")
    assert text.startswith("table user, feature friends: pooled embeddings on rank")
    assert "table tag, feature tags: pooled embeddings on rank" in text and "feature user" not in text
    assert ": the gradient that reaches rank" in text or "and 1 more" in text


@pytest.mark.parametrize("plan", list(PLANS))
def test_slightly_wrong_factor_is_detected(plan):
    answers = on_ranks(2, run, PLANS[plan], slightly_off, {})
    assert "feature user" in the_one(answers, "parity")
    assert 2.9e-5 < failed(answers)[0]["figure"] < 3.2e-5


@pytest.mark.parametrize("settings", ALL_STEPS)
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "data-parallel"])
def test_undivided_gradients_are_detected(plan, settings):
    answers = on_ranks(2, run, PLANS[plan], undivided, STEPS[settings])
    text = the_one(answers, "parity")
    assert "table user: the gradient that reaches rank" in text and "feature" not in text
    figure = next(o["figure"] for o in failed(answers))
    assert 0.1 < figure < 1.1, "the gradient is twice as large as expected"


@pytest.mark.parametrize("hosts", [2])
@pytest.mark.parametrize("plan", ["table-row-wise", "grid"])
def test_parity_check_works_on_two_hosts(plan, hosts):
    assert not failed(on_ranks(4, run, PLANS[plan], None, {}, hosts=hosts))
    answers = on_ranks(4, run, PLANS[plan], undivided, {}, hosts=hosts)
    assert "table user: the gradient" in the_one(answers, "parity")


def a_gradient_altered(scene):
    table, step = scene.state.tables["tag"], scene.step.optimizer.step

    def altered():
        table.parameter.grad.mul_(1.001)
        step()

    if scene.rank == 1:
        scene.step.optimizer.step = altered


def test_altered_gradient_of_one_replica_is_detected():
    found = failed(on_ranks(2, run, COPIES, a_gradient_altered, {}))
    texts = {o["check"]: o["text"] for o in found if o["step"] == 6}
    assert texts["parity"].startswith("table tag: the gradient that reaches rank 1 differs")
    assert texts["replicas"] == "tables/tag/weight on rank 1 differs from rank 0"


def without_all_reduce_of_tables(scene):
    for lookup in scene.modules("ShardedEmbeddingBagCollection")[0]._lookups:
        lookup.require_backward_grad_sync = False


def test_missing_table_all_reduce_is_detected():
    found = failed(on_ranks(2, run, COPIES, without_all_reduce_of_tables, {}))
    assert {o["step"] for o in found} == {6}
    texts = {o["check"]: o["text"] for o in found if o["check"] != "numerics"}
    assert set(texts) == {"replicas", "parity"}
    assert "tables/tag/weight on rank 1" in texts["replicas"] and "dense" not in texts["replicas"]
    assert "table user: the gradient that reaches rank" in texts["parity"]


# Quantized collectives: correct runs stay within the stated bound, faulty runs do not.
SENT = [name for name in PLANS if name not in ("data-parallel", "dense", "fp16")]
WHOLE = ["table-wise", "column-wise", "table-column-wise"]
FEW_QCOMMS = [
    ("row-wise", "fp16", "bf16", 2),
    ("table-wise", "int8", "int8", 2),
    ("column-wise", "fp32", "fp16", 2),
]
LATER = [
    pytest.param(*case, marks=pytest.mark.parity)
    for case in (
        *product(SENT, ("fp32", "fp16", "bf16"), ("fp32", "fp16", "bf16"), (1, 2, 3)),
        *product(WHOLE, ("fp16", "int8"), ("fp32", "int8"), (2, 3)),
    )
    if case not in FEW_QCOMMS
]


WIDE = a_schema(tables={name: {"rows": rows, "dim": 32} for name, rows in (("user", 23), ("tag", 5))})


def quantized(rank, world, plan, forward, backward, fault=None, **settings):
    qcomms = {"forward_precision": forward, "backward_precision": backward}
    return loop(rank, world, plan, fault, schema=WIDE, qcomms=qcomms, **settings)


def passed(answers, forward, backward, world):
    """Assert that all checks passed and that the parity check saw rounding errors within its limit."""
    assert not failed(answers)
    found = [outcome for outcome in answers[0] if outcome["check"] == "parity"]
    assert found and all(outcome["figure"] <= outcome["limit"] for outcome in found)
    if world > 1 and {forward, backward} != {"fp32"}:
        assert all(outcome["figure"] > 1e-5 for outcome in found), "nothing was rounded"


@pytest.mark.parametrize(("plan", "forward", "backward", "world"), [*FEW_QCOMMS, *LATER])
def test_qcomms_rounding_stays_within_the_bound(plan, forward, backward, world):
    passed(on_ranks(world, quantized, PLANS[plan], forward, backward), forward, backward, world)


@pytest.mark.parity
@pytest.mark.parametrize("plan", ["table-row-wise", "grid", "row-wise", "table-column-wise"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_qcomms_rounding_is_bounded_on_two_hosts(plan, precision):
    passed(on_ranks(4, quantized, PLANS[plan], precision, precision, hosts=2), precision, precision, 4)


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        ("row-wise", "int8"),
        *[
            pytest.param(plan, precision, marks=pytest.mark.parity)
            for plan, precision in product(
                ("table-wise", "column-wise", "row-wise"), ("fp16", "bf16", "int8")
            )
        ],
    ],
)
def test_qcomms_rounding_is_bounded_for_sequences(plan, precision):
    settings = {"qcomms": {"forward_precision": precision, "backward_precision": precision}}
    passed(on_ranks(2, sequences, PLANS[plan], settings, WIDE), precision, precision, 2)


def scaled_back_too_much(scene):
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
    answers = on_ranks(2, quantized, PLANS["row-wise"], "fp16", "fp16", scaled_back_too_much)
    (found,) = failed(answers, "parity")
    assert found["step"] == 6 and "the gradient that reaches rank" in found["text"]
    assert 0.01 < found["figure"] < 0.03 and 4e-4 < found["limit"] < 6e-4
