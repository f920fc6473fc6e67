"""Lookups in table shards over Arrow Flight, without Ray: equal results, missing shards, and refused requests."""

import pytest
import torch
from drawn_lookups import draw_rows, look_up_one_by_one, models
from hypothesis import given, settings
from hypothesis import strategies as st
from table_shards import local_shards

from raytrec.scoring.lookups import RowStack
from raytrec.scoring.manifest import Manifest, StackEntry
from raytrec.scoring.precisions import PRECISIONS


@pytest.fixture(scope="module")
def shards():
    with local_shards(3) as shards:
        yield shards


def serve_drawn_tables(shards, features, stored, precision):
    """Serve drawn tables, of each dim as a stack, and return a manifest."""
    by_dim = {}
    for name, table in features.schema.tables.items():
        by_dim.setdefault(table.dim, []).append(name)
    name = next(each for each, known in PRECISIONS.items() if known == precision)
    entries = [StackEntry(tables=names, precision=name, block_rows=100, files=["x"]) for names in by_dim.values()]
    manifest = Manifest.model_construct(
        data_schema=features.schema, sequences=features.sequences, stacks=entries, files={}, binding="b"
    )
    manifest.source = SOURCE
    stacks = [RowStack(torch.cat([stored[name] for name in names]), precision) for names in by_dim.values()]
    shards.serve_stacks(manifest.version, stacks, manifest.stack_shapes)
    return manifest


class SOURCE:
    run, step = "run", 3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lookups_in_shards_equal_lookups_one_by_one(shards, data):
    features, stored, ids, precision = data.draw(models())
    manifest = serve_drawn_tables(shards, features, stored, precision)
    lookups = shards.make_lookups("", manifest, ids, cache_bytes=data.draw(st.sampled_from([0, 200, 10**6])))
    for _ in range(4):
        rows, needed = draw_rows(data.draw, features)
        found, expected = lookups(rows, needed), look_up_one_by_one(features, stored, ids, precision, rows, needed)
        assert found.keys() == expected.keys()
        for (kind, name), values in expected.items():
            torch.testing.assert_close(found[kind, name], values, rtol=1e-6, atol=1e-6)
            has_one_id = (
                (rows.bags.lengths.view(len(rows.bags.keys), -1)[rows.bags.keys.index(name)] == 1).all()
                if name
                else True
            )
            if has_one_id or kind != "bag":
                assert torch.equal(found[kind, name], values), name
