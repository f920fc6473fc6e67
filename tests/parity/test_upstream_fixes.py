"""Cases of defects that TorchRec fixed after 1.8.0, compared with one plain torch process.

- Deduplication of ids lost the feature of an id in a shared table, unless all features had about the same
  number of ids (meta-pytorch/torchrec#4525, in 1.9.2).
- A weighted lookup returned no gradient for the id weights (meta-pytorch/torchrec#4602).

raytrec does not use this code: it maps ids to rows itself, and weights are data. The cases check
raytrec's own code for the same defects. `make test` runs them on 1 and 2 ranks, `make parity` on more.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from design import FACTORS, ROWS, Case
from ranks import run_on_ranks

from raytrec.config.schema import Schema

# Number of ids per row. `friends` shares a table with `user`, `scored` with `words`; their ids overlap.
LENGTHS = {"user": 1, "friends": 40, "words": 25, "scored": 1}
SHARDINGS = "row_wise", "table_wise", "column_wise"


@dataclass(frozen=True)
class UnevenCase(Case):
    """A case with nonadjacent features of one table, and with whole sequences."""

    def schema(self):
        values = super().schema().model_dump()
        order = "user", "words", "friends", "scored", "tags"
        return Schema.parse(values | {"sparse": {name: values["sparse"][name] for name in order}}, "case")

    def config(self):
        made = super().config()
        if self.model == "sequence":
            made.model.max_length = max(LENGTHS.values())
        return made


UNEVEN_CASES = [
    UnevenCase(sharding, "mixed", "sgd", (2, 1), "unequal", model=model)
    for model, sharding in [("dlrm", "row_wise"), ("sequence", "row_wise"), ("sequence", "table_wise")]
]


def make_uneven_batches(schema, count, seed):
    """Return random batches in which features of one table have bags of very different lengths."""
    from raytrec.checks.parity.batches import make_random_batches

    generator, batches = torch.Generator().manual_seed(seed), make_random_batches(schema, ROWS, count, seed)
    for batch in batches:
        for feature, length in LENGTHS.items():
            spec, bag = schema.sparse[feature], torch.arange(ROWS).repeat_interleave(length)
            ids = torch.randint(0, schema.tables[spec.table].own_rows, (len(bag),), generator=generator)
            weights = torch.rand(len(bag), generator=generator) * 2 if spec.weights else torch.ones(len(bag))
            batch.bags[feature] = ids, bag, weights
    return batches


def compare_uneven(rank, world, cases):
    """Return the findings of one gradient and of three steps for each case (on rank 0)."""
    from raytrec.checks.parity import compare
    from raytrec.checks.parity.batches import compute_row_bounds
    from raytrec.checks.parity.sharded import ShardedRun
    from raytrec.worker.build import build_step

    out = []
    for case in cases:
        config, schema, device = case.config(), case.schema(), torch.device("cpu")
        bounds = compute_row_bounds(ROWS, world, case.balance)
        choices = [make_uneven_batches(schema, compare.CANDIDATES, seed) for seed in range(3)]

        def shard(config):
            return ShardedRun(build_step, config, schema, device, bounds)  # noqa: B023

        found = compare._compare_gradient(shard, config, choices[0]) + compare._compare_steps(shard, config, choices)
        out.append([finding.record() for finding in found])
    return out


def assert_uneven_parity(cases, place):
    ranks, hosts = place
    for case, found in zip(cases, run_on_ranks(ranks, compare_uneven, cases, hosts=hosts)[0], strict=True):
        assert {f["check"] for f in found} >= {"forward", "gradient", "weights"}
        assert not [f"{case}: {f}" for f in found if not f["passed"]]


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["static", "managed"])
def test_features_of_shared_tables_keep_their_ids(ids):
    assert_uneven_parity([replace(case, ids=ids) for case in UNEVEN_CASES], (2, 1))


@pytest.mark.parity
@pytest.mark.parametrize("place", FACTORS["place"], ids=str)
@pytest.mark.parametrize("ids", ["static", "managed"])
def test_features_of_shared_tables_keep_their_ids_on_all_ranks(ids, place):
    cases = [
        UnevenCase(sharding, "mixed", optimizer, place, balance, model=model, ids=ids)
        for model in ("dlrm", "sequence")
        for sharding in SHARDINGS
        for optimizer, balance in [("sgd", "unequal"), ("adagrad", "empty")]
    ]
    assert_uneven_parity(cases, place)


def compute_weight_gradients(rank, world, case):
    """Return feature → gradients of the weights of its ids: (by the sharded lookup, in one process)."""
    from raytrec.checks.parity.batches import make_local_batch, make_random_batches
    from raytrec.checks.parity.sharded import ShardedRun
    from raytrec.worker.build import build_step

    schema, bounds = case.schema(), [0, ROWS]
    run = ShardedRun(build_step, case.config(), schema, torch.device("cpu"), bounds)
    run.weights()
    one, (batch,) = run.reference(), make_random_batches(schema, ROWS, 1, seed=2)
    weights = [weights.requires_grad_() for _, _, weights in batch.bags.values()]
    found = run.step.model.module.embeddings(make_local_batch(batch, schema, bounds, rank, run.features).sparse)
    slopes = {feature: torch.randn_like(vectors) for feature, vectors in found.items()}

    def gradients(vectors):
        loss = sum((vectors[feature] * slope).sum() for feature, slope in slopes.items())
        return torch.autograd.grad(loss, weights)

    expected = gradients(one.pooled(batch))  # before the fused kernels update their rows
    return dict(zip(batch.bags, zip(gradients(found), expected, strict=True), strict=True))


@pytest.mark.parametrize("pooling", ["weighted sum", "weighted mean"])
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "dense"])
def test_id_weights_have_a_gradient(kernel, pooling):
    """One rank is enough: TorchRec sends weights without gradients, and raytrec does not need them."""
    case = Case("table_wise", pooling, "sgd", (1, 1), "equal", kernel=kernel)
    (found,) = run_on_ranks(1, compute_weight_gradients, case)
    for feature, (got, expected) in found.items():
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=feature)
