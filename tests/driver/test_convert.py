"""Test `raytrec convert`: a trained table of another kind or size continues to learn as before."""

import shutil

import checkpoints
import numpy as np
import pytest
import small
import torch
from plain_ids import splitmix64
from ranks import run_on_ranks
from typer.testing import CliRunner

from raytrec.checkpoint.files import get_step_folder
from raytrec.checkpoint.index import CheckpointError, read_index
from raytrec.checkpoint.rows import parse_stored_schema
from raytrec.cli import app
from raytrec.common.errors import ConfigError, SchemaError
from raytrec.driver.evaluation import convert

STEPS = 3


def draw_new_user_rows(rows):
    """Return the initial values of the rows that table user gets if it grows to `rows` rows."""
    schema = small.make_small_schema(sparse={"user": {"table": "user"}}, tables={"user": {"rows": rows, "dim": 8}})
    return small.initial_rows(schema, "user", 3, 23, rows)


def save_trained_checkpoint(rank, world, root, schema, optimizer):
    """Train three steps on these ranks and save a checkpoint."""
    from raytrec.checkpoint.restore import gather_ids
    from raytrec.checkpoint.save import CheckpointWriter
    from raytrec.checkpoint.state import LogicalState

    made = small.make_small_config(world, {"sharding_type": "row_wise"}, optimizer)
    step = small.build_step_on_rank(made, schema)
    small.train_step(step, small.make_batches(STEPS, rank, world)[1])
    state, saver = LogicalState(step.model, step.optimizer), CheckpointWriter(root, made.checkpoint)
    about = {"config": made.model_dump(by_alias=True, mode="json"), "schema": schema.to_yaml(), "data": ""}
    ids, about_ids = gather_ids(step.maps)
    about |= {"progress": checkpoints.progress_values(STEPS)} | about_ids
    saver.save(STEPS, state.tensors(), about, ids)
    assert saver.collect_outcome().error is None


