"""Every registered model, compared with one plain torch process, under a plan of several sharding types.

CASES has an entry for each model: its schema, its configuration section, and its tasks. On one rank, with activation
checkpointing and Adam for dense layers, `make test` runs the models of FAST and `make test-slow` the others;
`make parity` adds 2 and 3 ranks.
"""

from dataclasses import dataclass

import pytest
from design import Case, config
from record import assert_parity

from raytrec.config.models.base import MODELS
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema

# Dense a, b; user and friends share a table, words and scored another; tags has its own; all dims are 8.
SCHEMA = Case("row_wise", "mixed", "sgd", (1, 1), "equal").schema()
ONE = [{"label": "y"}]
TWO_TASKS = [{"label": "y"}, {"label": "z", "weight": 0.5}]
MULTICLASS = {"name": "kind", "label": "y", "loss": "cross_entropy", "options": {"classes": 2}, "mask": "z"}
THREE_TASKS = [*TWO_TASKS, MULTICLASS]


def make_sequence_schema(*features):
    """Return SCHEMA with these features as sequences without weights."""
    values = SCHEMA.model_dump()
    for feature in features:
        values["sparse"][feature] |= {"pooling": "sequence", "weights": None}
    return Schema.parse(values, "case")


def make_negatives_schema(*side_features):
    """Return SCHEMA with user as the item, friends as the history, and drawn as the negatives."""
    values = make_sequence_schema("friends").model_dump()
    values["sparse"]["friends"]["side_features"] = side_features
    values["sparse"]["drawn"] = {"table": "user", "pooling": "sequence"}
    return Schema.parse(values, "case")


def make_parallel_schema(*side_features):
    """Return SCHEMA with friends as the history of user, and tags as the history of topic."""
    values = make_sequence_schema("friends", "tags").model_dump()
    values["sparse"]["friends"]["side_features"] = side_features
    values["sparse"]["topic"] = {"table": "tag"}
    return Schema.parse(values, "case")


PAIR = {"user": "tags", "item": "user", "negatives": "drawn", "max_negatives": 3}
NEXT_ITEM = {"history": "friends", "item": "user", "max_length": 3, "negatives": "drawn", "max_negatives": 4}
MODEL_LOSS = [{"label": "y"}, {"name": "own", "label": "z", "loss": "from_model"}]
IN_BATCH_SOFTMAX = {"name": "near", "label": "z", "loss": "in_batch_softmax", "item": "film", "item_frequency": "often"}


# model → (schema, section, tasks)
CASES = {
    "dlrm": (SCHEMA, {"bottom_mlp": [6], "top_mlp": [10, 4]}, TWO_TASKS),
    "dcn": (SCHEMA, {"cross_layers": 2, "cross_rank": 5, "top_mlp": [6]}, TWO_TASKS),
    "two_tower": (
        SCHEMA,
        {"towers": {"query": ["a", "user", "tags"], "item": ["b", "friends", "words", "scored"]}},
        [{"label": "y"}, {"name": "near", "label": "z", "loss": "in_batch_softmax"}],
    ),
    "mf": (make_negatives_schema(), PAIR | {"loss": "bce"}, [*MODEL_LOSS, IN_BATCH_SOFTMAX]),
    "ncf": (make_negatives_schema(), PAIR | {"mlp": [6, 4]}, MODEL_LOSS),
    "sasrec": (make_negatives_schema(), NEXT_ITEM | {"heads": 2, "loss": "bpr"}, MODEL_LOSS),
    "hstu": (make_negatives_schema("price", "at"), NEXT_ITEM | {"temperature": 0.5, "time": "at"}, MODEL_LOSS),
    "sequence": (make_sequence_schema("friends"), {"max_length": 3, "target": "user", "top_mlp": [6]}, TWO_TASKS),
    "din": (make_sequence_schema("friends"), {"max_length": 3, "attention_mlp": [5], "top_mlp": [6]}, TWO_TASKS),
    "dien": (
        make_negatives_schema(),
        {"max_length": 3, "negatives": "drawn", "auxiliary_weight": 0.5, "top_mlp": [6]},
        TWO_TASKS,
    ),
    "hstu_rank": (
        make_parallel_schema("bits", "at"),
        {"candidate": ["b"], "actions": {"bits": 3}, "time": "at", "request_time": "a", "dim": 16, "heads": 2}
        | {"max_length": 3, "encoder": 6, "tower_mlp": [4], "dropout": 0.0},
        THREE_TASKS,
    ),
    "bst": (make_sequence_schema("friends"), {"max_length": 3, "feedforward": 5, "top_mlp": [6]}, TWO_TASKS),
    "wide_deep": (
        SCHEMA,
        {"wide": ["a", "user", "words"], "top_mlp": [6], "cross_layers": 2, "slope_rate": 3.0, "deep_dropout": 0.5},
        TWO_TASKS,
    ),
    "deepfm": (SCHEMA, {"top_mlp": [6]}, TWO_TASKS),
    "xdeepfm": (SCHEMA, {"cin": [4, 3], "top_mlp": [6]}, TWO_TASKS),
    "masknet": (SCHEMA, {"arrangement": "serial", "blocks": [16, 12], "top_mlp": [4]}, TWO_TASKS),
    "final_mlp": (
        SCHEMA,
        {"mlp1": [6, 4], "mlp2": [8], "gate1": ["a", "user"], "gate_mlp": [5], "heads": 2},
        TWO_TASKS,
    ),
    "wukong": (
        SCHEMA,
        {"bottom_mlp": [6], "fmb_vectors": 3, "lcb_vectors": 2, "rank": 3, "fmb_mlp": [6], "top_mlp": [4]},
        TWO_TASKS,
    ),
    "pepnet": (SCHEMA, {"domain": ["b", "tags"], "personal": ["user"], "gate_mlp": [5], "tower_mlp": [6]}, THREE_TASKS),
    "shared_bottom": (SCHEMA, {"bottom_mlp": [6], "tower_mlp": [4]}, THREE_TASKS),
    "mmoe": (SCHEMA, {"experts": 3, "expert_mlp": [6], "tower_mlp": [4]}, THREE_TASKS),
    "ple": (SCHEMA, {"expert_mlp": [6], "tower_mlp": [4]}, THREE_TASKS),
    "esmm": (SCHEMA, {"click": "z", "conversion": "y", "tower_mlp": [6]}, TWO_TASKS),
    "dbmtl": (SCHEMA, {"bottom_mlp": [6], "tower_mlp": [5], "relation_mlp": [4]}, THREE_TASKS),
}

