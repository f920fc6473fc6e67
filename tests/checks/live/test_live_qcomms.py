"""Quantized collectives under the parity check: right runs stay within the stated bound, others do not."""

from itertools import product

import pytest
from loops import PLANS, failed, loop
from ranks import on_ranks
from small import SCHEMA

SENT = [name for name in PLANS if name not in ("data-parallel", "dense", "fp16")]
WHOLE = ["table-wise", "column-wise", "table-column-wise"]
FEW = [
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
    if case not in FEW
]


def wide():
    schema = SCHEMA.model_copy(deep=True)
    for table in schema.tables.values():
        table.dim = 32
    return schema


def quantized(rank, world, plan, forward, backward, fault=None, **settings):
    qcomms = {"forward_precision": forward, "backward_precision": backward}
    return loop(rank, world, plan, fault, schema=wide(), qcomms=qcomms, **settings)


def sequences(rank, world, plan, forward, backward):
    from raytrec.config.models.sequences import SequenceSection

    schema = wide()
    schema.sparse["tags"].pooling = schema.sparse["friends"].pooling = "sequence"
    model = SequenceSection(name="sequence", max_length=3, target="user", top_mlp=[6])
    qcomms = {"forward_precision": forward, "backward_precision": backward}
    return loop(rank, world, plan, schema=schema, model=model, qcomms=qcomms)


def passed(answers, forward, backward, world):
    """All checks have passed; the parity check has seen roundings, and less of them than it allows."""
    assert not failed(answers)
    found = [outcome for outcome in answers[0] if outcome["check"] == "parity"]
    assert found and all(outcome["figure"] <= outcome["limit"] for outcome in found)
    if world > 1 and {forward, backward} != {"fp32"}:
        assert all(outcome["figure"] > 1e-5 for outcome in found), "nothing was rounded"


@pytest.mark.parametrize(("plan", "forward", "backward", "world"), [*FEW, *LATER])
def test_what_is_rounded_stays_within_the_bound(plan, forward, backward, world):
    passed(on_ranks(world, quantized, PLANS[plan], forward, backward), forward, backward, world)


@pytest.mark.parity
@pytest.mark.parametrize("plan", ["table-row-wise", "grid", "row-wise", "table-column-wise"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_two_hosts(plan, precision):
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
def test_sequences(plan, precision):
    passed(on_ranks(2, sequences, PLANS[plan], precision, precision), precision, precision, 2)


def scaled_back_too_much(scene):
    """Gradients that arrive 2 % too large."""
    from unittest.mock import patch

    from raytrec.embeddings.codecs import Codec

    decode = Codec.decode
    patched = patch.object(
        Codec, "decode", lambda self, *given: decode(self, *given) * (1 if self.factor == 1 else 1.02)
    )
    patched.start()
    return patched.stop


def test_an_error_above_the_bound_is_found():
    answers = on_ranks(2, quantized, PLANS["row-wise"], "fp16", "fp16", scaled_back_too_much)
    (found,) = failed(answers, "parity")
    assert found["step"] == 6 and "the gradient that reaches rank" in found["text"]
    assert 0.01 < found["figure"] < 0.03 and 4e-4 < found["limit"] < 6e-4