def continue_training(rank, world, folder, optimizer):
    """Start from a checkpoint and train three steps; return losses, tables and managed (ids, rows)."""
    from raytrec.checkpoint.state import LogicalState
    from raytrec.embeddings.hashing import unhash_bits
    from raytrec.worker.build import begin

    schema = parse_stored_schema(read_index(folder)["about"])
    made = small.make_small_config(world, {"sharding_type": "row_wise"}, optimizer)
    made.warm_start.from_, made.warm_start.optimizer = folder, True
    step = small.build_step_on_rank(made, schema)
    begin(step, made, schema)
    local = small.make_batches(2 * STEPS, rank, world)[1][STEPS:]
    losses = [outputs.loss.item() for outputs in small.train_step(step, local)]
    parts_of = LogicalState(step.model, step.optimizer).tables
    tables = {n: {"weight": t.weight.dense()} | {k: p.dense() for k, p in t.state.items()}
              for n, t in parts_of.items()}  # fmt: skip
    held = {n: m.state().rows for n, m in step.maps.items()}
    return losses, tables, {n: (unhash_bits(e.keys), e.fields["row"].long()) for n, e in held.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoint folder by optimizer; the tables have no managed ids."""
    root = tmp_path_factory.mktemp("trained")
    for optimizer in ("rowwise_adagrad", "adam"):
        run_on_ranks(2, save_trained_checkpoint, str(root / optimizer), small.SCHEMA, optimizer)
    return {name: get_step_folder(str(root / name), STEPS) for name in ("rowwise_adagrad", "adam")}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_table_converted_to_managed_ids_learns_the_same(trained, optimizer, tmp_path):
    out = str(tmp_path / "out")
    _, lines = convert(trained[optimizer], ["user=managed"], out)
    assert lines == ["table user: ids 0 to 22 keep their rows; one more row is added for ids without a row"]
    new = checkpoints.read_tensors(out)
    assert new["ids/user/id"].tolist() == sorted(range(23), key=splitmix64)
    assert set(new["ids/user/last"].tolist()) == {-1} and set(new["ids/user/sightings"].tolist()) == {1}
    assert torch.equal(new["tables/user/weight"][23:], draw_new_user_rows(24))
    state = [v for n, v in new.items() if n.startswith("tables/user/") and "weight" not in n and v.dim()]
    assert state and not any(values[23:].any() for values in state)
    before, after = (run_on_ranks(2, continue_training, f, optimizer) for f in (trained[optimizer], out))
    assert [r[0] for r in before] == [r[0] for r in after]
    ids = torch.cat([r[2]["user"][0] for r in after])
    rows = torch.cat([r[2]["user"][1] for r in after])
    assert sorted(ids.tolist()) == list(range(23))
    for kind, values in before[0][1]["user"].items():
        assert torch.equal(after[0][1]["user"][kind][rows], values[ids]), kind
        assert after[0][1]["user"][kind].shape[0] == 24


def test_convert_hashes_plain_tables(trained, tmp_path):
    out = str(tmp_path / "out")
    convert(trained["adam"], ["user=hash"], out)
    assert checkpoints.differing_tensors(trained["adam"], out) == []
    table = parse_stored_schema(checkpoints.read_about(out)).tables["user"]
    assert (table.out_of_range, table.rows) == ("hash", 23)


@pytest.mark.parametrize("rows", [40, 140_000, 20])
def test_convert_resizes_plain_tables(trained, rows, tmp_path):
    out = str(tmp_path / "out")
    convert(trained["adam"], [f"user=resize:{rows}"], out)
    one, other = checkpoints.read_tensors(trained["adam"]), checkpoints.read_tensors(out)
    assert one.keys() == other.keys()
    assert parse_stored_schema(checkpoints.read_about(out)).tables["user"].rows == rows
    for name, values in one.items():
        expected = values
        if name.startswith("tables/user/") and values.dim():
            expected = values[:rows]
            if rows > 23:
                expected = torch.cat([values, draw_new_user_rows(rows) * name.endswith("weight")])
        assert torch.equal(other[name], expected), name


@pytest.fixture(scope="module")
def managed(tmp_path_factory):
    """Checkpoint folder of tables with managed ids, all of which have been seen: 22 in table user."""
    root = str(tmp_path_factory.mktemp("managed"))
    user = {"rows": 25, "dim": 8, "ids": {"eviction": "lfu", "fallback_rows": 2}}
    schema = small.make_small_schema(tables={"user": user, "tag": {"rows": 6, "dim": 8, "ids": "managed"}})
    run_on_ranks(2, save_trained_checkpoint, root, schema, "adagrad")
    return get_step_folder(root, STEPS)


@pytest.mark.parametrize("rows", [7, 24, 60])
def test_convert_resizes_tables_with_managed_ids(managed, rows, tmp_path):
    out = str(tmp_path / "out")
    _, (line,) = convert(managed, [f"user=resize:{rows}"], out)
    one, other = checkpoints.read_tensors(managed), checkpoints.read_tensors(out)
    stored = {kind: one[f"ids/user/{kind}"] for kind in ("id", "row", "sightings", "last")}
    columns = zip(*(values.tolist() for values in stored.values()), strict=True)
    worth = sorted(columns, key=lambda c: (-c[2], -c[3], splitmix64(c[0])))
    kept = sorted(worth[: rows - 2], key=lambda c: splitmix64(c[0]))
    assert other["ids/user/id"].tolist() == [c[0] for c in kept]
    assert other["ids/user/sightings"].tolist() == [c[2] for c in kept]
    assert ("dropped" in line) == (len(kept) < len(worth))
    old, new = torch.tensor([c[1] for c in kept]), other["ids/user/row"]
    for kind in ("weight", "sum"):
        assert torch.equal(other[f"tables/user/{kind}"][new], one[f"tables/user/{kind}"][old])
        assert torch.equal(other[f"tables/user/{kind}"][-2:], one[f"tables/user/{kind}"][-2:])
        assert torch.equal(other[f"tables/tag/{kind}"], one[f"tables/tag/{kind}"])
    free = other.get("ids/user/left", torch.empty(0)).tolist()
    told = checkpoints.read_about(out)["ids"]["user"]
    assert told["left"] == len(free) and told["rows"] == len(kept) and told["handed"] == rows - 2
    assert sorted([*new.tolist(), *free]) == list(range(rows - 2))
    losses, _, maps = run_on_ranks(1, continue_training, out, "adagrad")[0]
    assert np.isfinite(losses).all() and len(maps["user"][0]) == min(rows - 2, 23)


def test_convert_keeps_waiting_ids(tmp_path):
    user = {"rows": 25, "dim": 8, "ids": {"admit_after": 4}}
    schema = small.make_small_schema(tables=small.SMALL_SCHEMA_PARTS["tables"] | {"user": user})
    run_on_ranks(2, save_trained_checkpoint, str(tmp_path / "run"), schema, "adagrad")
    place, out = get_step_folder(str(tmp_path / "run"), STEPS), str(tmp_path / "out")
    convert(place, ["user=resize:30"], out)
    one, other = checkpoints.read_tensors(place), checkpoints.read_tensors(out)
    waiting = {name for name in one if name.startswith("ids/user/waiting_")}
    assert waiting and all(len(one[name]) for name in waiting)
    assert all(torch.equal(one[name], other[name]) for name in waiting)
    before, after = (checkpoints.read_about(each)["ids"]["user"]["waiting"] for each in (place, out))
    assert before == after


@pytest.mark.parametrize(
    "tables,message",
    [
        (["user=managed", "user=hash"], "names user twice"),
        (["usr=managed"], "did you mean 'user'"),
        (["user"], "TABLE=KIND"),
        (["user=bigger"], "managed, resize:ROWS or hash"),
        (["user=resize:"], "resize:100000"),
        (["user=resize:0"], "resize:100000"),
        (["user=resize:23"], "it already has 23 rows"),
        ([], "--table is missing"),
    ],
)
def test_convert_rejects_invalid_table_arguments(trained, tables, message, tmp_path):
    with pytest.raises((ConfigError, SchemaError)) as error:
        convert(trained["adam"], tables, str(tmp_path / "out"))
    assert message in str(error.value) and not (tmp_path / "out").exists()


def test_convert_rejects_impossible_conversions(managed, trained, tmp_path):
    out = str(tmp_path / "hashed")
    convert(trained["adam"], ["user=hash"], out)
    for place, table, why in (
        (managed, "user=managed", "already managed"),
        (managed, "user=hash", "whether its ids were text"),
        (managed, "user=resize:2", "all of its rows would be fallback rows"),
        (out, "user=hash", "already hashed"),
        (out, "user=managed", "hashed to it"),
        (out, "user=resize:30", "different rows in a table of another size"),
    ):
        with pytest.raises(SchemaError, match=why):
            convert(place, [table], str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="already contains a checkpoint"):
        convert(trained["adam"], ["user=managed"], out)


def test_convert_rejects_damaged_checkpoint(trained, tmp_path):
    place = shutil.copytree(trained["adam"], tmp_path / "step-0000000003")
    file = max(place.glob("*.bin"), key=lambda path: path.stat().st_size)
    checkpoints.flip_lowest_bit(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="checksum"):
        convert(str(place), ["user=managed"], str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*"))


def test_convert_command_prints_its_changes(trained, tmp_path):
    arguments = ["convert", trained["adam"], "--table", "user=managed", "--table", "tag=resize:9"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "table tag keeps its first 5 rows and gets 4 newly initialized rows" in done.output
    assert f"--warm-start {tmp_path / 'out'}" in done.output
