"""Sampled ids: distribution, exclusions, and independence of the rank that reads a row."""

import math
from collections import Counter

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from reading import DirectStream
from reading import parse_transforms as parse

from raytrec.common.errors import ConfigError, DataError
from raytrec.config.features import Features, resolve_input_columns, select_needed_transforms, set_draw_rows
from raytrec.config.run_config import RunConfig
from raytrec.data import transform
from raytrec.data.fragments import scan
from raytrec.data.order import Order, Part
from raytrec.data.read_plans import ReadPlan
from raytrec.data.stream import Stream
from raytrec.data.transform import Draw, apply_transforms
from raytrec.driver.datasets import check_sample_counts
from raytrec.prediction.inputs import CarriedColumns, SpanOrder, assign_spans, cut_spans

SPARSE = {"row": {"table": "row"}, "negatives": {"table": "tag", "pooling": "sequence"}}
TABLES = {"row": {"rows": 10_000, "dim": 8}, "tag": {"rows": 200, "dim": 8}}
SCHEMA = parquet.tiny_schema(SPARSE, TABLES)


def make_transform(**changes):
    values = {"do": "sample", "column": "negatives", "count": 5, "rows": 200, "exclude": ["tags", "user"]}
    return parse([values | changes])[0]


def draw_negatives(table, draw=Draw((3, 0), 0), **changes):
    """Return the ids drawn for each row."""
    return apply_transforms(table, (make_transform(**changes),), "test", draw=draw)["negatives"].to_pylist()


def test_draws_are_uniform_over_ids_that_are_not_excluded():
    table = pa.table({"tags": [[1, 4, 1], None, [0, 7], [None, 9]], "user": [2, None, 8, 0]})
    table = pa.concat_tables([table] * 3000).combine_chunks()
    found = draw_negatives(table, count=3, rows=8)
    assert all(len(ids) == 3 for ids in found)
    allowed = [{0, 3, 5, 6, 7}, set(range(8)), set(range(1, 7)), set(range(1, 8))]
    for row, ids in enumerate(allowed):
        counts = Counter(i for own in found[row::4] for i in own)
        assert set(counts) == ids
        mean = 9000 / len(ids)
        assert all(abs(count - mean) < 5 * mean**0.5 for count in counts.values())
    both = Counter((own[0], own[1]) for own in found[1::4])
    assert len(both) == 64 and max(both.values()) < 3000 / 64 + 6 * (3000 / 64) ** 0.5


def test_draws_differ_by_row_epoch_seed_and_column(monkeypatch):
    table = pa.table({"tags": [[i] for i in range(60)], "user": range(60)})
    one = draw_negatives(table, rows=10**9)
    assert len({i for own in one for i in own}) == 300
    others = [Draw((3, 1)), Draw((4, 0)), Draw(), Draw((0, 3)), Draw((3, 0), 60)]
    values = [draw_negatives(table, draw, rows=10**9) for draw in others] + [
        apply_transforms(table, (make_transform(column="b", rows=10**9),), "t", draw=Draw((3, 0)))["b"].to_pylist()
    ]
    seen = [{i for own in each for i in own} for each in [one, *values]]
    assert len(set.union(*seen)) == 7 * 300
    assert draw_negatives(table.slice(20), Draw((3, 0), 20), rows=10**9) == one[20:], "draws depend on the row number"
    assert [own[:2] for own in one] == draw_negatives(table, count=2, rows=10**9)
    monkeypatch.setattr(transform, "MAX_IDS_PER_DRAW", 12)
    assert draw_negatives(table, rows=10**9) == one


def test_excluded_columns_can_be_null_but_not_text():
    table = pa.table({"tags": [[-3, 900, 2**40], [0, 1, 2]], "user": pa.array([1, 0], pa.uint64())})
    assert all(own in (0, 2) for own in draw_negatives(table, rows=3)[0])
    assert draw_negatives(table, rows=3)[1] == []
    nothing = pa.table({"x": [1, 2], "tags": pa.nulls(2), "user": pa.nulls(2, pa.int32())})
    assert [len(own) for own in draw_negatives(nothing)] == [5, 5]
    assert [len(own) for own in draw_negatives(nothing, exclude=[])] == [5, 5]
    with pytest.raises(DataError, match="draws ids of type int64, but user has type string") as error:
        draw_negatives(pa.table({"tags": [[1]], "user": ["a"]}))
    assert "set vocabulary to a file of ids" in str(error.value) and "TypeError" not in str(error.value)
    only_training = {"in_evaluations": False, "exclude": []}
    assert draw_negatives(nothing, Draw(), **only_training) == [[], []]
    assert draw_negatives(nothing, **only_training) == draw_negatives(nothing, exclude=[])


