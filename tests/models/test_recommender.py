"""A model without labels: from its weights alone, what evaluation gives on ranks."""

import torch
from ranks import on_ranks
from small import SCHEMA, batches, build, config, train

from raytrec.config.features import resolve_features
from raytrec.config.run_config import load_config

SEQUENCES = SCHEMA.model_copy(deep=True)
SEQUENCES.sparse["friends"].pooling = "sequence"
SECTION = {"name": "sequence", "max_length": 2, "target": "user", "top_mlp": [6]}


def scored(rank, world, matmul):
    """Logits of a global batch: by evaluation on ranks, and by a model that is given features alone."""
    from raytrec.checks.parity.batches import local_batch
    from raytrec.embeddings.bags import tables_in
    from raytrec.embeddings.tables import tables
    from raytrec.models.recommender import build_recommender

    values = config(world, {"sharding_type": "row_wise"}, matmul=matmul).model_dump(by_alias=True)
    settings = load_config(values | {"model": SECTION})
    features = resolve_features(SEQUENCES, settings.model)
    step = build(settings, SEQUENCES)
    whole, local = batches(3, rank, world, schema=SEQUENCES, features=features)
    train(step, local)
    (outputs,) = step.evaluate(iter(local[-1:]))
    weights = {name: table.weight.dense() for name, table in tables(step.model).items()}
    recommender = build_recommender(settings, SEQUENCES, torch.device("cpu"))
    recommender.embeddings.to_empty(device="cpu")
    recommender.model.load_state_dict(step.model.module.head.model.state_dict())
    with torch.no_grad():
        for collection in recommender.embeddings.collections:
            for name, table in tables_in(collection).items():
                table.weight.copy_(weights[name])
        batch = local_batch(whole[-1], SEQUENCES, [0, 12], 0, features)
        logits = recommender.eval()(batch.dense, batch.sparse)
    return outputs["y"].logits[outputs.rows > 0], logits


def test_features_are_enough():
    for matmul, tolerance in (("fp32", 1e-6), ("bf16", 1e-2)):
        ranks = on_ranks(2, scored, matmul)
        evaluated = torch.cat([logits for logits, _ in ranks])
        for _, logits in ranks:
            torch.testing.assert_close(logits, evaluated, rtol=0, atol=tolerance)
            assert torch.equal(logits, logits.bfloat16().float()) == (matmul == "bf16")
        assert evaluated.shape == (12,) and evaluated.std() > 1e-3
