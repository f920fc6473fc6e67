"""Schemas, plans and settings drawn by hypothesis, identical in every run."""

from dataclasses import dataclass

import pytest
from design import FACTORS, Case, config
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from record import assert_parity

from raytrec.config.schema import Schema

NAMES = ["user", "item", "tag", "word"]
TABLE_ROWS = st.integers(1, 5) | st.integers(1, 60)
# Replacements for tables of sequences, for which TorchRec supports fewer sharding types.
SEQUENCE_SHARDING_TYPES = {
    "table_row_wise": "row_wise",
    "table_column_wise": "column_wise",
    "grid_shard": "column_wise",
}


@dataclass(frozen=True)
class RandomCase:
    """A case like design.Case, with its own schema and one sharding type per table."""

    tables: dict[str, int]  # rows
    features: tuple[tuple[str, str, bool], ...]  # table, pooling, weighted
    sharding: dict[str, str]
    dim: int
    dense: int
    optimizer: str
    kernel: str
    place: tuple[int, int]
    balance: str
    recomputed: bool
    max_grad_norm: float | None
    model: str = "dlrm"
    dtype = "fp32"
    groups = tuple(group for group in Case.groups if group not in ("sharding", "pooling"))

    def config(self):
        tables = {
            table: {
                "sharding_type": sharding,
                "compute_kernel": "dense" if sharding == "data_parallel" else self.kernel,
            }
            for table, sharding in self.sharding.items()
        }
        return config(self, tables)

    def schema(self):
        sparse = {}
        for i, (table, pooling, weighted) in enumerate(self.features):
            sparse[f"f{i}"] = {"table": table, "pooling": pooling}
            if weighted:
                sparse[f"f{i}"]["weights"] = f"w{i}"
        tables = {table: {"rows": rows, "dim": self.dim} for table, rows in self.tables.items()}
        dense = [f"d{i}" for i in range(self.dense)]
        return Schema.parse({"labels": ["y"], "dense": dense, "sparse": sparse, "tables": tables}, "drawn")


@st.composite
def draw_cases(draw, place):
    """Draw a schema of up to 4 tables and 7 features, with one sharding type per table."""
    tables = {name: draw(TABLE_ROWS) for name in NAMES[: draw(st.integers(1, 4))]}
    feature = st.tuples(st.sampled_from(sorted(tables)), st.sampled_from(["sum", "mean", "sequence"]), st.booleans())
    # At least one feature looks up each table.
    features = [(name, *draw(feature)[1:]) for name in tables] + draw(st.lists(feature, max_size=3))
    optimizer = draw(st.sampled_from(FACTORS["optimizer"]))
    kernel = "dense" if optimizer == "adam" else draw(st.sampled_from(["fused", "dense", "fused_uvm"]))
    by_row = ["data_parallel", "table_wise", "row_wise", "table_row_wise"]
    ways = by_row if optimizer == "rowwise_adagrad" else FACTORS["sharding"]
    poolings = {pooling for _, pooling, _ in features}
    models = ["dlrm", "dcn"] + ["sequence"] * (len(poolings) > 1 and "sequence" in poolings)
    features = tuple(draw(st.permutations(features)))
    sharding = {name: draw(st.sampled_from(ways)) for name in tables}
    model = draw(st.sampled_from(models))
    if model == "sequence":
        by_id = {table for table, pooling, _ in features if pooling == "sequence"}
        sharding |= {table: SEQUENCE_SHARDING_TYPES.get(sharding[table], sharding[table]) for table in by_id}
    return RandomCase(
        tables=tables,
        features=features,
        sharding=sharding,
        dim=draw(st.sampled_from([4, 8, 12, 20])),
        dense=draw(st.integers(0, 2)),
        optimizer=optimizer,
        kernel=kernel,
        place=place,
        balance=draw(st.sampled_from(FACTORS["balance"])),
        recomputed=draw(st.booleans()),
        max_grad_norm=draw(st.sampled_from([None, 0.01, 1.0])),
        model=model,
    )


def check_random_cases(place, examples):
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failure may be a hang, and shrinking it would take hours
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(draw_cases(place), min_size=1, max_size=4))
    def holds(cases):
        assert_parity(cases, place)

    holds()


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [
        pytest.param({"user": 1}, marks=pytest.mark.parity),
        {"user": 9, "item": 2},
        pytest.param({"user": 2, "item": 9}, marks=pytest.mark.parity),
    ],
    ids=str,
)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.parity)])
def test_ranks_without_table_rows_match_one_process(tables, half):
    """The table is alone in its kernel, after another table, or before another table.

    The first half covers each pair of optimizer, kernel and gradient norm limit.
    """
    features = tuple((table, "mean", False) for table in [*tables, *tables])
    cases = [
        RandomCase(
            tables=tables,
            features=features,
            sharding=dict.fromkeys(tables, "row_wise"),
            dim=8,
            dense=1,
            optimizer=optimizer,
            kernel=kernel,
            place=(3, 1),
            balance="unequal",
            recomputed=False,
            max_grad_norm=max_grad_norm,
        )
        for number, optimizer in enumerate(FACTORS["optimizer"])
        for kernel in ("fused", "dense")
        for max_grad_norm in (None, 0.05)
        if kernel == "dense" or optimizer != "adam"
        if (optimizer == "adam" or (number + (kernel == "dense") + (max_grad_norm is None)) % 2 == 0) != half
    ]
    assert_parity(cases, (3, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=[] if p == (2, 1) else [pytest.mark.parity]) for p in FACTORS["place"]], ids=str
)
def test_random_schemas_match_one_process(place):
    check_random_cases(place, examples=4)


@pytest.mark.parity
@pytest.mark.parametrize("place", FACTORS["place"], ids=str)
def test_many_random_schemas_match_one_process(place):
    check_random_cases(place, examples=60)
