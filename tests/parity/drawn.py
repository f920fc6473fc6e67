"""Configurations that no test lists: schemas, plans and settings drawn by hypothesis."""

from dataclasses import dataclass

from design import FACTORS, Case, config
from hypothesis import strategies as st

from raytrec.config.schema import Schema

NAMES = ["user", "item", "tag", "word"]
ROWS_OF_A_TABLE = st.integers(1, 5) | st.integers(1, 60)
# Of a table with a sequence that the model reads id by id, which TorchRec shards in fewer ways.
INSTEAD = {"table_row_wise": "row_wise", "table_column_wise": "column_wise", "grid_shard": "column_wise"}


@dataclass(frozen=True)
class Drawn:
    """What Case is, with its own schema and one way of sharding for each table."""

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
def drawn(draw, place):
    """Any schema of up to 4 tables and 7 features, each table sharded its own way."""
    tables = {name: draw(ROWS_OF_A_TABLE) for name in NAMES[: draw(st.integers(1, 4))]}
    feature = st.tuples(
        st.sampled_from(sorted(tables)), st.sampled_from(["sum", "mean", "sequence"]), st.booleans()
    )
    # Each table is looked up by one feature at least.
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
        sharding |= {table: INSTEAD.get(sharding[table], sharding[table]) for table in by_id}
    return Drawn(
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
