"""Faults in lookups, pooling and gradients of real training loops: the parity check detects each fault and
raises no false alarm. The module docstring of test_live.py describes when faults and checks happen."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from loops import DATA_PARALLEL, ROW_WISE, SHARDING_PLANS, failed_outcomes, only_failed_text, run_with_fault
from ranks import run_on_ranks
from small import SMALL_SCHEMA_PARTS, make_small_schema
from torchrec.distributed import comm_ops
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.models.sequences import SequenceSection
from raytrec.embeddings.pooling import sum_bag_weights
from raytrec.embeddings.sharding import ScaledCodec

STEPS = {
    "plain": {},
    "all": {"max_grad_norm": 0.01, "activation_checkpointing": True, "on_nan": "skip", "balance": "empty"},
}
ALL_STEPS = ["all", pytest.param("plain", marks=pytest.mark.survive)]
SEQUENCE_MODEL = SequenceSection(name="sequence", max_length=3, target="user", top_mlp=[6])


def make_pooled_schema(pooling, **parts):
    """Return the small Schema with this pooling of friends and tags; the ids of tags have weights."""
    sparse = SMALL_SCHEMA_PARTS["sparse"]
    changed = {name: sparse[name] | {"pooling": pooling} for name in ("friends", "tags")}
    return make_small_schema(sparse=sparse | changed, **parts)


def remove_ids(scene):
    """Remove all ids of the probed batch."""
    old = scene.local[5].sparse
    lengths = torch.zeros_like(old.lengths())
    scene.local[5].sparse = KeyedJaggedTensor(old.keys(), old.values()[:0], old.weights()[:0], lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ALL_STEPS)
@pytest.mark.parametrize("plan", ["row-wise", "column-wise", "table-wise", "data-parallel"])
def test_parity_passes_for_sequences(plan, settings):
    """The model looks up two sequences id by id."""
    settings = STEPS[settings] | {"schema": make_pooled_schema("sequence"), "model": SEQUENCE_MODEL}
    assert not failed_outcomes(run_on_ranks(2, run_with_fault, SHARDING_PLANS[plan], None, settings))


@pytest.mark.parametrize(
    "fault,settings",
    [(None, {"schema": make_pooled_schema("sum")}), (remove_ids, {"after": 1})],
    ids=["sums", "no ids"],
)
@pytest.mark.parametrize("plan", [ROW_WISE, {"sharding_type": "column_wise"}, DATA_PARALLEL])
def test_parity_passes_for_special_batches(plan, fault, settings):
    assert not failed_outcomes(run_on_ranks(2, run_with_fault, plan, fault, settings))


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
@pytest.mark.parametrize("plan", ["table-row-wise", "grid"])
def test_parity_check_works_on_two_hosts(plan):
    assert not failed_outcomes(run_on_ranks(4, run_with_fault, SHARDING_PLANS[plan], None, {}, hosts=2))
    answers = run_on_ranks(4, run_with_fault, SHARDING_PLANS[plan], disable_gradient_division, {}, hosts=2)
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
WIDE_TABLES = {"user": {"rows": 23, "dim": 32}, "tag": {"rows": 5, "dim": 32}}
# (plan, precision forward, precision backward, ranks, hosts, pooling)
FAST_QCOMMS_CASES = [
    ("row-wise", "fp16", "bf16", 2, 1, "mean"),
    ("table-wise", "int8", "int8", 2, 1, "mean"),
    ("column-wise", "fp32", "fp16", 2, 1, "mean"),
    ("row-wise", "int8", "int8", 2, 1, "sequence"),
]
SLOW_QCOMMS_CASES = [
    *product(EXCHANGING_PLANS, ("fp32", "fp16", "bf16"), ("fp32", "fp16", "bf16"), (1, 2, 3), [1], ["mean"]),
    *product(WHOLE_TABLE_PLANS, ("fp16", "int8"), ("fp32", "int8"), (2, 3), [1], ["mean"]),
    *(
        (plan, precision, precision, 4, 2, "mean")
        for plan, precision in product(("table-row-wise", "grid", "row-wise", "table-column-wise"), ("fp16", "bf16"))
    ),
    *(
        (plan, precision, precision, 2, 1, "sequence")
        for plan, precision in product(("table-wise", "column-wise", "row-wise"), ("fp16", "bf16", "int8"))
    ),
]
QCOMMS_CASES = FAST_QCOMMS_CASES + [
    pytest.param(*case, marks=pytest.mark.parity) for case in SLOW_QCOMMS_CASES if case not in FAST_QCOMMS_CASES
]


def make_qcomms_settings(forward, backward, pooling="mean"):
    settings = {"schema": make_pooled_schema(pooling, tables=WIDE_TABLES)}
    settings |= {"model": SEQUENCE_MODEL} if pooling == "sequence" else {}
    return settings | {"qcomms": {"forward_precision": forward, "backward_precision": backward}}


@pytest.mark.parametrize("plan,forward,backward,world,hosts,pooling", QCOMMS_CASES)
def test_qcomms_rounding_stays_within_the_bound(plan, forward, backward, world, hosts, pooling):
    settings = make_qcomms_settings(forward, backward, pooling)
    answers = run_on_ranks(world, run_with_fault, SHARDING_PLANS[plan], None, settings, hosts=hosts)
    assert not failed_outcomes(answers)
    found = [outcome for outcome in answers[0] if outcome["check"] == "parity"]
    assert found and all(outcome["figure"] <= outcome["limit"] for outcome in found)
    if world > 1 and {forward, backward} != {"fp32"}:
        assert all(outcome["figure"] > 1e-5 for outcome in found), "nothing was rounded"


def scale_decoded_gradients(scene):
    """Scale decoded gradients by 1.02."""
    decode = ScaledCodec.decode
    patched = patch.object(
        ScaledCodec, "decode", lambda self, *given: decode(self, *given) * (1 if self.factor == 1 else 1.02)
    )
    patched.start()
    return patched.stop


def test_error_above_the_rounding_bound_is_detected():
    answers = run_on_ranks(2, run_with_fault, ROW_WISE, scale_decoded_gradients, make_qcomms_settings("fp16", "fp16"))
    (found,) = failed_outcomes(answers, "parity")
    assert found["step"] == 6 and "the gradient that reaches rank" in found["text"]
    assert 0.01 < found["figure"] < 0.03 and 4e-4 < found["limit"] < 6e-4