def test_ids_are_drawn_from_a_vocabulary(tmp_path):
    text, numbers = tmp_path / "text.txt", tmp_path / "numbers.parquet"
    text.write_text("a\nb\nc\nd\n")
    pq.write_table(pa.table({"id": pa.array([10**15, -3, 7, 9], pa.int64())}), numbers)
    table = pa.table({"tags": [["a", "zz"], None, ["a", "b", "c", "d"]] * 40, "user": ["b", "c", None] * 40})
    found = draw_negatives(table, rows=None, vocabulary=str(text))
    assert [{i for own in found[row::3] for i in own} for row in range(3)] == [{*"cd"}, {*"abd"}, set()]
    table = pa.table({"tags": [[-3, 8]] * 40, "user": pa.array([10**15] * 40, pa.int64())})
    assert {i for own in draw_negatives(table, rows=None, vocabulary=str(numbers)) for i in own} == {7, 9}
    assert len(set(draw_negatives(table, rows=None, vocabulary=str(text), exclude=[])[0])) > 1
    with pytest.raises(DataError, match="draws ids of type int64, but name has type string"):
        both = table.append_column("name", pa.array(["a"] * 40))
        draw_negatives(both, rows=None, vocabulary=str(numbers), exclude=["user", "name"])


def test_ids_are_drawn_by_frequency(tmp_path):
    items, counts = tmp_path / "items.parquet", [8, 0, 1, 4, 3]
    pq.write_table(pa.table({"id": [7, 8, 9, 10, 11], "count": counts, "none": [0] * 5}), items)
    table = pa.table({"tags": [[7], None, [10, 7, 99], [9, 10, 11, 7]] * 4000})
    keys = {"rows": None, "vocabulary": str(items), "frequency": "count", "exclude": ["tags"], "count": 3}
    for power in (1.0, 0.5):
        chances = {i: c**power for i, c in zip(range(7, 12), counts, strict=True) if c}
        made = make_transform(**keys, power=power, log_share="share")
        found = apply_transforms(table, (made,), "test", draw=Draw((3, 0), 0))
        of_rows, shares = found["negatives"].to_pylist(), found["share"].to_pylist()
        for row, excluded in enumerate([{7}, set(), {7, 10}]):
            times = Counter(i for own in of_rows[row::4] for i in own)
            left = {i: c for i, c in chances.items() if i not in excluded}
            assert set(times) == set(left)
            for i, chance in left.items():
                mean = 12_000 * chance / sum(left.values())
                assert abs(times[i] - mean) < 5 * mean**0.5, (power, row, i)
        assert not any(of_rows[3::4])
        expected = {i: math.log(chance / sum(chances.values()) * 5) for i, chance in chances.items()}
        for ids, of_row in zip(of_rows, shares, strict=True):
            assert of_row == pytest.approx([expected[i] for i in ids], abs=1e-9)
    with pytest.raises(DataError, match=r"column none of .*is 0; expected a positive"):
        draw_negatives(table, **keys | {"frequency": "none"})


@pytest.mark.parametrize(
    "keys,why",
    [
        ({"rows": 200, "vocabulary": "x"}, "not both"),
        ({"rows": 200, "count": "all"}, "cannot be set with count: all"),
        ({"vocabulary": "ids.txt", "frequency": "count"}, "frequency requires a Parquet vocabulary"),
        ({"vocabulary": "ids.parquet", "power": 0.5}, "power is set, but frequency is not"),
        ({"vocabulary": "ids.parquet", "log_share": "share"}, "log_share is set, but frequency is not"),
    ],
)
def test_invalid_sample_options_are_rejected(keys, why):
    with pytest.raises(ValueError, match=why):
        make_transform(**{"rows": None} | keys)


def test_uri_of_a_vocabulary_may_have_a_query():
    vocabulary = "s3://bucket/ids.parquet?region=eu-west-1"
    assert make_transform(rows=None, vocabulary=vocabulary, frequency="count").vocabulary == vocabulary


def test_draw_rows_default_to_the_rows_of_the_table():
    made = set_draw_rows(parse([{"do": "sample", "column": "negatives", "count": 5}]), SCHEMA)
    assert made == (make_transform(exclude=[]),)
    assert set_draw_rows((make_transform(rows=7),), SCHEMA) == (make_transform(rows=7),)
    with pytest.raises(ConfigError, match="no feature of the schema reads this column"):
        set_draw_rows((make_transform(rows=None, column="other"),), SCHEMA)
    managed = parquet.tiny_schema(SPARSE, TABLES | {"tag": {"rows": 200, "dim": 8, "ids": "managed"}})
    with pytest.raises(ConfigError, match="its ids are managed") as error:
        set_draw_rows((make_transform(rows=None),), managed)
    assert "vocabulary: FILE" in str(error.value)


def test_input_columns_of_samples_are_resolved():
    made = (make_transform(), make_transform(column="others", exclude=["late"]))
    assert resolve_input_columns(made[:1], ["negatives", "price"]) == ["price", "tags", "user"]
    assert select_needed_transforms(made, ["others"]) == (made[1],)


