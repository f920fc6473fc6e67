"""Cases of the parity suite: all combinations, and a pairwise selection."""

from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations, product
from random import Random

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import BY_ID_TYPES

ROWS = 24  # per global batch
FACTORS = {
    "sharding": [
        "data_parallel",
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    ],
    "pooling": ["sum", "mean", "weighted sum", "weighted mean", "mixed"],
    "optimizer": ["sgd", "rowwise_adagrad", "adagrad", "adam"],
    "place": [(1, 1), (2, 1), (3, 1), (4, 2)],  # ranks, hosts
    "balance": ["equal", "unequal", "empty"],
}
# Training options that are combined with the factors.
EXTRAS = {
    "recomputed": [False, True],
    "max_grad_norm": [None, 0.05],
    "kernel": ["fused", "dense", "fused_uvm"],
    "model": ["dlrm", "dcn", "two_tower", "sequence"],
}

SEQUENCE_MODELS = "sequence", "dien"


@dataclass(frozen=True)
class Case:
    """One configuration; `kernel` applies to sharded tables if the optimizer supports it."""

    sharding: str
    pooling: str
    optimizer: str
    place: tuple[int, int]
    balance: str
    recomputed: bool = False  # train.activation_checkpointing
    max_grad_norm: float | None = None
    kernel: str = "fused"
    model: str = "dlrm"
    dtype: str = "fp32"
    ids: str = "static"

    groups = (*FACTORS, *EXTRAS, "dtype")

    def __str__(self):
        ranks, hosts = self.place
        parts = [self.sharding, self.pooling, self.optimizer, f"{ranks} ranks on {hosts} hosts", self.balance]
        extras = {k: v for k, v in asdict(self).items() if k in EXTRAS and v != EXTRAS[k][0]}
        return ", ".join(parts + [f"{k} {v}" for k, v in extras.items()])

    @property
    def possible(self):
        return is_possible(self.sharding, self.optimizer, self.kernel)

    def config(self):
        tables = {"*": {"sharding_type": self.sharding, "compute_kernel": self.kernel, "dtype": self.dtype}}
        if self.model in SEQUENCE_MODELS and self.sharding not in BY_ID_TYPES:
            # Tables of sequences support fewer sharding types than the other table.
            nearest = {"table_column_wise": "column_wise"}.get(self.sharding, "row_wise")
            tables |= {"user": {"sharding_type": nearest}, "tag": {"sharding_type": nearest}}
        return config(self, tables)

    def schema(self):
        kinds = {
            "sum": ("sum", False),
            "mean": ("mean", False),
            "weighted sum": ("sum", True),
            "weighted mean": ("mean", True),
        }
        mixed = ["mean", "sum", "weighted mean", "weighted sum", "mean"]
        sparse = {}
        # Two tables are shared by two features each; no number of rows divides by the number of ranks.
        for i, (feature, table) in enumerate(
            [("user", "user"), ("friends", "user"), ("tags", "tag"), ("words", "word"), ("scored", "word")]
        ):
            pooling, weighted = kinds[mixed[i] if self.pooling == "mixed" else self.pooling]
            sparse[feature] = {"table": table, "pooling": pooling}
            if weighted:
                sparse[feature]["weights"] = f"{feature}_weights"
        if self.model in SEQUENCE_MODELS:
            sparse["friends"]["pooling"] = sparse["tags"]["pooling"] = "sequence"
        rows = {"user": 53, "tag": 5, "word": 23}
        more = 1 if self.ids == "managed" else 0  # the row of ids without an own row
        tables = {name: {"rows": n + more, "dim": 8, "ids": self.ids} for name, n in rows.items()}
        return Schema.parse({"labels": ["y"], "dense": ["a", "b"], "sparse": sparse, "tables": tables}, "case")


def is_possible(sharding, optimizer, kernel):
    """Return True if raytrec accepts the combination (tests/planning tests the rejected ones)."""
    columns = sharding in ("column_wise", "table_column_wise", "grid_shard")
    if columns and optimizer == "rowwise_adagrad":
        return False
    if sharding == "data_parallel" or optimizer == "adam":
        return kernel == "dense"
    return True


def _are_values_possible(values):
    """Return True if these values of all FACTORS, then EXTRAS, can be combined."""
    named = dict(zip([*FACTORS, *EXTRAS], values, strict=True))
    return is_possible(named["sharding"], named["optimizer"], named["kernel"])