# Negatives of the whole global batch: few negatives are sent between ranks, otherwise queries are sent.
TOWERS = {"query": ["a", "b", "tags", "friends", "words", "scored"], "item": ["user"]}
TOWERS = {"towers": TOWERS, "tower_mlp": [6], "negatives": "drawn", "max_negatives": 3}
SHARED_NEGATIVES_CASES = {
    "mf, shared": (make_negatives_schema(), PAIR | {"name": "mf", "share_negatives": True, "loss": "bpr"}, MODEL_LOSS),
    "two_tower, shared": (make_negatives_schema(), TOWERS | {"name": "two_tower", "share_negatives": True}, MODEL_LOSS),
    "sasrec, shared": (
        make_negatives_schema(),
        NEXT_ITEM | {"name": "sasrec", "share_negatives": True, "loss": "bce", "gbce": 0.5},
        MODEL_LOSS,
    ),
    "hstu, shared": (
        make_negatives_schema(),
        NEXT_ITEM | {"name": "hstu", "share_negatives": True, "max_negatives": 1},
        MODEL_LOSS,
    ),
}
ALL_CASES = CASES | SHARED_NEGATIVES_CASES
# Models of each family whose gradients take the most different paths through the tables.
FAST = ("dlrm", "dcn", "two_tower, shared", "mmoe", "din", "sasrec", "hstu_rank")

MIXED_PLAN = {
    "user": {"sharding_type": "row_wise"},
    "tag": {"sharding_type": "data_parallel", "compute_kernel": "dense"},
    "word": {"sharding_type": "table_wise"},
}
PLACES = {
    (1, 1): {"recomputed": True, "dense": "adam"},
    (2, 1): {"balance": "unequal"},
    (3, 1): {"balance": "empty", "recomputed": True, "dense": "adam"},
}


@dataclass(frozen=True)
class ModelCase:
    """A case of design.Case with a model and its tasks, over the labels y and z."""

    model: str
    place: tuple[int, int]
    balance: str = "equal"
    recomputed: bool = False
    max_grad_norm: float | None = None
    dense: str = "sgd"
    steps = 6

    groups = ("model", "place", "balance", "recomputed", "dense")

    def schema(self):
        schema, _, _ = ALL_CASES[self.model]
        return Schema.parse(schema.model_dump() | {"labels": ["y", "z"]}, "case")

    def config(self):
        schema, section, tasks = ALL_CASES[self.model]
        case = Case("row_wise", "mixed", "sgd", self.place, self.balance, self.recomputed)
        values = config(case, {name: MIXED_PLAN.get(name, {}) for name in schema.tables}).model_dump(by_alias=True)
        # eps: see raytrec/checks/parity/compare.py
        dense = {"name": self.dense, "lr": 0.01, "eps": 1e-5}
        values["optim"]["dense"] = dense if self.dense == "adam" else {"name": self.dense, "lr": 0.1}
        return load_config(values | {"model": {"name": self.model} | section, "tasks": tasks})


def test_every_model_has_a_case():
    assert set(CASES) == set(MODELS.parts)


def make_combinations():
    """Yield the combinations of models and places, marked by the suite that runs them."""
    for place in PLACES:
        for model in ALL_CASES:
            slow = [] if model in FAST else [pytest.mark.slow]
            yield pytest.param(model, place, marks=slow if place == (1, 1) else [pytest.mark.parity])


@pytest.mark.parametrize(("model", "place"), make_combinations(), ids=str)
def test_model_matches_one_process(model, place):
    assert_parity([ModelCase(model, place, **PLACES[place])], place)