def collect_negatives(data, order, world=1, epoch=0, start_step=0, kind=DirectStream, **readers):
    """Return the ids drawn for each row, over the batches of all ranks."""
    found = {}
    for rank in range(world):
        for batch in kind(data, order, rank=rank, world=world, **readers).batches(epoch, start_step):
            rows = batch.sparse["row"].values().tolist()
            ids = batch.sparse["negatives"].to_dense()
            found |= {row: own.tolist() for row, own in zip(rows, ids, strict=False)}
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = parquet.write_split(tmp_path_factory.mktemp("drawn") / "d", 1003, 0, 90)
    return scan(str(folder), ReadPlan(SCHEMA, transforms=(make_transform(rows=None),)))


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["none", "groups", "window"])
def test_draws_do_not_depend_on_ranks_or_file_layout(data, tmp_path, shuffle):
    order = Order(128, 6, shuffle, 2, seed=3)
    one = collect_negatives(data, order)
    assert len(one) == 1003 and all(len(own) == 5 for own in one.values())
    assert collect_negatives(data, order, world=3) == one
    rest = collect_negatives(data, order, world=2, start_step=5)
    assert rest and rest == {row: one[row] for row in rest}
    again = collect_negatives(data, order, epoch=1)
    assert sum(again[row] == one[row] for row in one) < 10
    folder = parquet.write_split(tmp_path / "d", 1003, 0, 77, files=3)
    other = scan(str(folder), ReadPlan(SCHEMA, transforms=(make_transform(),)))
    assert collect_negatives(other, Order(60, 7, "window", 3, seed=3), world=2) == one


def test_evaluation_and_prediction_draw_the_same_ids(data):
    found = [collect_negatives(data, Order.evaluation(size, 6), world) for size, world in ((100, 1), (64, 2))]
    assert found[0] == found[1]
    spans = cut_spans(data, 50, 200)
    predicted = collect_negatives(data, SpanOrder(assign_spans(spans, 1, 50), 50))
    assert predicted == found[0] != collect_negatives(data, Order(100, 6))
    part = Part(data.groups[2].path, data.groups[2].index, 10, 5, 190)
    reserved = CarriedColumns(("negatives", "row"), (make_transform(),)).read(part)
    assert reserved["row"].to_pylist() == list(range(190, 195))
    assert reserved["negatives"].to_pylist() == [found[0][row] for row in range(190, 195)]


@pytest.fixture(scope="module")
def data_with_all_ids(tmp_path_factory):
    every = (make_transform(rows=None, count="all", exclude=[]),)
    folder = parquet.write_split(tmp_path_factory.mktemp("all") / "d", 1003, 0, 90)
    return scan(str(folder), ReadPlan(SCHEMA, transforms=set_draw_rows(every, SCHEMA)))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_count_all_draws_every_id_in_each_global_batch(data_with_all_ids, world):
    features = Features(SCHEMA, {"negatives": 2})
    order = Order(128, 6, "window", 2, seed=3)
    place = {"world": world, "features": features}
    ranks = [DirectStream(data_with_all_ids, order, rank=r, train=True, **place).batches() for r in range(world)]
    for parts in zip(*ranks, strict=True):  # the last step has 107 rows
        ids = [batch.sparse["negatives"].values() for batch in parts]
        assert torch.cat(ids).sort().values.tolist() == list(range(200))
        assert len({batch.sparse.stride() for batch in parts}) == 1
        for batch in parts:
            assert batch.sparse["negatives"].lengths().max() <= 2
            assert batch.sparse["row"].values().numel() == int(batch.weights.sum())
    evaluated = DirectStream(data_with_all_ids, Order.evaluation(128, 6), rank=0, **place).batches()
    assert not any(batch.sparse["negatives"].values().numel() for batch in evaluated)


def test_too_small_max_negatives_is_rejected_before_the_run(data_with_all_ids):
    model = {"name": "mf", "user": "row", "item": "row", "negatives": "negatives"}

    def check(batch, most):
        values = {"data": {"train": "d/train", "global_batch_size": batch}}
        config = RunConfig.model_validate(values | {"model": model | {"max_negatives": most}})
        check_sample_counts(config, SCHEMA, data_with_all_ids)

    check(128, 2)
    check(200, 1)
    check(100_000, 1)  # all 1003 rows
    with pytest.raises(ConfigError, match=r"each row gets 2 ids of negatives .*reads at most 1 per row") as caught:
        check(128, 1)
    assert "model.max_negatives=2" in str(caught.value)


@pytest.mark.usefixtures("ray_cluster")
def test_draws_are_the_same_through_ray(data):
    order = Order(128, 6, "window", 2, seed=3)
    assert collect_negatives(data, order, 2, 1, kind=Stream, readers=2) == collect_negatives(data, order, epoch=1)
