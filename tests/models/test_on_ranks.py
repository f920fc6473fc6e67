"""Models across ranks: a checkpoint of one plan resumes with another plan, and a recommender built from
the weights returns the same logits as evaluation."""

import pytest
import torch
from ranks import run_on_ranks
from small import SMALL_SCHEMA_PARTS, build_step_on_rank, make_batches, make_small_config, make_small_schema, train_step

from raytrec.checks.parity.batches import make_local_batch
from raytrec.config.features import resolve_features
from raytrec.embeddings.pooling import find_table_modules
from raytrec.embeddings.tables import tables
from raytrec.models.recommender import build_recommender

SECTIONS = {
    "dcn": {"name": "dcn", "cross_rank": 3, "top_mlp": [6]},
    "two_tower": {"name": "two_tower", "towers": {"query": ["user", "a"], "item": ["friends", "tags", "b"]}},
    "sequence": {"name": "sequence", "max_length": 2, "target": "user", "top_mlp": [6]},
}
SEQUENCES = make_small_schema(
    sparse={
        name: {**spec, "pooling": "sequence"} if "pooling" in spec else spec
        for name, spec in SMALL_SCHEMA_PARTS["sparse"].items()
    }
)


def score_batch(rank, world, matmul):
    """Return the logits of a global batch from evaluation on ranks and from a recommender."""
    settings = make_small_config(world, {"sharding_type": "row_wise"}, model=SECTIONS["sequence"], matmul=matmul)
    features, step = resolve_features(SEQUENCES, settings.model), build_step_on_rank(settings, SEQUENCES)
    whole, local = make_batches(3, rank, world, schema=SEQUENCES, features=features)
    train_step(step, local)
    (outputs,) = step.evaluate(iter(local[-1:]))
    weights = {name: table.weight.dense() for name, table in tables(step.model).items()}
    recommender = build_recommender(settings, SEQUENCES, torch.device("cpu"))
    recommender.embeddings.to_empty(device="cpu")
    recommender.model.load_state_dict(step.model.module.head.model.state_dict())
    with torch.no_grad():
        for collection in recommender.embeddings.collections:
            for name, table in find_table_modules(collection).items():
                table.weight.copy_(weights[name])
        logits = recommender.eval()(make_local_batch(whole[-1], SEQUENCES, [0, 12], 0, features))
    return outputs["y"].logits[outputs.rows > 0], logits


@pytest.mark.slow
@pytest.mark.parametrize("matmul,tolerance", [("fp32", 1e-6), ("bf16", 1e-2)])
def test_recommender_scores_match_distributed_evaluation(matmul, tolerance):
    ranks = run_on_ranks(2, score_batch, matmul)
    evaluated = torch.cat([logits for logits, _ in ranks])
    for _, logits in ranks:
        torch.testing.assert_close(logits, evaluated, rtol=0, atol=tolerance)
        assert torch.equal(logits, logits.bfloat16().float()) == (matmul == "bf16")
    assert evaluated.shape == (12,) and evaluated.std() > 1e-3
