"""A small model with managed ids, and batches whose ids mostly change from step to step."""

import torch
from small import make_small_config

from raytrec.config.schema import Schema

TABLES = {
    "user": {"rows": 15, "dim": 8, "ids": "managed"},
    "tag": {"rows": 9, "dim": 8, "ids": {"admit_after": 2, "eviction": "lfu", "fallback_rows": 2}},
    "city": {"rows": 5, "dim": 8},
}
SPARSE = {
    "user": {"table": "user"},
    "friends": {"table": "user", "pooling": "mean"},
    "tags": {"table": "tag", "pooling": "mean", "weights": "w"},
    "city": {"table": "city"},
}
STEPS, ROWS, SEED = 8, 12, 3


def managed_schema(tables=TABLES):
    parts = {"labels": ["y"], "dense": ["a", "b"], "sparse": SPARSE, "tables": tables}
    return Schema.parse(parts, "managed")


def random_id_batches():
    """Return GlobalBatches of random 64-bit ids; consecutive steps have few ids in common."""
    from raytrec.checks.parity.batches import make_random_batches

    known = torch.randint(-(2**63), 2**63 - 1, (200,), generator=torch.Generator().manual_seed(1))
    out = make_random_batches(managed_schema(), ROWS, STEPS, seed=1)
    for step, batch in enumerate(out):
        for feature, (ids, bag, weights) in batch.bags.items():
            if feature != "city":
                batch.bags[feature] = known[ids + 2 * step], bag, weights
    return out


def managed_config(world, sharding, optimizer, **train):
    made = make_small_config(world, sharding, optimizer, **train)
    made.optim.embeddings.eps, made.run.seed = 1e-6, SEED
    return made
