"""Randomly drawn tables, features and rows for tests of lookups, and the expected results."""

import torch
from hypothesis import strategies as st

from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.data.assembler import AssembledTensors, Bags
from raytrec.embeddings.hashing import ids_to_keys
from raytrec.scoring.lookups import IdRows, pool_bags
from raytrec.scoring.stored_tables import PRECISIONS


@st.composite
def models(draw):
    """Draw (features, table → stored rows, table → rows of managed ids, precision)."""
    names = [f"t{i}" for i in range(draw(st.integers(1, 4)))]
    tables = {n: {"rows": draw(st.integers(8, 20)), "dim": draw(st.sampled_from([4, 8]))} for n in names}
    for table in tables.values():
        if draw(st.booleans()):
            table["ids"] = {"admit_after": 1, "fallback_rows": 2}
    sparse, sequences = {}, {}
    for place in range(draw(st.integers(1, 7))):
        spec = {"table": draw(st.sampled_from(names)), "pooling": draw(st.sampled_from(["sum", "mean", "sequence"]))}
        if spec["pooling"] == "sequence":
            sequences[f"f{place}"] = 3
        elif draw(st.integers(0, 3)) == 0:
            spec["weights"] = f"w{place}"
        sparse[f"f{place}"] = spec
    used = {spec["table"] for spec in sparse.values()}
    tables = {name: table for name, table in tables.items() if name in used}
    schema = Schema.parse({"labels": ["y"], "dense": [], "sparse": sparse, "tables": tables}, "the test")
    precision = PRECISIONS[draw(st.sampled_from(list(PRECISIONS)))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    stored = {n: precision.encode(torch.randn(t.rows, t.dim, generator=generator)) for n, t in schema.tables.items()}
    ids = {}
    for name in schema.managed:
        keys = ids_to_keys(torch.arange(5)).sort().values
        ids[name] = IdRows(schema.tables[name], keys, torch.randperm(5, generator=generator))
    return Features(schema, sequences), stored, ids, precision


def draw_rows(draw, features):
    """Draw (assembled rows, names of the features to look up); features that are not needed have no ids."""
    schema, count, few = features.schema, draw(st.integers(1, 4)), draw(st.booleans())
    needed = [name for name in schema.sparse if draw(st.integers(0, 5))]
    ids, weights, lengths = [], [], []
    for name, spec in schema.sparse.items():
        for _ in range(count):
            length = 0 if name not in needed else 1 if few else draw(st.integers(0, 3))
            rows = 2**40 if schema.tables[spec.table].ids else schema.tables[spec.table].rows
            ids += draw(st.lists(st.integers(0, rows - 1), min_size=length, max_size=length))
            weights += [draw(st.integers(1, 9)) / 4 for _ in range(length)]
            lengths.append(length)
    counts = [sum(lengths[i * count : (i + 1) * count]) for i in range(len(schema.sparse))]
    lengths = torch.tensor(lengths, dtype=torch.int32)
    weights = torch.tensor(weights) if schema.has_weights else None
    bags = Bags(features.keys, torch.tensor(ids, dtype=torch.int64), weights, lengths, counts, count)
    none = torch.empty(count, 0)
    return AssembledTensors(none, bags, none, none, None, None, None, None, None), needed


def look_up_one_by_one(features, stored, ids, precision, rows, needed):
    """Return the inputs of each feature, each read from a separate table."""
    bags, inputs = rows.bags, {("dense", ""): rows.dense}
    weights = [None] * len(bags.keys) if bags.weights is None else bags.weights.split(bags.counts)
    parts = zip(bags.keys, bags.ids.split(bags.counts), bags.lengths.view(len(bags.keys), -1), weights, strict=True)
    for name, ids_N, lengths_B, weights_N in parts:
        spec = features.schema.sparse[name]
        if name not in needed:
            continue
        rows_N = ids[spec.table](ids_N) if spec.table in ids else ids_N
        vectors = precision.decode(stored[spec.table][rows_N])
        if name in features.sequences:
            present = torch.arange(features.sequences[name]) < lengths_B.unsqueeze(1)
            padded = torch.zeros(*present.shape, vectors.shape[1])
            padded[present] = vectors
            inputs |= {("present", name): present, ("vectors", name): padded}
            continue
        own_weights = weights_N if spec.weights else None
        vectors = vectors if own_weights is None else vectors * own_weights.unsqueeze(1)
        inputs["bag", name] = pool_bags(vectors, lengths_B, own_weights, features.is_mean(name))
    return inputs
