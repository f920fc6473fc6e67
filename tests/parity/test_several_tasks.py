"""Tasks, compared with one plain torch process: all losses, masks and weights, several tasks at once.

Masks and weights are random (raytrec/checks/parity/batches.py): a task ignores a third of the rows.
`make test` runs a case of each kind on 2 ranks; `make parity` runs all cases on 1 to 3 ranks.
"""

from dataclasses import dataclass
from itertools import product
from random import Random

import pytest
from design import Case
from record import assert_parity

from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema

PLACES = [(1, 1), (2, 1), (3, 1)]
MASKED = {"sample_weight": "w", "mask": "shown"}
LISTWISE = {"loss": "listwise_softmax", "options": {"temperature": 0.5, "learn_temperature": True}}
CLASSES = {"loss": "cross_entropy", "options": {"classes": 4}}
TASKS = {
    "two, masked and weighted": [
        {"label": "y", "positive_weight": 3.0, **MASKED},
        {"label": "z", "loss": "mse", "weight": 0.3, "mask": "y"},
    ],
    "three of one label": [
        {"name": "a", "negatives_kept": 0.1},
        {"name": "b", "loss": "focal", "weight": 2.0, "nulls": "skip"},
        {"name": "c", "loss": "huber"},
    ],
    "focal": [{"loss": "focal", "options": {"gamma": 1.5, "alpha": 0.3}}],
    "huber": [{"loss": "huber", "options": {"delta": 0.2}, **MASKED}],
    "poisson": [{"loss": "poisson", "weight": 0.2}],
    "cross-entropy": [{**CLASSES, **MASKED}],
    "classes and a number": [{"label": "y", **CLASSES}, {"label": "z", "loss": "mse"}],
    "bpr": [{"loss": "bpr"}],
    "bpr in groups": [{"loss": "bpr", "group": "user", **MASKED}],
    "listwise softmax": [{**LISTWISE}],
    "listwise softmax in groups": [{**LISTWISE, "group": "user", "positive_weight": 2.0, **MASKED}],
    "listwise softmax, bpr and bce": [
        {"label": "y", **LISTWISE, "group": "user"},
        {"name": "pairs", "loss": "bpr", "group": "user"},
        {"name": "also", **LISTWISE, "group": "film", "nulls": "skip"},
        {"label": "z"},
    ],
    "bpr and bce": [{"label": "y", "loss": "bpr", "group": "user", "weight": 0.5}, {"label": "z"}],
}
VECTOR_TASKS = {
    "softmax": [{"loss": "in_batch_softmax"}],
    "softmax by items": [{"loss": "in_batch_softmax", "options": {"temperature": 0.5}, "item": "film", **MASKED}],
    "softmax with a learned temperature": [
        {"name": "near", "loss": "in_batch_softmax", "options": {"learn_temperature": True}, "item": "film"},
        {"label": "z", **LISTWISE, "group": "user"},
    ],
    "softmax and bce": [
        {"name": "near", "loss": "in_batch_softmax", "item": "film"},
        {"label": "z", "positive_weight": 2.0},
        {"name": "also", "label": "y", "loss": "in_batch_softmax", "weight": 0.2, "nulls": "skip"},
    ],
}
EXTRAS = {
    "balance": ["unequal", "empty", "equal"],
    "recomputed": [False, True],
    "max_grad_norm": [None, 0.05],
    "sharding": ["row_wise", "table_wise", "data_parallel", "column_wise"],
    "optimizer": ["sgd", "adagrad"],
}


@dataclass(frozen=True)
class TaskCase(Case):
    """A case with these tasks and two labels."""

    tasks: str = ""

    groups = ("tasks", *EXTRAS, "place", "model")

    def schema(self):
        return Schema.parse(super().schema().model_dump() | {"labels": ["y", "z"]}, "case")

    def config(self):
        values = super().config().model_dump(by_alias=True)
        return load_config(values | {"tasks": (TASKS | VECTOR_TASKS)[self.tasks]})


DEFAULT_VALUES = {"sharding": "row_wise", "pooling": "mixed", "optimizer": "sgd", "balance": "unequal"}


def make_task_case(name, place, random=None, **extras):
    drawn = {key: random.choice(values) for key, values in EXTRAS.items()} if random else {}
    models = ["two_tower"] if name in VECTOR_TASKS else ["dlrm", "dcn", "two_tower", "sequence"]
    model = random.choice(models) if random else models[0]
    values = DEFAULT_VALUES | {"model": model} | drawn | extras
    kernel = "dense" if values["sharding"] == "data_parallel" else "fused"
    return TaskCase(**values, place=place, kernel=kernel, tasks=name)


SELECTED_CASES = [
    make_task_case("two, masked and weighted", (2, 1), recomputed=True, max_grad_norm=0.05),
    make_task_case("classes and a number", (2, 1), model="two_tower", balance="empty"),
    make_task_case("bpr in groups", (2, 1), recomputed=True, balance="unequal"),
    make_task_case("listwise softmax, bpr and bce", (2, 1), balance="empty"),
    make_task_case("softmax with a learned temperature", (2, 1), balance="unequal"),
    make_task_case("softmax and bce", (2, 1), recomputed=True, balance="empty", sharding="table_wise"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SELECTED_CASES, ids=lambda case: case.tasks)
def test_selected_tasks_match_one_process(case):
    assert_parity([case], case.place)


@pytest.mark.parity
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_all_tasks_match_one_process(place):
    """Each loss runs with all balances, with and without activation checkpointing; the rest is random."""
    random = Random(2)
    cases = [
        make_task_case(name, place, random, balance=balance, recomputed=recomputed)
        for name, balance, recomputed in product(TASKS | VECTOR_TASKS, EXTRAS["balance"], EXTRAS["recomputed"])
    ]
    assert_parity(cases, place)
