"""A schema with single ids, bags, and sequences of both kinds."""

from raytrec.config.schema import Schema


def make_mixed_schema(weights=False, dense=()):
    scores = {"weights": "w"} if weights else {}
    return Schema.parse(
        {
            "labels": ["y"],
            "dense": list(dense),
            "sparse": {
                "item": {"table": "item"},
                "history": {"table": "item", "pooling": "sequence", "column": "seen", **scores},
                "last": {"table": "item", "pooling": "sequence"},
                "tags": {"table": "tag", "pooling": "mean"},
            },
            "tables": {"item": {"rows": 1000, "dim": 4}, "tag": {"rows": 1000, "dim": 4}},
        },
        "test",
    )