def make_model_section(model, schema):
    """Return the `model` section; its sequences are shorter than the longest bags of random batches."""
    features = [*schema.dense, *schema.sparse]
    bags = [feature for feature, spec in schema.sparse.items() if spec.pooling != "sequence"]
    bottom = [6] if schema.dense else []
    return {"name": model} | {
        "dlrm": {"bottom_mlp": [6], "top_mlp": [10, 4]},
        "dcn": {"bottom_mlp": bottom, "cross_layers": 2, "cross_rank": 5, "top_mlp": [6]},
        "two_tower": {"towers": {"query": features[::2], "item": features[1::2]}, "tower_mlp": [6, 5]},
        "sequence": {"max_length": 3, "target": bags[0] if bags else None, "top_mlp": [6]},
        "dien": {"max_length": 3, "target": bags[0] if bags else None, "top_mlp": [6]},
    }[model]


def config(case, tables):
    """Return the RunConfig of a case, with `tables` as its plan."""
    ranks, _ = case.place
    # eps: see raytrec/checks/parity/compare.py
    embeddings = {"name": case.optimizer, "lr": 0.05, "eps": 1e-6}
    return RunConfig.model_validate(
        {
            "data": {"train": "unused/train", "global_batch_size": ROWS},
            "scaling": {"num_workers": ranks},
            "model": make_model_section(case.model, case.schema()),
            "optim": {"embeddings": embeddings, "dense": {"name": "sgd", "lr": 0.1}},
            "plan": {"tables": tables},
            "train": {"activation_checkpointing": case.recomputed, "max_grad_norm": case.max_grad_norm},
        }
    )


def list_all_cases():
    """Return all possible combinations of FACTORS, each with randomly drawn extras."""
    random, cases = Random(0), []
    extras_of = cache(
        lambda sharding, optimizer: [
            extras
            for extras in product(*EXTRAS.values())
            if is_possible(sharding, optimizer, dict(zip(EXTRAS, extras, strict=True))["kernel"])
        ]
    )
    for values in product(*FACTORS.values()):
        named = dict(zip(FACTORS, values, strict=True))
        if possible := extras_of(named["sharding"], named["optimizer"]):
            cases.append(Case(*values, *random.choice(possible)))
    return cases


@cache
def list_pairwise_cases():
    """Return a few cases that cover every possible pair of values of two factors or extras."""
    names = [*FACTORS, *EXTRAS]
    pool = [values for values in product(*FACTORS.values(), *EXTRAS.values()) if _are_values_possible(values)]
    pool = [Case(*values) for values in Random(1).sample(pool, 4000)]
    bits, pairs = {}, []  # each pair of values is a bit
    for case in pool:
        values = [(name, getattr(case, name)) for name in names]
        pairs.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in combinations(values, 2)))
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(pool)), key=lambda i: (pairs[i] & missing).bit_count())
        chosen.append(pool[best])
        missing &= ~pairs[best]
    return chosen


FP16_CASES = [
    Case(sharding, "mixed", optimizer, place, "unequal", dtype="fp16")
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad")
    for sharding in FACTORS["sharding"]
    for place in [(1, 1), (2, 1), (4, 2)]
    if Case(sharding, "mixed", optimizer, place, "unequal").possible
]

# Combinations with a current or former defect in TorchRec.
TORCHREC_DEFECT_CASES = [
    Case("grid_shard", "mean", "sgd", (4, 2), "equal"),
    Case("grid_shard", "mixed", "adagrad", (4, 2), "empty"),
    Case("row_wise", "mean", "sgd", (2, 1), "unequal"),
    Case("row_wise", "weighted mean", "sgd", (4, 2), "unequal"),
    Case("row_wise", "mixed", "sgd", (2, 1), "equal"),
    Case("table_row_wise", "mixed", "rowwise_adagrad", (4, 2), "empty"),
    Case("table_wise", "mean", "sgd", (3, 1), "empty", recomputed=True),
    Case("table_wise", "sum", "rowwise_adagrad", (2, 1), "unequal", max_grad_norm=0.05),
    Case("row_wise", "sum", "adagrad", (3, 1), "unequal", max_grad_norm=0.05, recomputed=True),
    Case("data_parallel", "mean", "sgd", (2, 1), "unequal", max_grad_norm=0.05, kernel="dense"),
    Case("row_wise", "weighted mean", "sgd", (3, 1), "empty", recomputed=True, model="sequence"),
]
